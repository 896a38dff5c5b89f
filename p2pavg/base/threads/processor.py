"""The time for which a thread had work and no processor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

ProcessorWait: TypeAlias = Callable[[], float]
"""Returns the seconds for which a thread has waited for a processor since it began."""


def never_waits() -> float:
    """Return 0, for a clock that stands still while something runs."""
    return 0.0


def wait_of_this_thread() -> ProcessorWait:
    """Return a function that tells how long the calling thread has waited for a processor.

    Linux counts it: the second number of ``schedstat`` is the time on a run queue, in nanoseconds
    (Documentation/scheduler/sched-stats.rst). On other systems it is always 0.
    """
    file = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/schedstat")
    last = _read(file)
    if last is None:
        return never_waits

    def waited() -> float:
        nonlocal last
        last = _read(file) or last  # None: perhaps no file can be opened
        assert last is not None
        return last

    return waited


class ThreadWaits:
    """The waits of a thread, from one look to the next.

    Args:
        processor_wait: of the thread.
        now: seconds of a monotonic clock.
    """

    def __init__(self, processor_wait: ProcessorWait, now: float) -> None:
        self._processor_wait = processor_wait
        self._now = now
        self._waited = processor_wait()

    def since_last_look(self, now: float) -> float:
        """Return the seconds that the thread has waited since the last look, at most as many as have gone by."""
        waited, before = self._processor_wait(), self._waited
        passed, self._now, self._waited = now - self._now, now, waited
        return min(max(waited - before, 0.0), passed)


def _read(file: Path) -> float | None:
    try:
        return int(file.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
