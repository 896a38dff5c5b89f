"""Fast starts of processes: a server that has imported torch and p2pavg forks them.

Servers live as long as this process, and end with it. Members of one swarm are forked by two servers in turn, so that
not all of them have the same seed of hashes: what follows the order of a set differs among them, as it does among
machines.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TypeAlias

from p2pavg.base.limits import START_SECONDS, STOP_SECONDS

_SERVERS = 2
_CHANGES_WITH_EACH_TEST = "PYTEST_CURRENT_TEST"
_MAX_ANSWER_BYTES = 64
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # of linux/prctl.h


class ForkedProcess:
    """A process that a server has forked: a child of this one, with the methods of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._code: int | None = None
        self._polling = threading.Lock()
        """Held while the id is used: it may belong to another process once the exit code is known."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or ``None`` while the process runs."""
        with self._polling:
            return self._poll()

    def _poll(self) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # something else in this program has waited for it; Popen says 0, too
                pid, status = self.pid, 0
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after ``timeout`` seconds.
        """
        with self._polling:
            if (code := self._poll()) is not None:
                return code
            end = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(end, select.POLLIN)
            poll.poll(None if timeout is None else 1000 * max(timeout, 0.0))
        finally:
            os.close(end)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._polling:
            if self._poll() is None:
                os.kill(self.pid, sig)


Process: TypeAlias = "subprocess.Popen[str] | ForkedProcess"


class ForkServer:
    """The server's process. One thread at a time may use it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)  # the first answer comes after torch was imported
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "p2pavg.testing.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def fork(self, work: str, path: Sequence[str]) -> ForkedProcess:
        """Start a process that runs a function, in this process' environment and working directory.

        Raises:
            RuntimeError: the server has ended, or did not answer in time and was ended.
        """
        their_input, our_input = os.pipe()
        our_output, their_output = os.pipe()
        stdin, stdout = os.fdopen(our_input, "w"), os.fdopen(our_output)
        request = {"work": work, "path": path, "folder": os.getcwd(), "environment": dict(os.environ)}
        sys.stderr.flush()
        try:
            with _adopting_orphans():
                files = [their_input, their_output, 2]
                socket.send_fds(self._control, [json.dumps(request).encode()], files)
                pid = self._control.recv(_MAX_ANSWER_BYTES)
                # The second message says that it is an orphan. If it could not be forked, that one is the only one.
                if not pid.isdigit() or not self._control.recv(_MAX_ANSWER_BYTES):
                    raise ConnectionResetError("no process was forked")
        except OSError as error:
            self._process.kill()  # its late answer would be taken for the next one's
            stdin.close()
            stdout.close()
            raise RuntimeError(
                f"the server that forks processes has ended, or could not fork ({error}); its last words are on"
                " standard error"
            ) from error
        finally:
            os.close(their_input)
            os.close(their_output)
        return ForkedProcess(int(pid), stdin, stdout)

    @property
    def is_lost(self) -> bool:
        """True if the server has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the server. What it has forked goes on."""
        with suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of each process below this one whose own parent ends, for as long as the block runs.

    Raises:
        OSError: the system does not allow it.
    """
    prctl, before = ctypes.CDLL(None, use_errno=True).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl does not let this process adopt what it starts")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class _Servers:
    """The servers of this process, for the environment in which it has started processes last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = itertools.count()
        self._environment: dict[str, str] = {}
        self._running: list[ForkServer] = []

    def fork(self, work: str, path: Sequence[str]) -> ForkedProcess:
        """Fork a process, by the server whose turn it is.

        Some variables count only if they are set before Python or a library starts, so a server forks for the
        environment that it was started in.
        """
        with self._lock:
            environment = {
                name: value for name, value in os.environ.items() if name != _CHANGES_WITH_EACH_TEST
            }
            if environment != self._environment:
                self._end()
                self._environment = environment
            while len(self._running) < _SERVERS:
                self._running.append(ForkServer())
            turn = next(self._turns) % _SERVERS
            if self._running[turn].is_lost:
                self._running[turn].close()
                self._running[turn] = ForkServer()
            return self._running[turn].fork(work, path)

    def _end(self) -> None:
        while self._running:
            self._running.pop().close()

    def close(self) -> None:
        """End all servers."""
        with self._lock:
            self._end()


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
