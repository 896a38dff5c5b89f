"""Work in threads that end with their call, and their calls to the event loop."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trio
import trio.testing

from p2pavg.base.threads.workers import NICENESS, ToLoop, Workers, in_own_thread

WATCHDOG_SECONDS = 120.0
NAME = "a thread of a test"

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")


def never() -> None:
    raise AssertionError("the caller was not cancelled")


def own(work: Callable[[], Any], stop: Callable[[], None]) -> Any:
    return in_own_thread(work, stop=stop, name=NAME)


class Blocks:
    """Work that blocks until it is stopped."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.stops = 0
        self.finished = False
        self.thread: threading.Thread | None = None
        self._token = trio.lowlevel.current_trio_token()
        self._go_on = threading.Event()

    def __call__(self) -> None:
        self.thread = threading.current_thread()
        self._token.run_sync_soon(self.started.set)
        assert self._go_on.wait(WATCHDOG_SECONDS)
        self.finished = True

    def stop(self) -> None:
        self.stops += 1

    def let_go(self) -> None:
        self._go_on.set()


async def test_the_result_is_returned() -> None:
    here = threading.get_ident()
    assert await own(lambda: (threading.get_ident() != here, 7), never) == (True, 7)
    assert await own(lambda: None, never) is None


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)], ids=["an error", "an exit"])
async def test_the_exception_is_raised_in_the_caller(error: BaseException) -> None:
    threads: list[threading.Thread] = []

    def work() -> None:
        threads.append(threading.current_thread())
        raise error

    with pytest.raises(type(error)) as found:
        await own(work, never)
    assert found.value is error
    assert not threads[0].is_alive()


async def test_the_thread_has_ended_when_the_call_returns() -> None:
    for _ in range(50):
        thread = await own(threading.current_thread, never)
        assert thread.name == NAME
        assert thread.daemon, "a process that ends must not wait for the thread"
        assert not thread.is_alive()
    assert NAME not in [thread.name for thread in threading.enumerate()]


async def test_a_cancelled_caller_stops_the_work_once_and_waits() -> None:
    work = Blocks()
    ended: list[bool] = []

    async def call() -> None:
        try:
            await own(work, work.stop)
        finally:
            ended.append(work.finished)

    with trio.fail_after(WATCHDOG_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await work.started.wait()
            assert work.stops == 0
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
                seen = (work.stops, list(ended))
                work.let_go()
    assert seen == (1, []), "the thread's arguments must stay valid"
    assert ended == [True]
    assert work.stops == 1
    assert work.thread is not None
    assert not work.thread.is_alive()


async def test_a_cancelled_caller_gets_neither_result_nor_exception() -> None:
    """The caller raises Cancelled, whether the work returned or raised."""
    started, stopped = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def work() -> None:
        token.run_sync_soon(started.set)
        assert stopped.wait(WATCHDOG_SECONDS)
        raise ValueError("stopped")

    with trio.fail_after(WATCHDOG_SECONDS), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own, work, stopped.set)
            await started.wait()
            scope.cancel()
    assert scope.cancelled_caught


async def test_no_work_begins_for_a_cancelled_caller() -> None:
    begun: list[object] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await own(lambda: begun.append(1), never)
    assert scope.cancelled_caught
    assert begun == []


async def test_a_thread_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError) as found:
            await own(lambda: None, never)
    assert str(found.value) == "can't start new thread"


async def test_each_call_has_its_own_thread() -> None:
    """No call waits for its turn, because the lanes of a group wait for each other."""
    together = threading.Barrier(5)
    met: list[int] = []

    async def call() -> None:
        met.append(await own(lambda: together.wait(WATCHDOG_SECONDS), never))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(call)
    assert sorted(met) == list(range(5))


async def test_torch_uses_one_thread_inside_and_is_unchanged_outside() -> None:
    """This also holds if several calls begin at once, and in threads that begin later."""

    async def one() -> None:
        assert await own(lambda: torch.ones(10**6).sum() and torch.get_num_threads(), never) == 1

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(one)
        assert await Workers().run(torch.get_num_threads) == 1
        assert torch.get_num_threads() == 3
        seen: list[int] = []
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert seen == [3]
    finally:
        torch.set_num_threads(before)


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@on_linux
async def test_worker_threads_have_a_lower_priority() -> None:
    """Only these threads do so, because trio lends its own threads to other callers."""
    before = niceness()
    for inside in (await own(niceness, never), await Workers().run(niceness)):
        assert inside == NICENESS or inside >= before > NICENESS, (
            "the test run may have a lower priority already"
        )
    assert niceness() == await trio.to_thread.run_sync(niceness) == before


@on_linux
async def test_an_even_lower_priority_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda _which, _who: 19)
    monkeypatch.setattr(os, "setpriority", lambda _which, _who, value: asked.append(value))
    await own(lambda: None, never)
    assert [value for value in asked if value < 19] == []


@on_linux
async def test_forbidden_priorities_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", forbid)
    assert await own(lambda: 7, never) == 7


# -- to the event loop


async def drained() -> None:
    """Wait until all earlier calls to the loop have run."""
    await trio.lowlevel.checkpoint()
    await trio.testing.wait_all_tasks_blocked()


async def test_calls_run_in_order_and_later() -> None:
    called: list[tuple[int, ...]] = []
    soon = ToLoop()
    for number in range(100):
        soon(lambda *given: called.append(given), number, -number)
    assert called == []
    await drained()
    assert called == [(number, -number) for number in range(100)]


async def test_many_calls_cost_one_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    soon = ToLoop()
    drains: list[int] = []
    called: list[int] = []
    drain = soon._drain

    def counted() -> None:
        drains.append(1)
        drain()

    monkeypatch.setattr(soon, "_drain", counted)
    for number in range(1000):
        soon(called.append, number)
    await drained()
    assert called == list(range(1000))
    assert len(drains) == 1


async def test_a_called_function_may_schedule_more_calls() -> None:
    called: list[str] = []
    soon = ToLoop()

    def first() -> None:
        called.append("first")
        soon(called.append, "third")

    soon(first)
    soon(called.append, "second")
    await drained()
    assert called == ["first", "second", "third"]


async def test_calls_of_several_threads_run_in_order_and_none_is_lost() -> None:
    threads, calls = 8, 2000
    called: list[tuple[int, int]] = []
    loop_thread = threading.get_ident()
    elsewhere: list[int] = []
    soon = ToLoop()

    def note(of: int, number: int) -> None:
        called.append((of, number))
        if threading.get_ident() != loop_thread:
            elsewhere.append(of)

    def work(of: int) -> None:
        for number in range(calls):
            soon(note, of, number)

    with trio.fail_after(WATCHDOG_SECONDS):
        async with trio.open_nursery() as nursery:
            for of in range(threads):
                nursery.start_soon(trio.to_thread.run_sync, work, of)
        await drained()
    assert elsewhere == []
    for of in range(threads):
        assert [number for whose, number in called if whose == of] == list(range(calls))
