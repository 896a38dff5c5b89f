"""The end of a program: functions that are called while threads can still be started.

Closing a peer needs threads. ``atexit`` comes too late for it: from Python 3.12 on, no thread can be started by then.
The hook of :mod:`threading` comes too early: it runs when the main thread has ended, and other threads may go on, as in
a service whose main thread only starts them. So at that time a thread is started that waits for those others.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger(__name__)


class ProgramEnd:
    """Calls ``close`` when all threads have ended that are no daemons, unless it is cancelled before.

    It may be made when the main thread has ended already.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close
        self._lock = threading.Lock()
        # CPython's own; concurrent.futures uses it. Other implementations may lack it.
        register = getattr(threading, "_register_atexit", atexit.register)
        try:
            register(self._main_thread_ends)
        except RuntimeError:  # "can't register atexit after shutdown": the main thread has ended
            self._wait_for_others()

    def cancel(self) -> None:
        """Do not call the function: it has been called, or is."""
        with self._lock:
            self._close = None

    def _main_thread_ends(self) -> None:
        """Call the function now if no other thread goes on, and else when they have ended."""
        if not _others():
            self.call()
            return
        try:
            self._wait_for_others()
        except RuntimeError as error:  # Python 3.12.0 and 3.12.1 start no thread from here on
            logger.warning("closing while other threads go on: %s", error)
            self.call()

    def _wait_for_others(self) -> None:
        """Start a thread that calls the function when the others have ended. The interpreter waits for it."""
        if self._close is not None:
            _Waiter(self).start()

    def call(self) -> None:
        """Call the function, unless that was cancelled."""
        with self._lock:
            close, self._close = self._close, None
        if close is not None:
            close()


class _Waiter(threading.Thread):
    """Waits for all threads that are neither daemons nor waiters."""

    def __init__(self, ending: ProgramEnd) -> None:
        super().__init__(name="p2pavg-end", daemon=False)
        self._ending = ending

    def run(self) -> None:
        """Wait, and call the function."""
        while others := _others():
            for other in others:
                with suppress(RuntimeError):  # it has not begun yet
                    other.join()
        self._ending.call()


def _others() -> list[threading.Thread]:
    """Return the running threads that keep the program from its end, without the main thread, which is ending."""
    return [
        thread
        for thread in threading.enumerate()
        if not (thread.daemon or isinstance(thread, _Waiter) or thread is threading.main_thread())
    ]
