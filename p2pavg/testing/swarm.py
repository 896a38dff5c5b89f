"""Real peers in real processes on this machine, which a test may kill, stop, resume and restart.

Every process runs one function of the test, ``work(member)``. Its :class:`Member` holds the process' index, and carries
reports to the test and messages from it. Processes that are started together bootstrap from the first of them. A
process that is added later gets the addresses of all running ones, so the first process may die like any other.

``stop`` and ``resume`` need a system with POSIX signals.
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
from importlib.machinery import ModuleSpec
from types import TracebackType
from typing import Any, TextIO

from p2pavg import blocking
from p2pavg.base.limits import START_SECONDS, STOP_SECONDS
from p2pavg.runs.config import AveragingConfig
from p2pavg.testing.faults import At, Crash, Fault, FaultPlan, Stop
from p2pavg.testing.forking import Process, can_fork, fork_process

_LOOK_SECONDS = 0.05


def signals_of(plan: FaultPlan) -> list[tuple[float, int, str]]:
    """Return the signals of a plan in their order: seconds from its beginning, index of the process, and the method.

    Raises:
        ValueError: real processes cannot have one of the faults; the message says why.
    """
    found: list[tuple[float, int, str]] = []
    for fault in plan.faults:
        match fault:
            case Fault(Crash(peer), At(at)):
                found.append((at, peer, "kill"))
            case Fault(Stop(peer, seconds), At(at)):
                found.append((at, peer, "stop"))
                if seconds is not None:
                    found.append((at + seconds, peer, "resume"))
            case Fault(_, At()):
                raise ValueError(
                    f"{fault}: processes of one machine share its network; use Crash or Stop, or simulated peers"
                )
            case _:
                raise ValueError(
                    f"{fault}: the milestones of real processes are not seen from outside; use At(seconds), or"
                    " simulated peers"
                )
    return sorted(found)


class Member:
    """A process of a swarm, seen from inside: its settings, and its channel to the test."""

    def __init__(
        self, index: int, bootstrap: Sequence[str], arguments: Mapping[str, Any], reports: TextIO
    ) -> None:
        self.index = index
        self.bootstrap = tuple(bootstrap)
        self.arguments = dict(arguments)
        """The arguments of the swarm for every process, updated with those for this one."""
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reports = reports

    def report(self, **event: Any) -> None:
        """Send an event of JSON values to :meth:`SwarmProcess.events`.

        The process' standard output is not used for this: it is redirected to the test's standard error.
        """
        self._reports.write(json.dumps(event) + "\n")
        self._reports.flush()

    def told(self, timeout: float) -> dict[str, Any] | None:
        """Return the next message of :meth:`SwarmProcess.tell`; ``None`` if none came within ``timeout`` seconds."""
        try:
            return self._told.get(timeout=timeout)
        except queue.Empty:
            return None

    def listen(self, lines: Iterable[str]) -> None:
        """Queue the test's messages for :meth:`told`, until the test closes the channel."""
        for line in lines:
            self._told.put(json.loads(line))

    @contextmanager
    def averager(
        self, config: AveragingConfig, *, identity: str | os.PathLike[str] | None = None
    ) -> Iterator[blocking.Averager]:
        """Open an averager on the loopback interface that joins the swarm, and report its address to the test.

        Args:
            config: the run and its settings.
            identity: the key file, created if missing. A process that is restarted with it keeps its peer id.
        """
        with blocking.open_averager(
            config, bootstrap=self.bootstrap, listen=["/ip4/127.0.0.1/tcp/0"], identity=identity
        ) as averager:
            self.report(address=averager.addresses[0], peer_id=averager.peer_id)
            yield averager


