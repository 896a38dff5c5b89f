"""CPU time and memory of a process and its children, from Linux's /proc. Imports only the standard library."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def process_tree(pid: int) -> list[int]:
    """Return a process and its descendants, without those that have just ended."""
    found = [pid]
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                found += process_tree(int(child))
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return user and system time so far, including that of children that have ended."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            # The second field is a name in parentheses, which may contain spaces.
            fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pids: Iterable[int], field: str = "VmRSS") -> int:
    """Return the memory of all processes together, at this moment or at their peaks (``VmHWM``).

    Shared memory, by which hivemind passes vectors between processes, counts once. Libraries count for each process.
    """
    statuses = [_status(pid) for pid in pids]
    shared = [status.get("RssShmem", 0) for status in statuses]
    return sum(status.get(field, 0) for status in statuses) - (sum(shared) - max(shared, default=0))


def _status(pid: int) -> dict[str, int]:
    """Return memory sizes of a process, in bytes."""
    found = {}
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = 1024 * int(value.split()[0])
    return found


class Meter:
    """CPU time and memory of this process and its children between :meth:`start` and :meth:`read`.

    The peak is the sum of the processes' own peaks, which the kernel keeps, so that no sampling can miss one. For
    several processes the sum may exceed the memory used at any one moment.
    """

    def __init__(self) -> None:
        self._first: int | None = None

    def start(self) -> None:
        """Begin a measurement."""
        self._pids = process_tree(os.getpid())
        for pid in self._pids:
            with suppress(OSError):  # the file exists on Linux only
                (PROC / str(pid) / "clear_refs").write_text("5")  # resets its peak
        self._resident = resident_bytes(self._pids)
        if self._first is None:
            self._first = self._resident
        self._cpu = cpu_seconds(self._pids)

    def read(self) -> dict[str, float]:
        """Return CPU seconds, peak bytes, and peak bytes above this start and above the first start.

        Only the last figure includes memory that is kept from round to round.
        """
        assert self._first is not None
        peak = resident_bytes(self._pids, "VmHWM")
        return {
            "cpu": cpu_seconds(self._pids) - self._cpu,
            "resident": peak,
            "above": peak - self._resident,
            "above_first": peak - self._first,
        }
