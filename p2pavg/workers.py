"""Work off the event loop, on threads that use one core each.

Torch's own thread pool would make every averager of a machine compete for every core, and the training loop with them:
a thread that works here uses one thread of torch, and the rest of the process keeps what it had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
import trio

T = TypeVar("T")

_local = threading.local()
_lock = threading.Lock()


class RunInThread(Protocol):
    """Runs a function off the event loop."""

    async def __call__(self, function: Callable[..., T], *args: object) -> T: ...


class Workers:
    """Runs functions in threads, one at a time."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """``function(*args)`` in a thread; a cancelled caller waits for it, so what it works on stays alive."""
        return await trio.to_thread.run_sync(_call, function, args, limiter=self._limiter)


def _call(function: Callable[..., T], args: tuple[object, ...]) -> T:
    if not getattr(_local, "prepared", False):
        _use_one_thread_here()
        _local.prepared = True
    return function(*args)


def _use_one_thread_here() -> None:
    """torch.set_num_threads() sets the calling thread and the default of threads that begin later: undo the latter."""
    with _lock:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(
            target=torch.set_num_threads, args=(before,), name="p2pavg-restore-threads"
        )
        restore.start()
        restore.join()
