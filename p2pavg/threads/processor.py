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

    Linux counts it: the second number of ``schedstat`` are the nanoseconds spent on a run queue
    (Documentation/scheduler/sched-stats.rst). On other systems it is always 0.
    """
    file = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/schedstat")
    return never_waits if _read(file) is None else _Schedstat(file)


class _Schedstat:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._last = 0.0

    def __call__(self) -> float:
        found = _read(self._file)
        if found is not None:
            self._last = found
        return self._last


def _read(file: Path) -> float | None:
    try:
        return int(file.read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
