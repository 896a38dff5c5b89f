"""Fast starts of processes: a server that has imported torch and p2pavg forks them.

Servers live as long as this process, and end with it. Members of one swarm are forked by two servers in turn, so that
not all of them have the same seed of hashes: what follows the order of a set differs among them, as it does among
machines.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any, TypeAlias

from p2pavg.base.limits import START_SECONDS, STOP_SECONDS

_SERVERS = 2
_CHANGES_WITH_EACH_TEST = "PYTEST_CURRENT_TEST"
_MAX_MESSAGE_BYTES = 1 << 16


class ForkedProcess:
    """A process that a server has forked, with the methods of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._signalling = threading.Lock()
        self._ended = threading.Event()
        self._code: int | None = None
        self._server_is_lost = False

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or ``None`` while the process runs.

        Raises:
            RuntimeError: the server has ended, so that the exit code will never be known.
        """
        if self._server_is_lost:
            raise RuntimeError(
                f"the server that forked process {self.pid} has ended; its exit code is not known"
            )
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after ``timeout`` seconds.
            RuntimeError: see :meth:`poll`.
        """
        if not self._ended.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._signalling:
            if self._code is None and not self._server_is_lost:
                os.kill(self.pid, sig)

    def note_end(self, code: int) -> None:
        """Note the exit code. The id may belong to another process afterwards."""
        with self._signalling:
            self._code = code
        self._ended.set()

    def note_lost(self) -> None:
        """Note that the exit code will never be known."""
        with self._signalling:
            self._server_is_lost = self._code is None
        self._ended.set()


Process: TypeAlias = "subprocess.Popen[str] | ForkedProcess"


class ForkServer:
    """The server's process, and what it has forked. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "p2pavg.testing.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._asking = threading.Lock()
        self._answers: queue.Queue[int | None] = queue.Queue()
        self._living: dict[int, ForkedProcess] = {}
        self._early: dict[int, int] = {}
        """Exit codes of processes that ended before :meth:`fork` had returned them."""
        self._is_lost = False
        self._changing = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, work: str, path: Sequence[str]) -> ForkedProcess:
        """Start a process that runs a function, in this process' environment and working directory.

        Raises:
            RuntimeError: the server has ended, or did not answer in time and was ended.
        """
        their_input, our_input = os.pipe()
        our_output, their_output = os.pipe()
        stdin, stdout = os.fdopen(our_input, "w"), os.fdopen(our_output)
        request = {"work": work, "path": path, "folder": os.getcwd(), "environment": dict(os.environ)}
        message = json.dumps({"fork": request}).encode()
        sys.stderr.flush()
        try:
            with self._asking:
                socket.send_fds(self._control, [message], [their_input, their_output, 2])
                # The first fork comes after torch was imported.
                pid = self._answers.get(timeout=START_SECONDS)
        except OSError:
            pid = None
        except queue.Empty:
            self._process.kill()  # its late answer would be taken for the next one's
            pid = None
        finally:
            os.close(their_input)
            os.close(their_output)
        if pid is None:
            stdin.close()
            stdout.close()
            raise RuntimeError(
                "the server that forks processes has ended; its last words are on standard error"
            )
        found = ForkedProcess(pid, stdin, stdout)
        with self._changing:
            self._living[pid] = found
            code = self._early.pop(pid, None)
            is_lost = self._is_lost
        if code is not None:
            self._end(pid, code)
        elif is_lost:  # between its answer and now
            found.note_lost()
        return found

    def _listen(self) -> None:
        with suppress(ConnectionResetError):
            while data := self._control.recv(_MAX_MESSAGE_BYTES):
                message: dict[str, Any] = json.loads(data)
                if "pid" in message:
                    self._answers.put(message["pid"])
                else:
                    self._end(message["ended"], message["code"])
        self._answers.put(None)
        with self._changing:
            self._is_lost = True
            lost, self._living = self._living, {}
        for process in lost.values():
            process.note_lost()

    def _end(self, pid: int, code: int) -> None:
        with self._changing:
            process = self._living.pop(pid, None)
            if process is None:
                self._early[pid] = code
                return
        process.note_end(code)
        with suppress(OSError):  # the server has ended
            self._control.send(json.dumps({"reap": pid}).encode())

    @property
    def is_lost(self) -> bool:
        """True if the server has ended."""
        return self._is_lost

    @property
    def is_idle(self) -> bool:
        """True if all processes that it has forked have ended."""
        return not self._living

    def close(self) -> None:
        """End the server. What it has forked goes on."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()


class _Servers:
    """The servers of this process: a few for each environment in which processes are started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = itertools.count()
        self._by_environment: dict[frozenset[tuple[str, str]], list[ForkServer]] = {}

    def fork(self, work: str, path: Sequence[str]) -> ForkedProcess:
        """Fork a process, by the server whose turn it is.

        Some variables count only if they are set before Python or a library starts, so a server forks for the
        environment that it was started in.
        """
        key = frozenset(
            (name, value) for name, value in os.environ.items() if name != _CHANGES_WITH_EACH_TEST
        )
        with self._lock:
            if key not in self._by_environment:
                self._drop_idle()
                self._by_environment[key] = [ForkServer() for _ in range(_SERVERS)]
            servers = self._by_environment[key]
            turn = next(self._turns) % len(servers)
            if servers[turn].is_lost:
                servers[turn].close()
                servers[turn] = ForkServer()
            return servers[turn].fork(work, path)

    def _drop_idle(self) -> None:
        for key, servers in list(self._by_environment.items()):
            if all(server.is_idle for server in servers):
                del self._by_environment[key]
                for server in servers:
                    server.close()

    def close(self) -> None:
        """End all servers."""
        with self._lock:
            for server in itertools.chain.from_iterable(self._by_environment.values()):
                server.close()
            self._by_environment.clear()


_servers = _Servers()
_of_parents: list[_Servers] = []
"""Those of the process that has forked this one by itself: not to be used here, and not to be ended from here."""


def _begin_anew() -> None:
    global _servers
    _of_parents.append(_servers)
    _servers = _Servers()


atexit.register(lambda: _servers.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def can_fork() -> bool:
    """Return whether processes may be forked: on Linux. Elsewhere libraries of the system do not survive it."""
    return sys.platform == "linux"


def fork_process(work: str, path: Sequence[str]) -> ForkedProcess:
    """Start a process that runs a function, given as ``"module:function"``, and finds modules in the folders of a path.

    Raises:
        RuntimeError: the server that was to fork it has ended.
    """
    return _servers.fork(work, path)
