"""A background thread that runs trio, and calls from other threads into it."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import trio
from trio.abc import Clock

from p2pavg.base.errors import ClosedError
from p2pavg.base.limits import GLANCE_SECONDS, STOP_SECONDS
from p2pavg.base.threads.waits import FIRST_WORD_SECONDS, bare_exceptions
from p2pavg.base.threads.workers import prepare_thread

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # whose stubs mypy prefers to trio's own


# Context managers that are held open in a task of their own.


async def hold_in(
    nursery: trio.Nursery, block: AbstractAsyncContextManager[T]
) -> tuple[T, Callable[[], Awaitable[None]]]:
    """Enter a block in a task of a nursery. Return its value, and a function that leaves it and waits."""
    leave, left = trio.Event(), trio.Event()

    async def live(task_status: TaskStatus[T]) -> None:
        try:
            async with block as what:
                task_status.started(what)
                await leave.wait()
        finally:
            left.set()

    async def close() -> None:
        leave.set()
        await left.wait()

    what: T = await nursery.start(live)
    return what, close


# The clock of an event loop that leaves out the time in which the loop could not run.
#
# A training loop may hold Python's lock for seconds: while it tokenises, or in an extension. Its process may be
# stopped, or get no processor. All this time the event loop reads nothing, although the answers of other peers may
# have arrived. With an ordinary clock, every timeout that was over meanwhile would end at the first moment in which
# the loop runs again, before the answers are read, and this peer would take the others for dead.
#
# On this clock, such a standstill counts for LONGEST_STEP at most. So a timeout of this process measures the others,
# never this process: it is over only if the loop has run, and has read all that arrived, for about as long.
#
# The wall clock goes on meanwhile. What expires at a moment that other peers know, such as a record, is not measured
# with this clock.

LONGEST_STEP = 2 * GLANCE_SECONDS
"""Longest time between two looks at the clock that counts in full: a sleep, and the pause of a busy machine."""


class LoopClock(Clock):
    """Seconds for which an event loop has been able to run.

    Only the loop's thread may call the methods of trio's interface. Any thread may read
    :attr:`stood_still` and call :meth:`behind`.

    Args:
        monotonic: returns seconds of a monotonic clock.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._looked = monotonic()
        self.stood_still = 0.0
        """Seconds that this clock has left out so far."""

    def start_clock(self) -> None:
        """Begin to run. The time between the making of the clock and this is no standstill."""
        self._looked = self._monotonic()

    def current_time(self) -> float:
        """Return the time of this clock, in seconds."""
        now = self._monotonic()
        step, self._looked = now - self._looked, now
        if step > LONGEST_STEP:
            self.stood_still += step - LONGEST_STEP
        return now - self.stood_still

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return the seconds that the loop may sleep. A long sleep could not be told from a standstill."""
        return min(deadline - self.current_time(), GLANCE_SECONDS)

    def behind(self) -> float:
        """Return the seconds for which the loop has stood still in all, up to now."""
        # The sum first: if the loop looks between the two lines, the standstill is counted once, at the next call.
        before = self.stood_still
        return before + max(self._monotonic() - self._looked - LONGEST_STEP, 0.0)


logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

TURN = 0.125
"""Part of the time in which the loop could not run that it gets back in a turn of its own. A program that holds
Python's lock all the time becomes slower by as much, and its peer reads and answers in every turn what has come."""
QUIET_LOOP_SECONDS = 0.1  # a loop with nothing to do for so long has caught up: about one round trip

Live = Callable[[Callable[[R], None], trio.Event], Awaitable[None]]
"""The main function of the thread: it passes the start result to the callback, and returns when the event is set."""


