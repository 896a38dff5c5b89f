"""The views of the terminal, on a real one: they draw, end with Ctrl-C, and leave the terminal as it was."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2pavg import AveragingConfig
from p2pavg.blocking import open_averager
from tests.integration.daemons import LOOPBACK, succeed

WATCHDOG_SECONDS = 120.0
SHOWS_CURSOR, HIDES_CURSOR = b"\x1b[?25h", b"\x1b[?25l"
ENTERS_SCREEN, LEAVES_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="setsid --ctty is Linux's")


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, main: int, child: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._main = main
        self._child = child
        self.before = termios.tcgetattr(child)
        self.drawn = b""

    @property
    def settings(self) -> list[object]:
        """The settings of the terminal, such as whether it echoes."""
        return termios.tcgetattr(self._child)

    def until(self, pattern: bytes) -> None:
        """Read until the program has drawn something."""
        end = time.monotonic() + WATCHDOG_SECONDS
        while re.search(pattern, self.drawn) is None:
            assert time.monotonic() < end, self.drawn[-3000:]
            assert self._read() or self.process.poll() is None, self.drawn[-3000:]

    def press_ctrl_c(self) -> int:
        """Press Ctrl-C; return the exit code."""
        os.write(self._main, b"\x03")
        end = time.monotonic() + WATCHDOG_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < end, self.drawn[-3000:]
            self._read()
        while self._read():
            pass
        return self.process.wait()

    def _read(self) -> bool:
        ready, _, _ = select.select([self._main], [], [], 0.2)
        if ready:
            self.drawn += os.read(self._main, 2**16)
        return bool(ready)


@contextmanager
def on_terminal(*arguments: str) -> Iterator[Terminal]:
    main, child = pty.openpty()
    termios.tcsetwinsize(child, (40, 120))
    # A program gets Ctrl-C from the terminal that controls its session.
    command = ["setsid", "--ctty", "--wait", sys.executable, "-m", "p2pavg", *arguments]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
    try:
        yield Terminal(main, child, process)
    finally:
        process.kill()
        process.wait()
        os.close(main)
        os.close(child)


def test_the_monitor_draws_and_leaves_the_terminal_as_it_was() -> None:
    with open_averager(AveragingConfig(run_id="lab"), listen=[LOOPBACK]) as peer:
        options = ("--bootstrap", peer.addresses[0], "--peer-listen", LOOPBACK, "--terminal")
        with on_terminal("monitor", "lab", *options) as terminal:
            terminal.until(rb"Peers")
            assert ENTERS_SCREEN in terminal.drawn
            assert terminal.press_ctrl_c() == 0
            assert terminal.drawn.rindex(LEAVES_SCREEN) > terminal.drawn.rindex(ENTERS_SCREEN)
            assert terminal.drawn.rindex(SHOWS_CURSOR) > terminal.drawn.rindex(HIDES_CURSOR)
            assert b"Traceback" not in terminal.drawn
            assert terminal.settings == terminal.before


@pytest.mark.long
def test_the_volunteers_view_draws_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    succeed("run", "create", "lab", "--output", ".")
    peer_id = succeed("identity", "peer.key").split()[-1]
    terms = ("--max-weight", "100", "--days", "30", "--role", "auxiliary")
    succeed("run", "invite", "lab.run", peer_id, *terms, "--output", "peer.cert")
    options = ("--identity", "peer.key", "--certificate", "peer.cert", "--home", "home", "--no-port-mapping")
    with on_terminal("join", "lab.run", *options, "--listen", "/ip4/127.0.0.1/tcp/0") as terminal:
        terminal.until(rb"this machine gives")
        terminal.until(rb"Ctrl-C ends after the round")
        assert terminal.press_ctrl_c() == 0
        assert terminal.drawn.rindex(SHOWS_CURSOR) > terminal.drawn.rindex(HIDES_CURSOR)
        assert b"Traceback" not in terminal.drawn
        assert terminal.settings == terminal.before
