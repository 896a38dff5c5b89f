"""On streams, averages wait for contributions, and not for a receiver that does not read."""

from __future__ import annotations

import trio
import trio.testing
from trio.testing import MockClock

from p2pavg.allreduce.movers.stream_driver import Precedence
from p2pavg.base.limits import GLANCE_SECONDS


async def waited(precedence: Precedence) -> float:
    began = trio.current_time()
    with trio.fail_after(60.0):
        await precedence.until_free()
    return trio.current_time() - began


async def contribute(precedence: Precedence, seconds: float, pieces: int) -> None:
    with precedence.contributing():
        for _ in range(pieces):
            await trio.sleep(seconds / pieces)
            precedence.moved()


async def test_averages_wait_until_the_last_contribution_has_gone(autojump_clock: MockClock) -> None:
    precedence = Precedence()
    assert await waited(precedence) == 0.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(contribute, precedence, 2.0, 20)
        nursery.start_soon(contribute, precedence, 3.0, 30)
        await trio.testing.wait_all_tasks_blocked()
        assert abs(await waited(precedence) - 3.0) < 1e-6
    assert await waited(precedence) == 0.0


async def test_a_receiver_that_does_not_read_holds_up_no_other(autojump_clock: MockClock) -> None:
    """Once, and for a bounded time: the averages are many parts."""
    precedence = Precedence()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(contribute, precedence, 1000.0, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert await waited(precedence) <= 4 * GLANCE_SECONDS
        assert await waited(precedence) == 0.0
        nursery.cancel_scope.cancel()
    assert await waited(precedence) == 0.0


async def test_a_slow_contribution_that_moves_is_waited_for(autojump_clock: MockClock) -> None:
    precedence = Precedence()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(contribute, precedence, 1000.0, 1)
        nursery.start_soon(contribute, precedence, 5.0, 20)
        await trio.testing.wait_all_tasks_blocked()
        assert 5.0 <= await waited(precedence) <= 5.0 + 4 * GLANCE_SECONDS
        nursery.cancel_scope.cancel()
