"""The stage of the operator's day: commands, daemons and members as real processes, and the transcript."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WATCHDOG_SECONDS = 180.0
MAX_SHOWN = 130
"""Characters of a line in the transcript."""


class DayError(Exception):
    """Something was not as it is promised."""


@dataclass
class Step:
    """One step of the day: its heading, what it does, and the commands with their output."""

    heading: str
    text: str
    lines: list[str] = field(default_factory=list)


class Program:
    """A process whose output goes into files of the day's folder."""

    def __init__(
        self, name: str, arguments: Sequence[str], folder: Path, environment: dict[str, str]
    ) -> None:
        self.name = name
        self.out, self.log = folder / f"{name}.out", folder / f"{name}.log"
        with self.out.open("ab") as out, self.log.open("ab") as log:
            self._begins = out.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments], cwd=folder, env=environment, stdout=out, stderr=log
            )

    def events(self) -> list[dict[str, Any]]:
        """Return the JSON objects that the process has printed since its start."""
        with self.out.open("rb") as opened:
            opened.seek(self._begins)
            return [
                json.loads(line) for line in opened.read().splitlines(keepends=True) if line.endswith(b"\n")
            ]

    def event(self, key: str) -> dict[str, Any] | None:
        """Return the last object that has a key."""
        return next((each for each in reversed(self.events()) if key in each), None)


class Stage:
    """The folder of the day, its processes, and its transcript.

    Args:
        folder: empty; the processes work in it.
        show: is given each line of the transcript at once.
    """

    def __init__(self, folder: Path, show: Callable[[str], None]) -> None:
        self.folder = folder
        self.steps: list[Step] = []
        self.programs: list[Program] = []
        self._show = show
        self._ids: dict[str, str] = {}
        self._installed = folder / "installed"
        self._installed.mkdir()
        (self._installed / "p2pavg").symlink_to(ROOT / "p2pavg")
        paths = [self._installed, ROOT / "compression", ROOT / "dht", ROOT]
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "TERM": "dumb",
        }

    def begin(self, heading: str, text: str) -> None:
        """Begin a step."""
        self.steps.append(Step(heading, text))
        self._show(f"\n{heading}")

    def know(self, peer_id: str, name: str) -> None:
        """Write a name in place of a peer's id in the transcript."""
        self._ids[peer_id] = name

    def command(self, *arguments: str, code: int = 0, shows: str = "", shown: bool = True) -> str:
        """Run ``p2pavg`` as an operator does, and note it.

        Args:
            code: the exit code that it must have.
            shows: pattern of the output lines that the transcript shows; empty for all.
            shown: false to leave the command out of the transcript.
        """
        done = subprocess.run(
            [sys.executable, "-m", "p2pavg", *arguments],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=WATCHDOG_SECONDS,
            check=False,
        )
        if done.returncode != code:
            raise DayError(
                f"{arguments} ended with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}"
            )
        lines = [f"$ p2pavg {' '.join(arguments)}"]
        lines += [line for line in done.stdout.splitlines() if re.search(shows, line)]
        lines += [f"exit code {code}"] if code else []
        for line in lines if shown else ():
            self.note(line)
        return done.stdout

    def note(self, line: str) -> None:
        """Add a line to the transcript, with names in place of ids and folders."""
        line = line.replace(f"{self.folder}/", "")
        for peer_id, name in self._ids.items():
            line = line.replace(peer_id, name)
        line = re.sub(r"process \d+", "process 4711", re.sub(r"\b[0-9a-f]{32}\b", "5bf0…c208", line))
        line = line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 1]}…"
        self.steps[-1].lines.append(line)
        self._show(f"    {line}")

    def daemon(self, name: str, *arguments: str) -> Program:
        """Start ``p2pavg join`` in the background, with the folder ``name``."""
        given = ["join", "lab.run", "--home", name, *arguments]
        self.note(f"$ p2pavg {' '.join(given)} &")
        return self._start(name, ["p2pavg", *given, "--no-port-mapping"])

    def member(self, name: str, port: int) -> Program:
        """Start a member that trains."""
        self.note(f"$ python train.py {name} &")
        return self._start(name, ["scripts.fault_search.day_work", name, str(port)])

    def _start(self, name: str, arguments: Sequence[str]) -> Program:
        started = Program(name, arguments, self.folder, dict(self._environment))
        self.programs.append(started)
        return started

    def status(self, name: str) -> dict[str, Any] | None:
        """Return what `p2pavg status --json` says of a daemon, unnoted; ``None`` if it does not run."""
        done = subprocess.run(
            [sys.executable, "-m", "p2pavg", "status", "--home", name, "--json"],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=WATCHDOG_SECONDS,
            check=False,
        )
        found: list[dict[str, Any]] = json.loads(done.stdout or "[]")
        return found[0] if found else None

    def install(self, version: str) -> None:
        """Install a later version of the package: a copy of this one that says another version."""
        folder = self.folder / f"p2pavg-{version}"
        for source in sorted((ROOT / "p2pavg").rglob("*.py")):
            target = folder / source.relative_to(ROOT / "p2pavg")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
        file = folder / "base" / "version.py"
        file.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', file.read_text()))
        link = self._installed / "p2pavg.new"
        link.symlink_to(folder)
        link.replace(self._installed / "p2pavg")
        self.note(f"$ pip install p2pavg=={version}")

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        """Look again and again until a condition holds; give up after three minutes."""
        end = time.monotonic() + WATCHDOG_SECONDS
        while not condition():
            self.check_alive()
            if time.monotonic() > end:
                raise DayError(f"{what}: not within {WATCHDOG_SECONDS:.0f} s\n{self.logs()}")
            time.sleep(0.3)

    def check_alive(self) -> None:
        """Raise DayError if a process has failed."""
        for each in self.programs:
            if each.process.poll() not in (None, 0):
                raise DayError(f"{each.name} ended with {each.process.returncode}\n{self.logs()}")

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(
            f"--- {file.name}\n{file.read_text()[-1500:]}" for file in sorted(self.folder.glob("*.log"))
        )

    def signal(self, program: Program, number: signal.Signals) -> None:
        """Send a signal."""
        self.note(f"$ kill -{number.name.removeprefix('SIG')} {program.name}")
        program.process.send_signal(number)

    def close(self) -> None:
        """Kill what still runs."""
        for each in self.programs:
            if each.process.poll() is None:
                each.process.kill()
            each.process.wait(WATCHDOG_SECONDS)


def free_ports(count: int) -> list[int]:
    """Return free ports of this machine, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
