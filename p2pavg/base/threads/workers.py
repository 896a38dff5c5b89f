"""Worker threads that keep computation off the event loop, each on one core.

With torch's own thread pool, every averager of a machine would compete with the training loop for every core. So a
worker uses a single thread of torch, and the rest of the process keeps its setting.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import outcome
import torch
import trio

T = TypeVar("T")

logger = logging.getLogger(__name__)

_lock = threading.Lock()


class RunInThread(Protocol):
    """Runs a function off the event loop."""

    async def __call__(self, function: Callable[..., T], *args: object) -> T: ...


class Workers:
    """Runs functions in a thread of its own, one at a time. It must be closed.

    It does not use trio's threads. Those are shared with the program, and this thread is limited to one thread of
    torch. It does not use a pool of :mod:`concurrent.futures` either: all of those are closed when the main thread of
    the program ends, while an averager of another thread goes on.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon, like the thread of the event loop: a program that ends without leaving its block must not hang.
        self._thread = threading.Thread(
            target=_run_jobs, args=(self._jobs,), name="p2pavg-worker", daemon=True
        )
        weakref.finalize(self, self._jobs.put, None)  # a worker that was not closed ends, too
        self._begun = self._closed = False

    def close(self) -> None:
        """End the thread when the functions that it has been given have returned."""
        self._closed = True
        self._jobs.put(None)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Run ``function(*args)`` in the thread.

        A cancelled caller waits for its end, so that its arguments stay valid.

        Raises:
            RuntimeError: the worker has been closed.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise RuntimeError("the worker has been closed")
        if not self._begun:  # most processes that have a peer run nothing in its worker
            self._begun = True
            self._thread.start()
        job = _Job(partial(function, *args), trio.lowlevel.current_trio_token())
        self._jobs.put(job)
        try:
            await job.done.wait()
        except trio.Cancelled:
            if not job.cancel():  # it runs already
                with trio.CancelScope(shield=True):
                    await job.done.wait()
            raise
        return cast(T, job.result())


class _Job:
    """One function that a thread runs for a task."""

    def __init__(self, work: Callable[[], object], token: trio.lowlevel.TrioToken) -> None:
        self._work: Callable[[], object] | None = work
        self._token = token
        self._lock = threading.Lock()
        self._outcome: outcome.Outcome[Any] | None = None
        self.done = trio.Event()

    def run(self) -> None:
        """Run the function, unless it has been cancelled before."""
        with self._lock:
            work, self._work = self._work, None
        if work is None:
            return
        self._outcome = outcome.capture(work)
        try:
            self._token.run_sync_soon(self.done.set)
        except trio.RunFinishedError:
            logger.debug("the loop has ended before the function that it waited for")

    def result(self) -> object:
        """Return what the function has returned, or raise its exception; once, after :attr:`done` is set."""
        assert self._outcome is not None
        return self._outcome.unwrap()

    def cancel(self) -> bool:
        """Return whether the function will not run, because it had not begun."""
        with self._lock:
            work, self._work = self._work, None
        return work is not None


def _run_jobs(jobs: queue.SimpleQueue[_Job | None]) -> None:
    prepare_thread()
    while (job := jobs.get()) is not None:
        job.run()
        del job  # it holds its arguments and its result, which may be large


async def in_own_thread(work: Callable[[], T], *, stop: Callable[[], None], name: str) -> T:
    """Run ``work()`` in a thread that ends with this call, and is prepared like those of :class:`Workers`.

    Args:
        stop: makes ``work`` return or raise soon; called if the caller is cancelled.
    """

    def prepare_and_work() -> T:
        prepare_thread()
        return work()

    await trio.lowlevel.checkpoint_if_cancelled()
    job = _Job(prepare_and_work, trio.lowlevel.current_trio_token())
    thread = threading.Thread(target=job.run, name=name, daemon=True)
    thread.start()
    try:
        await job.done.wait()
    except trio.Cancelled:
        stop()
        with trio.CancelScope(shield=True):
            await job.done.wait()
        raise
    finally:
        thread.join()  # it has already reported its result
    return cast(T, job.result())


class ToLoop:
    """Schedules functions on the event loop, in order. Many calls at once cost one wake-up. Create it on the loop."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def __call__(self, function: Callable[..., object], *args: object) -> None:
        """Schedule a function, from any thread. The function must not raise."""
        self._calls.append((function, args))
        self._token.run_sync_soon(self._drain, idempotent=True)

    def _drain(self) -> None:
        while self._calls:
            function, args = self._calls.popleft()
            function(*args)


NICENESS = 5
"""The niceness of worker threads. A training loop on the same cores has priority, where the system supports it."""


def prepare_thread() -> None:
    """Limit this thread to one thread of torch, and lower its priority. Each thread of ours calls it once."""
    _use_one_thread_here()
    _be_nice()


def _be_nice() -> None:
    """Lower the priority of this thread, on Linux, where each thread has a priority."""
    if not hasattr(os, "setpriority") or os.uname().sysname != "Linux":
        return
    try:
        thread = threading.get_native_id()
        if os.getpriority(os.PRIO_PROCESS, thread) < NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
    except OSError as error:  # a sandbox may forbid it; the worker runs all the same
        logger.debug("no lower priority for a worker: %s", error)


def _use_one_thread_here() -> None:
    """Limit the calling thread to one thread of torch.

    torch.set_num_threads() also sets the default of threads that start later. A short-lived thread restores it.
    """
    with _lock:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        if before == 1:
            return
        restore = threading.Thread(
            target=torch.set_num_threads, args=(before,), name="p2pavg-restore-threads"
        )
        restore.start()
        restore.join()
