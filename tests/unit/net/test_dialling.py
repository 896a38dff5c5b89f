"""The errors of dials that take too long: they name the addresses that had failed by then."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from p2pavg.base.errors import UnreachableError
from p2pavg.net.dialling import Dialler, timed_out


class Dials:
    """Connections of which there is none: the address ``refused`` refuses, and any other one never answers."""

    def is_connected(self, peer_id: str) -> bool:
        return False

    async def dial_one(self, peer_id: str, address: str) -> None:
        if address == "refused":
            raise UnreachableError("connection refused")
        await trio.sleep_forever()


class SecondDials(Dials):
    """The second dial is answered."""

    def __init__(self) -> None:
        self.dialled: list[float] = []

    def is_connected(self, peer_id: str) -> bool:
        return len(self.dialled) == 2

    async def dial_one(self, peer_id: str, address: str) -> None:
        self.dialled.append(trio.current_time())
        if len(self.dialled) == 1:
            await trio.sleep_forever()


async def failed_within(dialler: Dialler, seconds: float) -> list[str]:
    failed: list[str] = []
    with trio.move_on_after(seconds):
        await dialler.connect("peer", ["refused", "silent"], failed=failed)
    return failed


async def give_time(scope: trio.CancelScope) -> None:
    await trio.sleep(1.0)
    scope.deadline += 3.0


async def test_dials_that_failed_before_the_timeout_are_named(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        dialler = Dialler(nursery, Dials())
        assert await failed_within(dialler, 5.0) == ["refused: connection refused"]


async def test_a_call_that_waits_for_the_dial_of_another_names_them_too(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        dialler = Dialler(nursery, Dials())
        nursery.start_soon(failed_within, dialler, 60.0)
        await trio.sleep(1.0)
        assert await failed_within(dialler, 5.0) == ["refused: connection refused"]
        nursery.cancel_scope.cancel()


async def test_a_caller_that_was_given_more_time_dials_again(autojump_clock: MockClock) -> None:
    """A search for a lane is, on a busy machine. The dial had the time that the caller had when it began."""
    dials = SecondDials()
    async with trio.open_nursery() as nursery:
        dialler = Dialler(nursery, dials)
        began = trio.current_time()
        with trio.move_on_after(3.0) as scope:
            nursery.start_soon(give_time, scope)
            await dialler.connect("peer", ["silent"], wait_inbound=True)
        assert not scope.cancelled_caught
        assert [at - began for at in dials.dialled] == [0.0, 3.0]


def test_the_error_has_the_reasons() -> None:
    assert str(timed_out("stream to peer", 5.0, [])) == "no stream to peer within 5.0 s"
    assert (
        str(timed_out("stream to peer", 5.0, ["a: b", "c: d"]))
        == "no stream to peer within 5.0 s: a: b; c: d"
    )
