"""The errors of dials that take too long: they name the addresses that had failed by then."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from p2pavg.errors import UnreachableError
from p2pavg.net.dialling import Dialler, timed_out


async def dial_one(_: str, address: str) -> None:
    """Refuse the address ``refused``, and never answer at any other."""
    if address == "refused":
        raise UnreachableError("connection refused")
    await trio.sleep_forever()


async def failed_within(dialler: Dialler, seconds: float) -> list[str]:
    failed: list[str] = []
    with trio.move_on_after(seconds):
        await dialler.connect("peer", ["refused", "silent"], failed=failed)
    return failed


async def test_dials_that_failed_before_the_timeout_are_named(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        dialler = Dialler(nursery, lambda _: False, dial_one)
        assert await failed_within(dialler, 5.0) == ["refused: connection refused"]


async def test_a_call_that_waits_for_the_dial_of_another_names_them_too(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        dialler = Dialler(nursery, lambda _: False, dial_one)
        nursery.start_soon(failed_within, dialler, 60.0)
        await trio.sleep(1.0)
        assert await failed_within(dialler, 5.0) == ["refused: connection refused"]
        nursery.cancel_scope.cancel()


def test_the_error_has_the_reasons() -> None:
    assert str(timed_out("stream to peer", 5.0, [])) == "no stream to peer within 5.0 s"
    assert (
        str(timed_out("stream to peer", 5.0, ["a: b", "c: d"]))
        == "no stream to peer within 5.0 s: a: b; c: d"
    )
