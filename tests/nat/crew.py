"""The processes of a lab, seen from the test: peers that average, and daemons, each in the namespace of a host."""

from __future__ import annotations

import atexit
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.nat.lab import Host, Lab
from tests.nat.namespaces import LabError

ROOT = Path(__file__).parents[2]
DAEMON = "p2pavg.tools.cli.main:main"
KEEP_LOGS = "P2PAVG_LAB_LOGS"
"""The variable of the environment that names a folder, in which the logs of all processes are kept."""
IMPORT_SECONDS = 120.0  # of torch and libp2p on a busy machine
CONNECT_SECONDS = 20.0
DAEMON_SECONDS = 60.0
DAEMON_PORT = 4001
_END_SECONDS = 5.0
_LAST_LINES = 15

Event = dict[str, Any]


class Process:
    """One process in the namespace of a host, which prints lines."""

    def __init__(self, host: Host, line: socket.socket, pid: int, log: Path) -> None:
        self.host = host
        self.pid = pid
        self.log = log
        self.ended = False
        """True once the process has ended, as far as :meth:`event` has heard."""
        self.was_killed = False
        self._line = line
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError), self._line.makefile("r") as lines:  # reset, when the process is killed
            for line in lines:
                if line.endswith("\n"):  # otherwise it was killed in the middle of a line
                    self._lines.put(line[:-1])
        self._lines.put(None)

    def line(self, seconds: float) -> str:
        """Return the next line.

        Raises:
            LabError: there is none within ``seconds``, or the process has ended.
        """
        try:
            found = None if self.ended else self._lines.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            raise LabError(f"the process at {self.host.address} printed nothing in {seconds:.0f} s") from None
        if found is None:
            self.ended = True
            raise LabError(f"the process at {self.host.address} has ended:\n{self.last_words()}")
        return found

    def events(self) -> list[Event]:
        """Return the events that were reported since the last call, without waiting."""
        found: list[Event] = []
        while not self.ended and not self._lines.empty():
            line = self._lines.get()
            if line is None:
                self.ended = True
            else:
                found.append(json.loads(line))
        return found

    def tell(self, text: str) -> None:
        """Send one line; do nothing if the process has ended."""
        with suppress(OSError):
            self._line.sendall(f"{text}\n".encode())

    def kill(self) -> None:
        """Kill the process without a warning."""
        self.was_killed = True
        if not self._reader.is_alive():  # it has ended, and another process may have got its number
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:])

    def close(self) -> None:
        """Kill the process, and release its line."""
        self.kill()
        self._reader.join(_END_SECONDS)
        self._line.close()


class Forker:
    """The process of :mod:`tests.nat.forker`. All labs of this process share one, because its imports take long.

    Raises:
        LabError: p2pavg cannot be imported within two minutes.
    """

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("a+")  # noqa: SIM115 - closed with the process
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.nat.forker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": _python_path(), "PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        atexit.register(self.close)
        assert self._popen.stdout is not None
        watchdog = threading.Timer(IMPORT_SECONDS, self._popen.kill)
        watchdog.start()
        said = self._popen.stdout.readline()
        watchdog.cancel()
        if said != b"ready\n":
            raise LabError(f"p2pavg cannot be imported: {self.last_words()}")

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended, so that another one is needed."""
        return self._popen.poll() is not None

    def order(self, order: Mapping[str, Any]) -> None:
        """Let the process fork another one. Raises OSError if it has ended."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(order).encode() + b"\n")
        self._popen.stdin.flush()

    def last_words(self) -> str:
        """Return the end of its log."""
        self._log.seek(0)
        return self._log.read()[-500:]

    def close(self) -> None:
        """End the process, and all that it has forked."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()
        self._log.close()


_forkers: list[Forker] = []


def _forker() -> Forker:
    if not _forkers or _forkers[-1].has_ended:
        _forkers.append(Forker())
    return _forkers[-1]


class Crew:
    """The processes of one lab. Leaving the ``with`` block kills them."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._processes: list[Process] = []
        self._socket = lab.folder / "line"
        self._listener = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Crew:
        self._listener.bind(str(self._socket))
        self._listener.listen()
        self._listener.settimeout(CONNECT_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.close()
        self._listener.close()
        if folder := os.environ.get(KEEP_LOGS):
            self._keep_logs(Path(folder) / f"{time.strftime('%H%M%S')}-{self._lab.folder.name}")

    def _keep_logs(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for log in self._lab.folder.glob("*.log"):
            shutil.copy(log, folder)

    def start(self, host: Host, entry: str, *arguments: str) -> Process:
        """Start a function of a module, ``module:function``, in a process at a host.

        Raises:
            LabError: it does not start.
        """
        forker = _forker()
        log = self._lab.folder / f"{len(self._processes)}-{host.namespace}.log"
        order = {
            "namespace": host.namespace,
            "socket": str(self._socket),
            "log": str(log),
            "entry": entry,
            "arguments": arguments,
        }
        try:
            forker.order(order)
            line, _ = self._listener.accept()
        except (OSError, TimeoutError) as error:
            raise LabError(f"no process starts: {error}; {forker.last_words()}") from None
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        process = Process(host, line, int.from_bytes(credentials[:4], sys.byteorder), log)
        self._processes.append(process)
        return process

    def daemon(self, host: Host, *options: str, entry: str = DAEMON) -> tuple[Process, str]:
        """Start ``p2pavg peer`` with these options; return it with the address that it prints."""
        listen = ["--listen", f"/ip4/{host.address}/tcp/{DAEMON_PORT}"]
        if host.address6:
            listen += ["--listen", f"/ip6/{host.address6}/tcp/{DAEMON_PORT}"]
        process = self.start(host, entry, "peer", "--open", *listen, *options)
        return process, process.line(DAEMON_SECONDS).strip()

    def worker(self, host: Host, **settings: Any) -> Process:
        """Start a peer that averages; :mod:`tests.nat.worker` says with which settings."""
        settings.setdefault("listen", host.listen)
        settings.setdefault("announce", host.announce)
        return self.start(host, "tests.nat.worker:main", json.dumps(settings))


def _python_path() -> str:
    return os.pathsep.join(
        [str(ROOT), str(ROOT / "compression"), str(ROOT / "dht"), os.environ.get("PYTHONPATH", "")]
    )
