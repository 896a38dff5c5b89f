"""What a process and its children use, from Linux's /proc. Imports nothing but the standard library."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def process_tree(pid: int) -> list[int]:
    """A process and all below it; one that has just ended is left out."""
    found = [pid]
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                found += process_tree(int(child))
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time so far, that of children who have ended included."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            # The second field is a name in parentheses, which may contain spaces.
            fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(pids: Iterable[int], field: str = "VmRSS") -> int:
    """Memory of all together, at this moment or at its highest (``VmHWM``).

    Shared memory, in which hivemind hands a vector from process to process, counts once; libraries count for each.
    """
    statuses = [_status(pid) for pid in pids]
    shared = [status.get("RssShmem", 0) for status in statuses]
    return sum(status.get(field, 0) for status in statuses) - (sum(shared) - max(shared, default=0))


def _status(pid: int) -> dict[str, int]:
    """Sizes in bytes."""
    found = {}
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = 1024 * int(value.split()[0])
    return found


class Meter:
    """What this process and its children use between :meth:`start` and :meth:`read`.

    The peak is the sum of the processes' own peaks, which the kernel keeps: nothing is sampled, and so nothing is
    missed. Of several processes it may be more than there ever was at one moment.
    """

    def __init__(self) -> None:
        self._first: int | None = None

    def start(self) -> None:
        """Begin."""
        self._pids = process_tree(os.getpid())
        for pid in self._pids:
            with suppress(OSError):  # no such file on other systems
                (PROC / str(pid) / "clear_refs").write_text("5")  # its peak is from now on
        self._resident = resident_bytes(self._pids)
        if self._first is None:
            self._first = self._resident
        self._cpu = cpu_seconds(self._pids)

    def read(self) -> dict[str, float]:
        """CPU seconds, bytes at the peak, and of those the bytes above this start, and above the first one.

        What is kept from round to round is in the last of them only.
        """
        assert self._first is not None
        peak = resident_bytes(self._pids, "VmHWM")
        return {
            "cpu": cpu_seconds(self._pids) - self._cpu,
            "resident": peak,
            "above": peak - self._resident,
            "above_first": peak - self._first,
        }
