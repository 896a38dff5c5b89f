"""Work off the event loop: one function at a time, in a thread of its own."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import trio
import trio.testing

from p2pavg.base.threads.workers import Workers
from tests.programs import run_python

WATCHDOG_SECONDS = 120.0


async def test_results_and_exceptions() -> None:
    workers = Workers()
    assert await workers.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await workers.run(divmod, 7, 0)
    assert await workers.run(int) == 0


async def test_functions_run_one_at_a_time() -> None:
    workers = Workers()
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        inside.append(number)
        most.append(len(inside))
        torch.ones(10_000).sum()
        inside.remove(number)

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(workers.run, work, number)
    assert most == [1] * 20


async def test_a_cancelled_caller_waits_for_a_running_function() -> None:
    workers = Workers()
    started, release = trio.Event(), threading.Event()
    finished: list[bool] = []
    token = trio.lowlevel.current_trio_token()

    def work() -> None:
        token.run_sync_soon(started.set)
        assert release.wait(WATCHDOG_SECONDS)
        finished.append(True)

    async def call() -> None:
        try:
            await workers.run(work)
        finally:
            assert finished, "the function's arguments may be gone already"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await started.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
        release.set()
    assert finished == [True]


async def test_a_cancelled_caller_does_not_wait_for_its_turn() -> None:
    workers = Workers()
    started, release = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    ran: list[bool] = []

    def work() -> None:
        token.run_sync_soon(started.set)
        assert release.wait(WATCHDOG_SECONDS)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(workers.run, work)
        await started.wait()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as waiting:
                waiting.start_soon(workers.run, ran.append, True)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        release.set()
    assert await workers.run(int) == 0
    assert ran == []


async def test_no_function_begins_for_a_cancelled_caller() -> None:
    workers = Workers()
    begun: list[bool] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await workers.run(begun.append, True)
    assert scope.cancelled_caught
    await workers.run(int)  # the functions before it have run
    assert begun == []


async def test_a_closed_worker_refuses_functions() -> None:
    workers = Workers()
    assert await workers.run(int) == 0
    workers.close()
    with pytest.raises(RuntimeError, match="closed"):
        await workers.run(int)


AFTER_THE_MAIN_THREAD = """
import concurrent.futures.thread, threading, trio
from p2pavg.base.threads.workers import Workers

def work():
    workers = Workers()
    print(trio.run(workers.run, divmod, 7, 2))
    threading.main_thread().join()
    print(trio.run(workers.run, divmod, 9, 2))
    print(trio.run(Workers().run, divmod, 11, 2))

threading.Thread(target=work).start()
"""


def test_a_worker_of_another_thread_goes_on_when_the_main_thread_has_ended() -> None:
    """The pools of concurrent.futures would refuse it: cannot schedule new futures after interpreter shutdown."""
    done = run_python("-W", "error", "-c", AFTER_THE_MAIN_THREAD, timeout=WATCHDOG_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["(3,", "1)", "(4,", "1)", "(5,", "1)"]


async def test_closing_ends_the_thread() -> None:
    workers = Workers()
    thread = await workers.run(threading.current_thread)
    assert thread.is_alive()
    del workers
    gc.collect()
    await trio.to_thread.run_sync(thread.join, WATCHDOG_SECONDS)
    assert not thread.is_alive()
