"""Child processes and their events; every child is stopped at the end."""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from .events import Event, from_line
from .progress import Progress

ROOT = Path(__file__).resolve().parents[2]
LEAVE_TIMEOUT_S = (
    60.0  # for a finished process to close its resources: a second, and many times that beside busy loops
)
TERMINATE_TIMEOUT_S = 3.0
LOG_TAIL_BYTES = 4000
LINE_LIMIT = 65_536  # characters; the longest event, a round's, takes about a thousand
QUEUE_LIMIT = 1_000  # events; beyond it the children wait until the launcher catches up


class Child:
    """One child process.

    Its stderr goes to a file. It has its own process group, which keeps the terminal's Ctrl-C from it, so that the
    launcher alone decides when each process stops.
    """

    def __init__(self, progress: Progress, arguments: list[str], log: Path) -> None:
        self.progress = progress
        self.log = log
        with log.open(
            "ab" if progress.kills else "wb"
        ) as stderr:  # one that starts again goes on with its log
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
                text=True,
                process_group=0,
                # A killed process has said its last words all the same.
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def leave(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()

    def lines(self) -> Iterator[str]:
        assert self.process.stdout
        with self.process.stdout as stdout:
            while line := stdout.readline(LINE_LIMIT):
                yield line

    def log_tail(self) -> str:
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


class Processes:
    """All children; leaving the context stops them, at once if it is left by an exception."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._children: list[Child] = []
        self._readers: list[threading.Thread] = []
        self._inbox: queue.Queue[tuple[Child, Event | int]] = queue.Queue(QUEUE_LIMIT)

    def start(self, progress: Progress, *arguments: str) -> None:
        log = self._output / f"{progress.name.replace(' ', '-')}.log"
        child = Child(progress, list(arguments), log)
        progress.starts()
        self._children.append(child)
        reader = threading.Thread(target=self._read, args=(child,), name=progress.name, daemon=True)
        self._readers.append(reader)
        reader.start()

    def kill(self, progress: Progress) -> None:
        """Kill this process, as a machine that loses its power would; its exit is reported like any other."""
        for child in self._children:
            if child.progress is progress:
                child.process.kill()

    def pump(self, seconds: float) -> bool:
        """Apply the arrived events to their senders' progress; wait at most this long for the first event.

        Returns:
            True if any event has arrived.
        """
        arrived = False
        with suppress(queue.Empty):
            self._apply(*self._inbox.get(timeout=seconds))
            arrived = True
            while True:
                self._apply(*self._inbox.get_nowait())
        return arrived

    def _apply(self, child: Child, event: Event | int) -> None:
        if isinstance(event, int):
            child.progress.exited(event, child.log_tail())
        else:
            child.progress.apply(event)

    def _read(self, child: Child) -> None:
        """Read a child's events, then its exit code; runs in a thread for each child."""
        for line in child.lines():
            with suppress(ValueError):  # a kill cut the line short; the exit code reports it
                self._inbox.put((child, from_line(line)))
        self._inbox.put((child, child.process.wait()))

    def _stop(self, timeout: float) -> None:
        """Let all children leave; kill those that have not left after some seconds."""
        for child in self._children:
            child.progress.stop()
            child.leave()
        deadline = time.monotonic() + timeout
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.progress.fail(f"had not left after {timeout:.0f} s")
                child.process.kill()
                child.process.wait()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for child in self._children:
                child.process.terminate()
            self._stop(TERMINATE_TIMEOUT_S)
            return
        self._stop(LEAVE_TIMEOUT_S)
        for reader in self._readers:
            reader.join(TERMINATE_TIMEOUT_S)
        self.pump(0.01)  # collects exit codes: a process that failed while closing counts as failed
