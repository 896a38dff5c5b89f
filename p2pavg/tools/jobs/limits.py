"""The rules for a job that runs: when it is ended, and when it starts again. No I/O, no clock, no random source."""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.base.limits import ASK_AGAIN_SECONDS, MAX_BACKOFF_SECONDS
from p2pavg.tools.jobs.manifest import Needs

GIB = 2**30
MAX_PROCESSES = 256
"""Of a job at once: eight data loaders for each of eight GPUs, and some more."""
MAX_TASKS = 4096
"""Processes and threads of a job: each of 256 processes has some."""
MAX_SCRATCH_FILES = 100_000
"""More would make each look at them slow, and use up the file system's own list."""


@dataclass(frozen=True, slots=True)
class JobUsage:
    """Resources that a job takes now."""

    memory: int
    """Bytes of all of its processes, and of its files in memory."""
    processes: int
    scratch: int
    """Bytes of the files that it has written."""
    files: int = 0
    """That it has written."""
    tasks: int = 0
    """Threads of all of its processes."""
    hidden: str = ""
    """Something of it that cannot be measured, as the end of a sentence."""


def beyond(needs: Needs, usage: JobUsage) -> str:
    """Return what a job takes beyond its manifest, as a sentence; empty if it takes nothing."""
    for what, taken, declared in (
        ("memory", usage.memory, needs.memory_gb),
        ("the disk", usage.scratch, needs.disk_gb),
    ):
        if taken > declared * GIB:
            return f"it took {taken / GIB:.2f} GB of {what}, and its manifest says {declared:g} GB"
    if usage.processes > MAX_PROCESSES:
        return f"it had {usage.processes} processes at once, and a job may have {MAX_PROCESSES}"
    if usage.tasks > MAX_TASKS:
        return f"it had {usage.tasks} threads at once, and a job may have {MAX_TASKS}"
    if usage.hidden:
        return f"it has {usage.hidden}"
    if usage.files > MAX_SCRATCH_FILES:
        return f"it wrote more than {MAX_SCRATCH_FILES} files"
    return ""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the program again after a pause."""

    pause: float
    """Seconds."""
    failures: int
    """In a row."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """Start the program no more."""

    why: str
    is_error: bool


def after_exit(code: int, *, ran: float, failures: int) -> Restart | JobEnd:
    """Return what follows when a job's program has ended by itself.

    Args:
        code: its exit code.
        ran: seconds for which it ran.
        failures: in a row, before this end.
    """
    if code == 0:
        return JobEnd("the job's program has ended: its training is over", is_error=False)
    # A program that ran for so long was sound: the next pause is the first one again.
    failures = 1 if ran >= MAX_BACKOFF_SECONDS else failures + 1
    return Restart(min(ASK_AGAIN_SECONDS * 2.0 ** (failures - 1), MAX_BACKOFF_SECONDS), failures)