class TrioThread(Generic[R]):
    """Runs ``live`` in trio, in a thread of its own.

    If an exception ends it early, every waiting call and every later call raises that exception.
    """

    def __init__(self, live: Live[R], *, name: str) -> None:
        self._live = live
        self._ready: concurrent.futures.Future[R] = concurrent.futures.Future()
        self._pending: set[concurrent.futures.Future[Any]] = {self._ready}
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._told = False
        self._ended = False
        self._stopping = False
        self._process = os.getpid()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._stop = trio.Event()
        self._scope = trio.CancelScope()
        self._clock = LoopClock()
        self._repaid = 0.0
        """Seconds of the loop's standstills for which it has got a turn."""
        # A daemon: a program that ends without leaving its block must not hang.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> R:
        """Start the thread and return the start result of ``live``. Raise the exception that prevented the start."""
        self._thread.start()
        return self._ready.result()

    def call(
        self, function: Callable[[], Awaitable[T]], *, is_closed: Callable[[], bool] = lambda: False
    ) -> T:
        """Run ``await function()`` in the thread and return its result. Interrupting the caller cancels it there.

        Args:
            is_closed: returns whether the caller has closed what the function uses, while the thread goes on.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._check_process()
        with self._lock:
            self._check()
            self._pending.add(future)
        scope = trio.CancelScope()

        async def serve() -> None:
            with scope:
                try:
                    result = await function()
                except Exception as error:  # noqa: BLE001 - the caller's to handle, in its own thread
                    future.set_exception(error)
                else:
                    future.set_result(result)

        def begin() -> None:
            if self._nursery is not None:
                # Without a nursery the thread is about to end, and ``_run`` answers all calls that are pending.
                self._nursery.start_soon(serve)

        try:
            self._soon(begin)
            return future.result()
        except ClosedError:
            # Closed although stop() was not called: an exception is ending the thread. Wait for it and raise it.
            if not (self._stopping or is_closed()):
                self._thread.join(STOP_SECONDS)
                self.check()
            raise
        except BaseException:
            if not future.done():  # Ctrl-C
                self._soon(scope.cancel)
            raise
        finally:
            with self._lock:
                self._pending.discard(future)

    def let_catch_up(self) -> None:
        """Give the loop a turn if this program has kept it from running, by holding Python's lock.

        A program that holds the lock, computes for a few milliseconds and holds it again leaves the loop no time to
        read what has arrived, and to answer. So this call waits until the loop has done that, for :data:`TURN` of the
        standstill at most. It returns at once if there was none.
        """
        behind = self._clock.behind()
        owed, self._repaid = behind - self._repaid, behind
        if owed > 0:
            self.call(partial(_quiet, TURN * owed))

    async def hold(self, block: AbstractAsyncContextManager[T]) -> tuple[T, Callable[[], None]]:
        """Enter a block in the thread. Return its value, and a function that leaves it and waits.

        Call this in the thread, and the returned function in any other thread.
        """
        assert self._nursery is not None
        what, leave = await hold_in(self._nursery, block)

        def close() -> None:
            with suppress(ClosedError):  # the thread has ended, and has left the block
                self.call(leave)

        return what, close

    def check(self) -> None:
        """Raise the exception that ended the thread; ClosedError if it was stopped or belongs to a parent process."""
        self._check_process()
        with self._lock:
            self._check()

    def stop(self) -> None:
        """End ``live`` and the thread. Raise the exception that ended it before, unless a caller got it already."""
        if os.getpid() != self._process:
            return
        # This flag is set before the token is read, and ``_main`` reads it after it has set the token.
        # So one of both sees the other.
        self._stopping = True
        self._soon(self._stop.set if self._ready.done() else self._scope.cancel)
        self._thread.join(min(FIRST_WORD_SECONDS, STOP_SECONDS))
        if self._thread.is_alive():
            logger.warning(
                "closing %s takes longer than %.0f s: it tells its last group how the round ended, and withdraws its"
                " records; at most %.0f s",
                self._thread.name,
                FIRST_WORD_SECONDS,
                STOP_SECONDS,
            )
            self._thread.join(max(STOP_SECONDS - FIRST_WORD_SECONDS, 0.0))
        if self._thread.is_alive():
            logger.warning("the thread %s did not end within %.0f s", self._thread.name, STOP_SECONDS)
        if self._error is not None and not self._told:
            self._told = True
            raise self._error

    def _check_process(self) -> None:
        # Check before taking the lock. At the fork, a thread that the child does not have may have held it.
        if os.getpid() != self._process:
            raise ClosedError(
                f"this averager belongs to process {self._process} and cannot be used after a fork"
            )

    def _check(self) -> None:
        if self._error is not None:
            self._told = True
            raise self._error
        if self._ended or self._stopping:
            raise ClosedError("the averager is closed")

    def _soon(self, function: Callable[[], object]) -> None:
        if self._token is not None:
            try:
                self._token.run_sync_soon(function)
            except trio.RunFinishedError:
                logger.debug("the thread %s has ended", self._thread.name)

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            prepare_thread()  # the training loop has priority, and torch's other threads
            trio.run(self._main, clock=self._clock)
        except BaseException as raised:  # noqa: BLE001 - it is raised again in the threads that wait
            error = raised
        with self._lock:
            # Under the lock, so that no call is added to the pending ones after they were answered.
            self._error, self._ended = error, True
            for future in self._pending:
                if not future.done():
                    self._told = True
                    future.set_exception(error or ClosedError("the averager was closed meanwhile"))

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        if self._stopping:
            return
        with bare_exceptions(), self._scope:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    await self._live(self._ready.set_result, self._stop)
                finally:
                    self._nursery = None
                    # Calls that still run are cancelled here, and ``_run`` answers them.
                    nursery.cancel_scope.cancel()


async def _quiet(most: float) -> None:
    """Wait until all tasks of the loop wait for something, ``most`` seconds at most."""
    # Here, because trio.testing imports pytest where it is installed.
    from trio.testing import wait_all_tasks_blocked

    with trio.move_on_after(most):
        await wait_all_tasks_blocked(QUIET_LOOP_SECONDS)
