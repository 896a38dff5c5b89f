"""Work off the event loop, on threads that use one core each.

Torch's own thread pool would make every averager of a machine compete for every core, and the training loop with them:
a thread that works here uses one thread of torch, and the rest of the process keeps what it had.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
import trio

T = TypeVar("T")

_lock = threading.Lock()


class RunInThread(Protocol):
    """Runs a function off the event loop."""

    async def __call__(self, function: Callable[..., T], *args: object) -> T: ...


class Workers:
    """Runs functions in a thread of its own, one at a time.

    Not in one of trio's: trio lends its threads to everybody, and this one keeps a single thread of torch. Close it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="p2pavg-worker", initializer=_use_one_thread_here
        )

    def close(self) -> None:
        """End the thread, once what it does is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """``function(*args)`` in the thread; a cancelled caller waits for it, so what it works on stays alive."""
        await trio.lowlevel.checkpoint_if_cancelled()
        token, done = trio.lowlevel.current_trio_token(), trio.Event()
        future = self._pool.submit(function, *args)
        future.add_done_callback(lambda _: token.run_sync_soon(done.set))
        try:
            await done.wait()
        except trio.Cancelled:
            if not future.cancel():  # it runs already
                with trio.CancelScope(shield=True):
                    await done.wait()
            raise
        return future.result()


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
