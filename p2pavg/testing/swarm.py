"""Real peers in real processes on this machine, which a test may kill, stop, resume and restart.

Every process runs one function of yours, ``work(member)``, with a :class:`Member` that tells it who it is and carries
what it reports back and what it is told. Those that are started together bootstrap from the first of them; who comes
later is given the addresses of all that run then, so the first may die like any other.

Needs a system with POSIX signals for ``stop`` and ``resume``.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO

from p2pavg import blocking
from p2pavg.config import AveragingConfig

START_SECONDS = 60.0  # importing torch on a busy machine
_LEAVE_SECONDS = 10.0
_LOOK_SECONDS = 0.05


class Member:
    """What a process of a swarm knows, and its line to the test."""

    def __init__(
        self, index: int, bootstrap: Sequence[str], arguments: Mapping[str, Any], reports: TextIO
    ) -> None:
        self.index = index
        self.bootstrap = tuple(bootstrap)
        self.arguments = dict(arguments)
        """What the swarm was given for every process, and for this one."""
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reports = reports

    def report(self, **event: Any) -> None:
        """Send one event, of what JSON can carry, to :meth:`SwarmProcess.events`.

        What the process prints goes to its standard error, which is the test's.
        """
        self._reports.write(json.dumps(event) + "\n")
        self._reports.flush()

    def told(self, timeout: float) -> dict[str, Any] | None:
        """The next message of :meth:`SwarmProcess.tell`; ``None`` when none came within ``timeout`` seconds."""
        try:
            return self._told.get(timeout=timeout)
        except queue.Empty:
            return None

    def listen(self, lines: Iterable[str]) -> None:
        """Take what the test says, for :meth:`told`, until it has nothing more to say."""
        for line in lines:
            self._told.put(json.loads(line))

    @contextmanager
    def averager(
        self, config: AveragingConfig, *, identity: str | os.PathLike[str] | None = None
    ) -> Iterator[blocking.Averager]:
        """An averager on the loopback interface that knows the swarm; reports its address, for the others.

        Args:
            config: the run, and how to average in it.
            identity: the key file, made when missing: a process that is restarted with it has the same peer id again.
        """
        with blocking.open_averager(
            config, bootstrap=self.bootstrap, listen=["/ip4/127.0.0.1/tcp/0"], identity=identity
        ) as averager:
            self.report(address=averager.addresses[0], peer_id=averager.peer_id)
            yield averager


class SwarmProcess:
    """One process of a swarm, seen from the test."""

    def __init__(
        self, index: int, process: subprocess.Popen[str], arguments: Mapping[str, Any] | None = None
    ) -> None:
        self.index = index
        self.process = process
        self.arguments = dict(arguments or {})
        """What it is given as :attr:`Member.arguments`."""
        self.peer_id = ""
        """Known when it has joined."""
        self.address = ""
        """Where others dial it; known when it has joined."""
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._before_joining: deque[dict[str, Any]] = deque()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # else it was killed before it had said it all
                self._events.put(json.loads(line))
        self._events.put(None)

    @property
    def running(self) -> bool:
        """Whether the process has not ended; one that is stopped has not."""
        return self.process.poll() is None

    def wait_joined(self, timeout: float = START_SECONDS) -> str:
        """Its address, when it has one: its averager is open and others can reach it.

        Raises:
            EOFError: the process has ended.
            TimeoutError: it has not joined within ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while not self.address:
            event = self._next(max(end - time.monotonic(), 0.0))
            if event.keys() == {"peer_id", "address"}:
                self.peer_id, self.address = event["peer_id"], event["address"]
            else:
                self._before_joining.append(event)
        return self.address

    def tell(self, **message: Any) -> None:
        """Send one message, of what JSON can carry, to :meth:`Member.told`. A process that has ended hears nothing."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def event(self, timeout: float) -> dict[str, Any]:
        """The next report.

        Raises:
            EOFError: the process has ended.
            TimeoutError: nothing was reported within ``timeout`` seconds.
        """
        return self._before_joining.popleft() if self._before_joining else self._next(timeout)

    def _next(self, timeout: float) -> dict[str, Any]:
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


def _name_of(work: Callable[[Member], None]) -> str:
    """As a fresh process finds it."""
    if "." in work.__qualname__:
        raise ValueError(f"work must be a function of a module's top level, got {work.__qualname__}")
    if work.__module__ != "__main__":
        return f"{work.__module__}:{work.__name__}"
    main = sys.modules["__main__"]
    spec = main.__spec__
    if spec is not None:  # of `python -m`
        return f"{spec.name}:{work.__name__}"
    if getattr(main, "__file__", None) is None:
        raise ValueError("work must be a function of a file: what is typed in has none")
    return f"{os.path.abspath(str(main.__file__))}:{work.__name__}"


class LocalSwarm:
    """Processes that run ``work``, each with its index and the addresses of others.

    Args:
        work: a function of a module's top level, or its name as ``"module:function"``. A fresh process finds the
            module from the current folder, and that of the script that runs by its file.
        peers: how many processes :meth:`start` starts.
        arguments: given to each as :attr:`Member.arguments`; of what JSON can carry.

    Use it in a ``with`` block: leaving it ends every process, and those that they have started. They also
    end when this one dies. A Ctrl-C in the terminal reaches this process only, which then leaves its block.

    Raises:
        ValueError: ``work`` is a function that a fresh process cannot find.
    """

    def __init__(
        self,
        work: str | Callable[[Member], None],
        *,
        peers: int,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.work = work if isinstance(work, str) else _name_of(work)
        self.peers = peers
        self.arguments = dict(arguments or {})
        self.processes: list[SwarmProcess] = []
        """By index: the last process that was started with each."""
        self._launched: list[SwarmProcess] = []

    @property
    def bootstrap(self) -> list[str]:
        """What a new process is given to join with: the addresses of all that have joined and run."""
        return [process.address for process in self.processes if process.address and process.running]

    def start(self) -> None:
        """Start the processes and wait until each has reported its address."""
        started = [self._launch(len(self.processes), self.arguments) for _ in range(self.peers)]
        for process in started:
            self._set_up(process, self.bootstrap)
            if process.index == 0:
                process.wait_joined()
        for process in started[1:]:
            process.wait_joined()

    def wait_ended(self, timeout: float) -> None:
        """Wait until every process has ended by itself.

        Raises:
            RuntimeError: one ended with another exit code than 0; its traceback is on standard error.
            TimeoutError: one still runs ``timeout`` seconds from now.
        """
        end = time.monotonic() + timeout
        while True:
            is_late = time.monotonic() >= end  # before the look at what has ended
            codes = {found.index: found.process.poll() for found in self.processes}
            for index, code in codes.items():
                if code:
                    raise RuntimeError(f"process {index} ended with {code}")
            running = [index for index, code in codes.items() if code is None]
            if not running:
                return
            if is_late:
                raise TimeoutError(f"process {running[0]} still runs after {timeout:g} s")
            time.sleep(_LOOK_SECONDS)

    def add(self, *, arguments: Mapping[str, Any] | None = None, wait: bool = True) -> SwarmProcess:
        """One more process.

        Args:
            arguments: for this process, beside the swarm's and before them.
            wait: return when it has joined; else at once, and :meth:`SwarmProcess.wait_joined` is the caller's.
        """
        return self._add(len(self.processes), {**self.arguments, **(arguments or {})}, wait)

    def restart(
        self, index: int, *, arguments: Mapping[str, Any] | None = None, wait: bool = True
    ) -> SwarmProcess:
        """Another process in the place of one that has ended; it is killed if it has not.

        It has the same index and the same arguments, and so the same peer id where ``work`` opens its averager with a
        key file that these name. What the former process has reported stays with its :class:`SwarmProcess`.

        Args:
            index: of the former process, in :attr:`processes`.
            arguments: to be changed.
            wait: as of :meth:`add`.
        """
        former = self.processes[index]
        former.kill()
        former.process.wait()
        return self._add(index, {**former.arguments, **(arguments or {})}, wait)

    def _add(self, index: int, arguments: Mapping[str, Any], wait: bool) -> SwarmProcess:
        bootstrap = self.bootstrap
        process = self._launch(index, arguments)
        self._set_up(process, bootstrap)
        if wait:
            process.wait_joined()
        return process

    def _launch(self, index: int, arguments: Mapping[str, Any]) -> SwarmProcess:
        """A process that imports what it needs, and then waits to be told who it is."""
        process = subprocess.Popen(
            [sys.executable, "-m", "p2pavg.testing.swarm_process", self.work],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        found = SwarmProcess(index, process, arguments)
        self._launched.append(found)
        self.processes[index : index + 1] = [found]
        return found

    def _set_up(self, found: SwarmProcess, bootstrap: Sequence[str]) -> None:
        found.tell(index=found.index, bootstrap=list(bootstrap), arguments=found.arguments)

    def __enter__(self) -> LocalSwarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for found in self._launched:
            if found.process.stdin is not None:
                with suppress(BrokenPipeError):  # it was told something that it did not live to hear
                    found.process.stdin.close()  # the member's sign to leave
            if found.running:
                found.resume()
        for found in self._launched:
            try:
                found.process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                found.kill()
                found.process.wait()
            with suppress(ProcessLookupError, PermissionError):  # those that it has started itself
                os.killpg(found.process.pid, signal.SIGKILL)
            if found.process.stdout is not None:
                found.process.stdout.close()
