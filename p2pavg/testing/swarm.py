"""Real peers in real processes on this machine, which a test may kill, stop and resume.

Every process runs one function of yours, ``work(member)``, with a :class:`Member` that tells it who it is and carries
what it reports back. The first process is everybody's bootstrap peer.

Needs a system with POSIX signals for ``stop`` and ``resume``.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from p2pavg import blocking
from p2pavg.config import AveragingConfig

START_SECONDS = 60.0  # importing torch on a busy machine
_LEAVE_SECONDS = 10.0


class Member:
    """What a process of a swarm knows, and its line to the test."""

    def __init__(self, index: int, bootstrap: Sequence[str], arguments: Mapping[str, Any]) -> None:
        self.index = index
        self.bootstrap = tuple(bootstrap)
        self.arguments = dict(arguments)
        """What the swarm was given for every process."""

    def report(self, **event: Any) -> None:
        """Send one event, of what JSON can carry, to :meth:`SwarmProcess.events`."""
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    @contextmanager
    def averager(self, config: AveragingConfig) -> Iterator[blocking.Averager]:
        """An averager on the loopback interface that knows the swarm; reports its address, for the others."""
        with blocking.open_averager(
            config, bootstrap=self.bootstrap, listen=["/ip4/127.0.0.1/tcp/0"]
        ) as averager:
            self.report(address=averager.addresses[0], peer_id=averager.peer_id)
            yield averager


class SwarmProcess:
    """One process of a swarm, seen from the test."""

    def __init__(self, index: int, process: subprocess.Popen[str]) -> None:
        self.index = index
        self.process = process
        self.peer_id = ""
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def event(self, timeout: float) -> dict[str, Any]:
        """The next report.

        Raises:
            EOFError: the process has ended.
            TimeoutError: nothing was reported within ``timeout`` seconds.
        """
        try:
            found = self._events.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"process {self.index} reported nothing within {timeout:.0f} s") from None
        if found is None:
            self._events.put(None)
            raise EOFError(f"process {self.index} ended with {self.process.wait()}")
        return found

    def events(self, timeout: float) -> Iterator[dict[str, Any]]:
        """Every further report until the process ends, all within ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                yield self.event(max(end - time.monotonic(), 0.0))
            except EOFError:
                return

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def stop(self) -> None:
        """SIGSTOP: it stands still and its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)


class LocalSwarm:
    """Processes that run ``work``, each with its index and the first one's address.

    Args:
        work: ``"module:function"``, importable in a fresh process from the current folder.
        peers: how many processes :meth:`start` starts.
        arguments: given to each as :attr:`Member.arguments`; of what JSON can carry.

    Use it in a ``with`` block: leaving it ends every process. They also end when this one dies.
    """

    def __init__(self, work: str, *, peers: int, arguments: Mapping[str, Any] | None = None) -> None:
        self.work = work
        self.peers = peers
        self.arguments = dict(arguments or {})
        self.processes: list[SwarmProcess] = []
        self.bootstrap: list[str] = []

    def start(self) -> None:
        """Start the processes and wait until each has reported its address."""
        started = [self._launch() for _ in range(self.peers)]
        for process in started:
            self._set_up(process)
            if process.index == 0:
                self.bootstrap = [self._await_address(process)]
        for process in started[1:]:
            self._await_address(process)

    def add(self) -> SwarmProcess:
        """One more process; returns when it has reported its address."""
        process = self._launch()
        self._set_up(process)
        address = self._await_address(process)
        self.bootstrap = self.bootstrap or [address]
        return process

    def _launch(self) -> SwarmProcess:
        """A process that imports what it needs, and then waits to be told who it is."""
        process = subprocess.Popen(
            [sys.executable, "-m", "p2pavg.testing.swarm_process", self.work],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(SwarmProcess(len(self.processes), process))
        return self.processes[-1]

    def _set_up(self, found: SwarmProcess) -> None:
        setup = {"index": found.index, "bootstrap": self.bootstrap, "arguments": self.arguments}
        assert found.process.stdin is not None
        found.process.stdin.write(json.dumps(setup) + "\n")
        found.process.stdin.flush()

    def _await_address(self, process: SwarmProcess) -> str:
        event = process.event(START_SECONDS)
        process.peer_id = event["peer_id"]
        address: str = event["address"]
        return address

    def __enter__(self) -> LocalSwarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for found in self.processes:
            if found.process.stdin is not None:
                found.process.stdin.close()  # the member's sign to leave
            if found.process.poll() is None:
                found.resume()
        for found in self.processes:
            try:
                found.process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                found.kill()
                found.process.wait()
            if found.process.stdout is not None:
                found.process.stdout.close()
