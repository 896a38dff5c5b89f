"""Helpers: the daemon as a process, and training processes that attach to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import p2pavg
from p2pavg.attached import AttachedAverager
from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import Member, SwarmProcess

WATCHDOG_SECONDS = 240.0


class Daemon:
    """``p2pavg peer --attach``, which a test may kill and start again with the same identity."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.path = str(folder / "peer.sock")
        self._identity = str(folder / "peer.key")
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> None:
        """Start it, and wait until it has printed its address."""
        command = [sys.executable, "-m", "p2pavg", "peer", "--listen", "/ip4/127.0.0.1/tcp/0"]
        command += ["--no-port-mapping", "--identity", self._identity, "--attach", self.path, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the daemon has ended"

    def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal, and return the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    @property
    def niceness(self) -> int:
        """The niceness of its event loop's thread, which is the process's first."""
        assert self._process is not None
        return os.getpriority(os.PRIO_PROCESS, self._process.pid)

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self._process is not None and self._process.poll() is None


@contextmanager
def daemon(folder: Path, *options: str) -> Iterator[Daemon]:
    """Run a daemon for as long as the block runs."""
    found = Daemon(folder, *options)
    found.start()
    try:
        yield found
    finally:
        if found.running:
            found.kill()


@contextmanager
def attached(member: Member, config: p2pavg.AveragingConfig) -> Iterator[AttachedAverager]:
    """Open the averager of a process that is attached to the daemon at the argument ``path``."""
    name = f"p{member.index}"
    with (
        p2pavg.attach(f"unix:{member.arguments['path']}", name=name) as peer,
        peer.averager(config) as averager,
    ):
        member.report(address=peer.addresses[0], peer_id=peer.id)
        yield averager


def events_of(swarm: LocalSwarm, kind: str) -> list[dict[str, object]]:
    """Return the first report of each process that has the key ``kind``."""
    return [event_of(process, kind) for process in swarm.processes]


def event_of(process: SwarmProcess, kind: str) -> dict[str, object]:
    """Return the next report of a process that has the key ``kind``; skip others."""
    end = time.monotonic() + WATCHDOG_SECONDS
    while True:
        event = process.event(max(end - time.monotonic(), 0.0))
        if kind in event:
            return event


def kill(process: SwarmProcess) -> None:
    """Kill a process and wait for its end."""
    os.kill(process.process.pid, signal.SIGKILL)
    process.process.wait()
