"""Measures what a job's processes and files take of the machine. A hostile program may hide either."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from p2pavg.base.errors import is_shortage
from p2pavg.tools.jobs.limits import MAX_PROCESSES, MAX_SCRATCH_FILES, JobUsage

MAX_DEPTH = 32
"""Folders in folders that a job may make. Below longer paths than systems take, nothing could be counted."""
_IN_MEMORY = ("dev/shm", "tmp")  # file systems of the fence that are in memory
_BLOCK_BYTES = 512  # of `st_blocks`


class HiddenError(Exception):
    """Something of a job that cannot be measured."""


def measure(pid: int, scratch: Path) -> JobUsage:
    """Return what a process, those that it has started, and the files in a folder take now."""
    try:
        first = psutil.Process(pid)
        found = [first, *first.children(recursive=True)]
    except psutil.Error:  # it has just ended
        found = []
    memory = threads = 0
    deleted: dict[tuple[int, int], int] = {}
    # Beyond that, it is ended for their number, and to measure each would take long.
    if len(found) <= MAX_PROCESSES:
        for process in found:
            memory += _memory_of(process)
            deleted |= _deleted_files(process.pid)
            with suppress(psutil.Error):
                threads += process.num_threads()
        memory += max((_files_in_memory(process.pid) for process in found), default=0)
    hidden, written, files = "", sum(deleted.values()), 0
    try:
        for size in _sizes(scratch):
            files += 1
            written += size
            if files > MAX_SCRATCH_FILES:
                break
    except HiddenError as error:
        hidden = str(error)
    return JobUsage(
        memory=memory, processes=len(found), scratch=written, files=files, tasks=threads, hidden=hidden
    )


def _memory_of(process: psutil.Process) -> int:
    """Return the bytes that are a process' own, and its part of those that several share; files in memory left out."""
    try:
        found = {}
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0]) * 1024
        return found["Pss"] + found.get("SwapPss", 0) - found.get("Pss_Shmem", 0)
    except (OSError, ValueError, KeyError, IndexError):
        with suppress(psutil.Error):
            return int(process.memory_info().rss)
        return 0


def _files_in_memory(pid: int) -> int:
    """Return the bytes of files that a process sees in file systems that are in memory."""
    total = 0
    own = {os.stat(f"/{name}").st_dev for name in _IN_MEMORY if os.path.isdir(f"/{name}")}
    for name in _IN_MEMORY:
        with suppress(OSError):
            place = f"/proc/{pid}/root/{name}"
            if os.stat(place).st_dev not in own:  # not this machine's own, as without a fence
                found = os.statvfs(place)
                total += (found.f_blocks - found.f_bfree) * found.f_frsize
    return total


def _deleted_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the sizes of files that have no name any more, and that a process has open: they still take the disk."""
    found = {}
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                opened = os.stat(f"/proc/{pid}/fd/{name}")
                if stat.S_ISREG(opened.st_mode) and opened.st_nlink == 0:
                    found[opened.st_dev, opened.st_ino] = opened.st_blocks * _BLOCK_BYTES
    return found


def _sizes(folder: Path) -> Iterator[int]:
    """Give the bytes on the disk of each file and folder below a folder. No link is followed."""
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        yield from _sizes_below(top, 0)
    finally:
        os.close(top)


def _sizes_below(folder: int, depth: int) -> Iterator[int]:
    if depth > MAX_DEPTH:
        raise HiddenError(f"more than {MAX_DEPTH} folders in each other")
    # By descriptors: a name that is too long for the system hides nothing.
    try:
        with os.scandir(folder) as entries:
            names: Sequence[os.DirEntry[str]] = list(entries)
    except OSError as error:
        if is_shortage(error):
            return
        raise HiddenError(f"a folder that cannot be read: {error.strerror}") from None
    for entry in names:
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:  # it was deleted meanwhile
            continue
        yield found.st_blocks * _BLOCK_BYTES
        if not stat.S_ISDIR(found.st_mode):
            continue
        try:
            inner = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if is_shortage(error):  # of this process: the next look may see more
                return
            raise HiddenError(f"a folder that cannot be read: {error.strerror}") from None
        try:
            yield from _sizes_below(inner, depth + 1)
        finally:
            os.close(inner)
