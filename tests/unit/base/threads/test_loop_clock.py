"""The clock of an event loop that leaves out the time in which the loop could not run."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio

from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.base.threads import trio_thread
from p2pavg.base.threads.trio_thread import LONGEST_STEP, LoopClock, TrioThread

HOLD_SECONDS = 1.5


class Monotonic:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def monotonic() -> Monotonic:
    return Monotonic()


@pytest.fixture
def clock(monotonic: Monotonic) -> LoopClock:
    clock = LoopClock(monotonic)
    monotonic.now += 60.0  # until the loop begins
    clock.start_clock()
    return clock


def let_pass(clock: LoopClock, monotonic: Monotonic, seconds: float) -> None:
    """Let time pass while the loop looks at its clock as often as it should."""
    for _ in range(round(seconds / GLANCE_SECONDS)):
        monotonic.now += GLANCE_SECONDS
        clock.current_time()


def test_time_counts_in_full_while_the_loop_runs(clock: LoopClock, monotonic: Monotonic) -> None:
    began = clock.current_time()
    let_pass(clock, monotonic, 10.0)
    assert clock.current_time() - began == pytest.approx(10.0)
    assert clock.behind() == 0.0


def test_a_standstill_counts_for_one_short_step(clock: LoopClock, monotonic: Monotonic) -> None:
    began = clock.current_time()
    monotonic.now += 5.0
    assert clock.current_time() - began == pytest.approx(LONGEST_STEP)
    let_pass(clock, monotonic, 1.0)
    monotonic.now += 2.0
    assert clock.current_time() - began == pytest.approx(1.0 + 2 * LONGEST_STEP)
    assert clock.behind() == pytest.approx(7.0 - 2 * LONGEST_STEP)


def test_a_standstill_that_goes_on_is_known_to_other_threads(clock: LoopClock, monotonic: Monotonic) -> None:
    clock.current_time()
    monotonic.now += 5.0
    assert clock.behind() == pytest.approx(5.0 - LONGEST_STEP)
    clock.current_time()
    assert clock.behind() == pytest.approx(5.0 - LONGEST_STEP)


def test_the_loop_sleeps_so_shortly_that_it_notices_a_standstill(
    clock: LoopClock, monotonic: Monotonic
) -> None:
    assert clock.deadline_to_sleep_time(float("inf")) == GLANCE_SECONDS
    assert clock.deadline_to_sleep_time(clock.current_time() + 0.1) == pytest.approx(0.1)
    deadline = clock.current_time() + 1.0
    monotonic.now += 5.0
    assert clock.deadline_to_sleep_time(deadline) == GLANCE_SECONDS  # half a second is left


# ---------------------------------------------------------------------- a thread whose program holds the lock


def hold_the_lock(seconds: float) -> None:
    """Hold Python's lock, as an extension does that computes without releasing it."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


async def live(give: Callable[[str], None], stop: trio.Event) -> None:
    give("ready")
    await stop.wait()


@pytest.fixture
def thread() -> TrioThread[str]:
    return TrioThread(live, name="under test")


def test_an_answer_that_came_while_the_lock_was_held_is_read_before_its_timeout(
    thread: TrioThread[str],
) -> None:
    """The answer passes from task to task, so it is not there in the first moment in which the loop runs again."""
    waits = threading.Event()

    async def ask(pipe: int) -> str:
        send, receive = trio.open_memory_channel[bytes](0)

        async def read() -> None:
            await trio.lowlevel.wait_readable(pipe)
            await send.send(os.read(pipe, 7))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            waits.set()
            with trio.move_on_after(HOLD_SECONDS * 2 / 3):
                return (await receive.receive()).decode()
            nursery.cancel_scope.cancel()
        return "no answer"

    command = ["sh", "-c", f"sleep {HOLD_SECONDS / 2}; echo answer"]
    assert thread.start() == "ready"
    other = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    try:
        assert other.stdout is not None
        pipe, answers = other.stdout.fileno(), list[str]()
        caller = threading.Thread(target=_call_into, args=(answers, thread, partial(ask, pipe)))
        caller.start()
        assert waits.wait(60.0)
        hold_the_lock(HOLD_SECONDS)
        caller.join()
        assert answers == ["answer\n"]
    finally:
        thread.stop()
        other.communicate()


def test_the_loop_gets_a_turn_after_the_lock_was_held(
    thread: TrioThread[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work of many steps is done when the call returns."""
    monkeypatch.setattr(trio_thread, "TURN", 100.0)  # as long as it needs
    done: list[int] = []

    async def work() -> None:
        for step in range(20):
            await trio.sleep(0.01)
            done.append(step)

    async def begin() -> None:
        trio.lowlevel.spawn_system_task(work)

    assert thread.start() == "ready"
    try:
        thread.let_catch_up()
        thread.call(begin)
        hold_the_lock(HOLD_SECONDS)
        thread.let_catch_up()
        assert len(done) == 20
    finally:
        thread.stop()


def test_a_turn_has_an_end(thread: TrioThread[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that always has work keeps the program for a part of the standstill."""
    turns: list[float] = []

    async def turn(most: float) -> None:
        turns.append(most)
        await quiet(most)

    quiet: Callable[[float], Awaitable[None]] = trio_thread._quiet
    monkeypatch.setattr(trio_thread, "_quiet", turn)

    async def always_busy() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    assert thread.start() == "ready"
    try:
        thread.call(partial(_spawn, always_busy))
        hold_the_lock(HOLD_SECONDS)
        thread.let_catch_up()
        assert turns[-1] >= trio_thread.TURN * (HOLD_SECONDS - LONGEST_STEP)
    finally:
        thread.stop()


async def _spawn(work: Callable[[], Awaitable[None]]) -> None:
    trio.lowlevel.spawn_system_task(work)


def _call_into(answers: list[str], thread: TrioThread[str], ask: Callable[[], Awaitable[str]]) -> None:
    answers.append(thread.call(ask))
