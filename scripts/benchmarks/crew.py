"""The processes of one system, which do rounds together on command."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.benchmarks.figures import Report

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0  # importing torch in many processes on a busy machine
END_SECONDS = 5.0
LEAD_SECONDS = 0.03  # between the command and the start of a round: all processes have read it by then


class CrewError(Exception):
    """A process ended early, timed out, or averaged wrongly."""


@dataclass(frozen=True)
class System:
    """One system to measure."""

    name: str
    module: str
    """Module that each process runs."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5
    """Relative L2 error above which a result counts as wrong; encoding alone stays below it."""
    python: str = sys.executable


@dataclass(frozen=True)
class Place:
    """Place in which one process runs."""

    host: str = "127.0.0.1"
    interface: str = "lo"
    prefix: tuple[str, ...] = ()
    """Words before the process's command."""


@dataclass(frozen=True)
class Measured:
    """Figures of one round, over all members."""

    step: float
    """Seconds from the common start to the end of the last member."""
    exchange: float
    """The longest exchange of a member; the same as ``step`` for a system without matchmaking."""
    group: float
    cpu: float
    """CPU seconds of all members together."""
    above: float
    """Peak memory above that before the round, in bytes; maximum over the members."""
    above_first: float
    """Peak memory above that before the first round, which includes buffers kept between rounds."""
    resident: float
    """Peak memory in bytes; maximum over the members."""
    error: float
    """Relative L2 error; maximum over the members."""
    ended: float
    """Time at which the last member had its result."""


class Process:
    """One child process, seen from the parent."""

    def __init__(self, system: System, place: Place) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read after its end, closed by `end`
        self._popen = subprocess.Popen(
            [*place.prefix, system.python, "-m", system.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            # Another python's environment does not have this project on its path.
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            process_group=0,
        )
        self.pid = self._popen.pid
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line.endswith("\n"):  # otherwise it was killed in the middle of a line
                self._events.put(json.loads(line))
        self._events.put(None)

    def tell(self, **message: Any) -> None:
        """Send one message; do nothing if the process has ended."""
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.write(json.dumps(message) + "\n")
            self._popen.stdin.flush()

    def event(self, deadline: float) -> dict[str, Any]:
        """Return its next report.

        Raises:
            CrewError: no report arrives by ``deadline``.
        """
        try:
            found = self._events.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            raise CrewError("a process said nothing in time") from None
        if found is None:
            raise CrewError(f"a process ended: {self._last_words()}")
        return found

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = self.log.read().strip().splitlines()
        return lines[-1] if lines else "nothing is said of why"

    def end(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self.log.close()
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._reader.join(END_SECONDS)
        if (
            not self._reader.is_alive()
        ):  # otherwise a child that left the process group still holds the other end
            self._popen.stdout.close()


class Crew:
    """The processes of one system. Leaving the ``with`` block ends them.

    Args:
        places: one for each process.
        setup: first message to each process, beside its place and the system's arguments.
        seconds: timeout of one round.
    """

    def __init__(
        self, system: System, places: Sequence[Place], setup: Mapping[str, Any], *, seconds: float = 120.0
    ) -> None:
        self.system = system
        self._seconds = seconds
        self._places = places
        self._setup = {**setup, **system.arguments, "count": len(places)}
        self.processes: list[Process] = []
        self._rounds = 0

    def __enter__(self) -> Crew:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.end()
        self.processes = []

    def _start(self) -> None:
        """Start all processes at once; pass the first one's address to the others."""
        self.processes = [Process(self.system, place) for place in self._places]
        deadline = time.monotonic() + START_SECONDS
        bootstrap: list[str] = []
        for index, (process, place) in enumerate(zip(self.processes, self._places, strict=True)):
            process.tell(
                index=index, bootstrap=bootstrap, host=place.host, interface=place.interface, **self._setup
            )
            if index == 0:
                bootstrap = [process.event(deadline)["address"]]
        for process in self.processes[1:]:
            process.event(deadline)

    def ready(self) -> None:
        """Wait until each process can do rounds."""
        self.heard(time.monotonic() + START_SECONDS)

    def heard(self, deadline: float) -> list[dict[str, Any]]:
        """Return the next report of each process."""
        return [process.event(deadline) for process in self.processes]

    def tell(self, **message: Any) -> None:
        """Send the same message to all."""
        for process in self.processes:
            process.tell(**message)

    def round(self) -> Measured:
        """Run one round, begun by all processes at the same moment.

        Raises:
            CrewError: the round did not end in time, or its result is wrong.
        """
        deadline = time.monotonic() + self._seconds
        self.tell(prepare=self._rounds)
        self._rounds += 1
        self.heard(deadline)
        self.tell(at=time.monotonic() + LEAD_SECONDS)
        return self.ended(deadline)

    def ended(self, deadline: float) -> Measured:
        """Collect the reports of a round that all have begun."""
        times = self.heard(deadline)
        self.tell(check=True)
        found = self.heard(deadline)
        measured = Measured(
            step=max(event["step"] for event in times),
            exchange=max(event.get("exchange", event["step"]) for event in times),
            group=max(event.get("group", 0.0) for event in times),
            cpu=sum(event["cpu"] for event in found),
            above=max(event["above"] for event in found),
            above_first=max(event["above_first"] for event in found),
            resident=max(event["resident"] for event in found),
            error=max(event["error"] for event in found),
            ended=max(event["ended"] for event in times),
        )
        if not measured.error <= self.system.tolerance:
            raise CrewError(f"the result is wrong: relative L2 error {measured.error:.2g}")
        return measured


def rounds_in_turn(
    crews: Mapping[str, Crew], stack: ExitStack, repeats: int, report: Report, benchmark: str
) -> dict[str, list[Measured]]:
    """Start each crew, which the stack ends, and let them run one round each in turn; report those that fail."""
    started: dict[str, Crew] = {}
    for name, crew in crews.items():
        report.note(f"{benchmark}: starting {name}")
        try:
            stack.enter_context(crew)
            crew.ready()
            crew.round()  # connections, buffers
            started[name] = crew
        except CrewError as error:
            report.error(benchmark, name, str(error))
            crew.end()
    found: dict[str, list[Measured]] = {}
    for _ in range(repeats):
        for name, crew in started.items():
            try:
                found.setdefault(name, []).append(crew.round())
            except CrewError as error:
                report.error(benchmark, name, str(error))
    return found