class SwarmProcess:
    """One process of a swarm, seen from the test."""

    def __init__(self, index: int, process: Process, arguments: Mapping[str, Any] | None = None) -> None:
        self.index = index
        self.process = process
        self.arguments = dict(arguments or {})
        """The value of :attr:`Member.arguments` in the process."""
        self.peer_id = ""
        """The peer id; empty until the process has joined."""
        self.address = ""
        """The address at which other peers dial it; empty until the process has joined."""
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._before_joining: deque[dict[str, Any]] = deque()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # else the process was killed in the middle of a line
                self._events.put(json.loads(line))
        self._events.put(None)

    @property
    def running(self) -> bool:
        """True if the process has not ended. A stopped process has not ended."""
        return self.process.poll() is None

    def wait_joined(self, timeout: float = START_SECONDS) -> str:
        """Wait until the process' averager is open and other peers can reach it. Return its address.

        Raises:
            EOFError: the process has ended.
            TimeoutError: the process has not joined within ``timeout`` seconds.
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
        """Send a message of JSON values to :meth:`Member.told`. Nothing happens if the process has ended."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def event(self, timeout: float) -> dict[str, Any]:
        """Return the next report.

        Raises:
            EOFError: the process has ended.
            TimeoutError: the process reported nothing within ``timeout`` seconds.
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
        """Yield every further report until the process ends, all within ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while True:
            try:
                yield self.event(max(end - time.monotonic(), 0.0))
            except EOFError:
                return

    def kill(self) -> None:
        """Send SIGKILL."""
        self.process.kill()

    def stop(self) -> None:
        """Send SIGSTOP: the process stands still, and its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self.process.send_signal(signal.SIGCONT)


def _name_of(work: Callable[[Member], None]) -> str:
    """Return the name by which a new process can import a function.

    pytest gives modules of tests names that only its own process can import, so those are found by their files.
    """
    if "." in work.__qualname__:
        raise ValueError(f"work must be a function of a module's top level, got {work.__qualname__}")
    if work.__module__ != "__main__":
        module = sys.modules[work.__module__]
        if _is_importable(work.__module__, getattr(module, "__file__", None)):
            return f"{work.__module__}:{work.__name__}"
        return f"{os.path.abspath(str(module.__file__))}:{work.__name__}"
    main = sys.modules["__main__"]
    spec = main.__spec__
    if spec is not None:  # of `python -m`
        return f"{spec.name}:{work.__name__}"
    if getattr(main, "__file__", None) is None:
        raise ValueError("work must be a function of a file; a function typed into a console has none")
    return f"{os.path.abspath(str(main.__file__))}:{work.__name__}"


def _search_path() -> list[str]:
    """Return the folders in which this process finds modules, as ``multiprocessing`` gives them to its processes."""
    return [os.path.abspath(entry) for entry in sys.path]


def _is_importable(name: str, file: str | None) -> bool:
    """Return whether a new process with the same search path finds a module by its name, in the same file."""
    spec: ModuleSpec | None = None
    path: Sequence[str] | None = None
    parts = name.split(".")
    for length in range(1, len(parts) + 1):  # not importlib.util.find_spec, which believes sys.modules
        found = (finder.find_spec(".".join(parts[:length]), path) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and (file is None or spec.origin == file)


class LocalSwarm:
    """Processes that run ``work``, each with its index and the addresses of other processes.

    Args:
        work: a function of a module's top level, or its name as ``"module:function"``. A new process imports the module
            with this process' search path. A function of the running script, or of a module of tests, is found by its
            file.
        peers: the number of processes that :meth:`start` starts.
        arguments: JSON values that each process gets as :attr:`Member.arguments`.
        fork: fork the processes from one that has imported torch and p2pavg, which saves each of them the seconds of
            these imports; else start a new interpreter for each. ``None``: fork on Linux, where system libraries allow
            it.

    Use it in a ``with`` block. Leaving the block ends every process, and the processes that they have started. They
    also end when this process dies. A Ctrl-C in the terminal reaches this process only, which then leaves its block.

    Raises:
        ValueError: ``work`` is a function that a new process cannot import, or this system cannot fork.
    """

    def __init__(
        self,
        work: str | Callable[[Member], None],
        *,
        peers: int,
        arguments: Mapping[str, Any] | None = None,
        fork: bool | None = None,
    ) -> None:
        self.work = work if isinstance(work, str) else _name_of(work)
        self.peers = peers
        self.fork = can_fork() if fork is None else fork
        if self.fork and not can_fork():
            raise ValueError(
                f"fork must be False or None on {sys.platform}: only Linux can fork such processes"
            )
        self.arguments = dict(arguments or {})
        self.processes: list[SwarmProcess] = []
        """The processes by index: for each index, the one that was started last."""
        self._launched: list[SwarmProcess] = []

    @property
    def bootstrap(self) -> list[str]:
        """The bootstrap addresses of a new process: those of all processes that have joined and still run."""
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

    @contextmanager
    def carrying_out(self, plan: FaultPlan) -> Iterator[None]:
        """Cause the faults of a plan for as long as the block runs: crashes and stops, at moments from its beginning.

        A process that has ended by then gets no signal.

        Raises:
            ValueError: real processes cannot have one of the faults, or there is no process of that index.
        """
        signals = signals_of(plan)
        for _, index, _ in signals:
            if not 0 <= index < len(self.processes):
                raise ValueError(f"the plan names process {index}, and the swarm has {len(self.processes)}")
        left = threading.Event()
        thread = threading.Thread(target=self._send, args=(signals, left), daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()

    def _send(self, signals: list[tuple[float, int, str]], left: threading.Event) -> None:
        """Send the signals of a plan, until its block is left."""
        began = time.monotonic()
        for at, index, method in signals:
            if left.wait(max(began + at - time.monotonic(), 0.0)):
                return
            process = self.processes[index]
            if process.running:
                getattr(process, method)()

    def wait_ended(self, timeout: float) -> None:
        """Wait until every process has ended by itself.

        Raises:
            RuntimeError: a process ended with an exit code other than 0; its traceback is on standard error.
            TimeoutError: a process still runs ``timeout`` seconds from now.
        """
        end = time.monotonic() + timeout
        while True:
            is_late = time.monotonic() >= end  # decided before the processes are polled
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
        """Start one more process.

        Args:
            arguments: updates of the swarm's arguments for this process.
            wait: wait until the process has joined. If false, the caller should call
                :meth:`SwarmProcess.wait_joined`.
        """
        return self._add(len(self.processes), {**self.arguments, **(arguments or {})}, wait)

    def restart(
        self, index: int, *, arguments: Mapping[str, Any] | None = None, wait: bool = True
    ) -> SwarmProcess:
        """Replace a process by a new one. The former process is killed if it still runs.

        The new process has the same index and arguments. If the arguments name a key file with which ``work`` opens its
        averager, it also has the same peer id. The former process' reports stay with its :class:`SwarmProcess`.

        Args:
            index: the former process' index in :attr:`processes`.
            arguments: updates of the former process' arguments.
            wait: as in :meth:`add`.
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
        """Start a process. It imports the function, and then waits for its index and arguments."""
        process: Process
        if self.fork:
            process = fork_process(self.work, _search_path())
        else:
            process = subprocess.Popen(
                [sys.executable, "-m", "p2pavg.testing.swarm_process", self.work, json.dumps(_search_path())],
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
                with suppress(BrokenPipeError):  # the process ended before it read its last message
                    found.process.stdin.close()  # tells the member to leave
            if found.running:
                found.resume()
        for found in self._launched:
            try:
                found.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                found.kill()
                found.process.wait()
            with suppress(ProcessLookupError, PermissionError):  # kill the processes that it has started
                os.killpg(found.process.pid, signal.SIGKILL)
            if found.process.stdout is not None:
                found.process.stdout.close()
