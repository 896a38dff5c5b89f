from __future__ import annotations

import threading

import pytest
import trio

from p2pavg.testing.loops import LoopThread


def loop_threads() -> list[threading.Thread]:
    """Return the threads of simulated training loops that live."""
    return [thread for thread in threading.enumerate() if thread.name == "simulated training"]


async def sleep_in_nursery() -> None:
    """Sleep where a cancellation arrives as a group of exceptions."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        await trio.sleep_forever()


@pytest.mark.parametrize("function", [trio.sleep_forever, sleep_in_nursery])
async def test_a_cancelled_loop_leaves_no_thread(function: object, autojump_clock: trio.abc.Clock) -> None:
    with trio.move_on_after(1.0) as scope:
        await LoopThread(lambda thread: thread.call(function)).run()  # type: ignore[arg-type]
    assert scope.cancelled_caught
    assert not loop_threads()


async def test_a_loop_gets_the_error_of_its_call_and_goes_on(autojump_clock: trio.abc.Clock) -> None:
    async def fail() -> None:
        raise OSError("the disk is full")

    def train(thread: LoopThread[str]) -> str:
        with pytest.raises(OSError, match="the disk is full"):
            thread.call(fail)
        return "went on"

    assert await LoopThread(train).run() == "went on"
