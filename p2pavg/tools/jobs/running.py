"""Runs a job's program: fenced, watched, and started again with growing pauses."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import trio

from p2pavg.base.formats import count
from p2pavg.base.limits import GLANCE_SECONDS, LOOK_SECONDS, STALL_SECONDS, STOP_SECONDS, TAIL_SECONDS
from p2pavg.net.gate.server import Gate
from p2pavg.net.limits.rate import TokenBucket
from p2pavg.tools.jobs.limits import JobEnd, Restart, after_exit, beyond
from p2pavg.tools.jobs.manifest import Needs
from p2pavg.tools.jobs.measuring import measure

T = TypeVar("T")

MAX_LINE_CHARS = 500  # of the program's words that are shown
MAX_LINES_A_SECOND = 20.0
MAX_BURST_LINES = 200.0
_READ_BYTES = 64 * 1024


class JobProgram:
    """A job's program, through all of its starts.

    Args:
        command: starts it, with the fence if there is one.
        environment: its variables.
        needs: its limits; ``None``: it is this user's own, and is not watched.
        scratch: the folder that it writes to.
        gate: by which the program is told to end; ``None``: it is told by SIGINT.
        restarts: start it again when it fails.
        say: takes each line of its words, printable and short.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        needs: Needs | None,
        scratch: Path,
        gate: Gate | None,
        say: Callable[[str], None],
        *,
        restarts: bool = True,
    ) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._needs = needs
        self._scratch = scratch
        self._gate = gate
        self._say = say
        self._restarts = restarts
        self._end: JobEnd | None = None
        """Set once the program is not to start again, whatever its exit code is."""
        self._told = trio.Event()
        self.failures = 0
        """Starts in a row that have failed, while the program waits to start again; 0 while it runs."""

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
                    self.failures = failures
                    words = f"the program ended with exit code {code}; it starts again in {pause:.0f} s"
                    await self._say_all([words])
                    with trio.move_on_after(pause):
                        await self._told.wait()
                    self.failures = 0
        return self._end

    async def _run_once(self) -> int:
        # In this thread, which lives as long as this process. bubblewrap ends with the thread that has started it, and
        # trio starts processes in threads that end when they were idle for some seconds.
        process = subprocess.Popen(  # noqa: ASYNC220
            self._command,
            # The terminal is the user's: what is typed there is no word to the program.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            # A group of its own, which ends as a whole; and Ctrl-C reaches it in order, not by itself.
            start_new_session=True,
        )
        assert process.stdout is not None
        words = trio.lowlevel.FdStream(os.dup(process.stdout.fileno()))
        process.stdout.close()
        try:
            async with trio.open_nursery() as nursery:
                said = trio.Event()
                nursery.start_soon(self._pass_words_on, words, said)
                if self._needs is not None:
                    nursery.start_soon(self._watch, process, self._needs)
                nursery.start_soon(self._end_when_told, process)
                code = await in_left_thread(process.wait)
                _kill(process)
                # What it said last is what a person looks for. A process that it has left behind holds the pipe open.
                with trio.move_on_after(TAIL_SECONDS):
                    await said.wait()
                nursery.cancel_scope.cancel()
        finally:
            _kill(process)
            await trio.aclose_forcefully(words)
            # Until all of it is gone: nothing of this start may meet the next one.
            with trio.CancelScope(shield=True), trio.move_on_after(STOP_SECONDS):
                await in_left_thread(process.wait)
                while _is_alive(process):  # noqa: ASYNC110 - only the first process can be waited for
                    await trio.sleep(GLANCE_SECONDS)
        return code

    async def _pass_words_on(self, words: trio.lowlevel.FdStream, said: trio.Event) -> None:
        """Pass on what the program prints, without what a terminal would obey, and not faster than people read."""
        left = b""
        shown = TokenBucket(MAX_LINES_A_SECOND, MAX_BURST_LINES)
        left_out, ended = 0, False
        while not ended:
            data = await words.receive_some(_READ_BYTES)
            ended = not data
            *lines, left = (left + data).split(b"\n")
            # One without an end is shown in parts: its bytes must not gather here.
            if len(left) > _READ_BYTES or (ended and left):
                lines, left = [*lines, left], b""
            texts = []
            for line in lines:
                now = trio.current_time()
                if shown.level(now) < 1.0:
                    left_out += 1
                    continue
                shown.take(now, 1.0)
                if left_out:
                    texts.append(f"({count(left_out, 'line')} left out: it prints too much)")
                    left_out = 0
                texts.append(_shown(line))
            await self._say_all(texts)
        said.set()

    async def _say_all(self, lines: Sequence[str]) -> None:
        def show_all() -> None:
            for line in lines:
                self._say(line)

        # A terminal that was stopped with Ctrl-S must stop neither the limits nor the network.
        await in_left_thread(show_all)

    async def _watch(self, process: subprocess.Popen[bytes], needs: Needs) -> None:
        """End the program when it takes more than its manifest says."""
        while True:
            usage = await trio.to_thread.run_sync(measure, process.pid, self._scratch)
            if why := beyond(needs, usage):
                self._finish(JobEnd(f"the job was ended: {why}", is_error=True))
                _kill(process)
            await trio.sleep(LOOK_SECONDS)

    async def _end_when_told(self, process: subprocess.Popen[bytes]) -> None:
        await self._told.wait()
        if self._gate is None:
            process.send_signal(signal.SIGINT)
        if self._gate is None or self._gate.stop_program():
            await trio.sleep(STALL_SECONDS)  # for the end of its round, and for a checkpoint
        process.terminate()
        await trio.sleep(STOP_SECONDS)
        _kill(process)


def _shown(line: bytes) -> str:
    # Of a progress bar, which goes back to the line's beginning, its last state.
    text = line.decode(errors="replace").rstrip().rpartition("\r")[2][:MAX_LINE_CHARS]
    return "".join(each if each.isprintable() else "?" for each in text)


async def in_left_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread that is left where it is when the caller is cancelled: nothing ends its wait."""
    found: T = await trio.to_thread.run_sync(  # type: ignore[call-arg]  # trio-typing's stubs
        work, *arguments, abandon_on_cancel=True
    )
    return found


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    """Return whether any process of a program's group is left."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it has started.

    In a fence, all of them end with bubblewrap's first process, which is in this group and cannot leave it.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
