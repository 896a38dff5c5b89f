"""The command line in processes of its own: commands that end, and daemons."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.programs import run_python

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
COMMAND = [sys.executable, "-m", "p2pavg"]
TERMINAL = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
ENVIRONMENT = os.environ | TERMINAL
WATCHDOG_SECONDS = 180.0  # a machine that does much else starts a process in half a minute


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command until it ends."""
    return run_python(*COMMAND[1:], *arguments, timeout=WATCHDOG_SECONDS, env=ENVIRONMENT)


def succeed(*arguments: object) -> str:
    """Return the output of a command that succeeds."""
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


class Daemon:
    """A process whose output goes into files.

    Args:
        words: its command.
        output: the files, without their endings.
    """

    def __init__(self, words: list[str], output: Path, environment: Mapping[str, str] = ENVIRONMENT) -> None:
        self._out, self._log = output.with_suffix(".out"), output.with_suffix(".log")
        with self._out.open("w") as out, self._log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=out, stderr=log, env=environment)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def out(self) -> list[str]:
        return self._out.read_text().splitlines()

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until something is so, while the process runs; return it."""
        end = time.monotonic() + WATCHDOG_SECONDS
        while not (found := condition()):
            assert time.monotonic() < end, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.1)
        return found

    def wait_for(self, pattern: str) -> None:
        """Wait until the log has a text."""
        self.until(lambda: re.search(pattern, self.log))

    def address(self, number: int = 1) -> str:
        """Return the address that the daemon printed at its ``number``-th start."""
        self.until(lambda: len(self.out) >= number)
        return self.out[number - 1]

    def leave(self, number: signal.Signals = signal.SIGTERM, within: float = WATCHDOG_SECONDS) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.ended(within)

    def ended(self, within: float = WATCHDOG_SECONDS) -> int:
        """Return the exit code. Raise TimeoutExpired if the process takes longer than that."""
        code = self.process.wait(within)
        assert "Traceback" not in self.log, self.log
        return code

    def kill(self) -> None:
        """End the process if it runs."""
        self.process.kill()
        self.process.wait(WATCHDOG_SECONDS)


@contextmanager
def daemon(*arguments: str) -> Iterator[Daemon]:
    """Run ``p2pavg peer`` on this machine until the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        started = Daemon([*COMMAND, "peer", "--listen", LOOPBACK, *arguments], Path(folder) / "daemon")
        try:
            yield started
        finally:
            started.kill()
