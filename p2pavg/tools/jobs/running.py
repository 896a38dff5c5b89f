"""Runs a job's program: fenced, watched, and started again with growing pauses."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import trio

from p2pavg.base.limits import LOOK_SECONDS, STALL_SECONDS, STOP_SECONDS
from p2pavg.tools.jobs.limits import (
    MAX_PROCESSES,
    MAX_SCRATCH_FILES,
    JobEnd,
    JobUsage,
    Restart,
    after_exit,
    beyond,
)
from p2pavg.tools.jobs.manifest import Needs

logger = logging.getLogger(__name__)

MAX_LINE_CHARS = 500  # of the program's words that are shown
_READ_BYTES = 64 * 1024


class JobProgram:
    """A job's program, through all of its starts.

    Args:
        command: starts it, with the fence if there is one.
        environment: its variables.
        needs: its limits; ``None``: it is this user's own, and is not watched.
        scratch: the folder that it writes to.
        ask_to_end: tells the program to end; returns false if it cannot be told.
        restarts: start it again when it fails.
        say: takes each line of its words, printable and short.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        needs: Needs | None,
        scratch: Path,
        ask_to_end: Callable[[trio.Process], bool],
        say: Callable[[str], None],
        *,
        restarts: bool = True,
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._needs = needs
        self._scratch = scratch
        self._ask_to_end = ask_to_end
        self._say = say
        self._restarts = restarts
        self._end: JobEnd | None = None
        """Set once the program is not to start again, whatever its exit code is."""
        self._told = trio.Event()

    def stop(self, why: str) -> None:
        """End the program, and start it no more."""
        self._finish(JobEnd(why, is_error=False))

    def _finish(self, end: JobEnd) -> None:
        self._end = self._end or end
        self._told.set()

    async def run(self) -> JobEnd:
        """Run the program until it has ended for good; return why."""
        failures = 0
        while self._end is None:
            began = trio.current_time()
            code = await self._run_once()
            decision = self._end or after_exit(code, ran=trio.current_time() - began, failures=failures)
            match decision:
                case JobEnd():
                    return decision
                case Restart() if not self._restarts:
                    return JobEnd(f"the program ended with exit code {code}", is_error=True)
                case Restart(pause, failures):
                    self._say(f"the program ended with exit code {code}; it starts again in {pause:.0f} s")
                    with trio.move_on_after(pause):
                        await self._told.wait()
        return self._end

    async def _run_once(self) -> int:
        process = await trio.lowlevel.open_process(
            self._command,
            # The terminal is the user's: what is typed there is no word to the program.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            # A group of its own, which ends as a whole; and Ctrl-C reaches it in order, not by itself.
            start_new_session=True,
        )
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_words_on, process)
                if self._needs is not None:
                    nursery.start_soon(self._watch, process, self._needs)
                nursery.start_soon(self._end_when_told, process)
                code = await process.wait()
                nursery.cancel_scope.cancel()
        finally:
            _kill(process)
            with trio.CancelScope(shield=True):
                await process.wait()
        return code

    async def _pass_words_on(self, process: trio.Process) -> None:
        """Say what the program prints, without what a terminal would obey."""
        assert process.stdout is not None
        left = b""
        async for data in process.stdout:
            *lines, left = (left + data).split(b"\n")
            # One without an end is shown in parts: its bytes must not gather here.
            if len(left) > _READ_BYTES:
                lines, left = [*lines, left], b""
            for line in lines:
                # Of a progress bar, which goes back to the line's beginning, its last state.
                text = line.decode(errors="replace").rstrip().rpartition("\r")[2][:MAX_LINE_CHARS]
                self._say("".join(each if each.isprintable() else "?" for each in text))

    async def _watch(self, process: trio.Process, needs: Needs) -> None:
        """End the program when it takes more than its manifest says."""
        while True:
            usage = await trio.to_thread.run_sync(measure, process.pid, self._scratch)
            if why := beyond(needs, usage):
                self._finish(JobEnd(f"the job was ended: {why}", is_error=True))
                _kill(process)
            await trio.sleep(LOOK_SECONDS)

    async def _end_when_told(self, process: trio.Process) -> None:
        await self._told.wait()
        # It gets time for the end of its round, and for a checkpoint.
        if self._ask_to_end(process):
            await trio.sleep(STALL_SECONDS)
        process.terminate()
        await trio.sleep(STOP_SECONDS)
        _kill(process)


def measure(pid: int, scratch: Path) -> JobUsage:
    """Return what a process, those that it has started, and the files in a folder take now."""
    try:
        first = psutil.Process(pid)
        found = [first, *first.children(recursive=True)]
    except psutil.Error:  # it has just ended
        found = []
    memory = 0
    # Beyond that, it is ended for their number, and to measure each would take long.
    if len(found) <= MAX_PROCESSES:
        memory = sum(map(_memory_of, found))
    written, files = 0, 0
    for each in _files(scratch):
        files += 1
        if files > MAX_SCRATCH_FILES:
            break
        with suppress(OSError):
            written += each.stat(follow_symlinks=False).st_blocks * 512
    return JobUsage(memory=memory, processes=len(found), scratch=written, files=files)


def _memory_of(process: psutil.Process) -> int:
    """Return the bytes that are a process' own, and its part of those that several share."""
    try:
        return int(process.memory_full_info().pss)
    except (psutil.Error, AttributeError):
        with suppress(psutil.Error):
            return int(process.memory_info().rss)
        return 0


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    folders = [str(folder)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                yield entry


def _kill(process: trio.Process) -> None:
    """End a program and all that it has started. In a fence, all of them end with the first."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
