"""Daemons as processes: the unit's command, status and stop, restarts, and what is remembered."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from p2pavg.runs.records.identity import load_or_make_seed
from p2pavg.tools.cli.authority import create, invite, open_authority
from p2pavg.tools.daemon.words import ExitCode
from p2pavg_dht import Ed25519Signer
from tests.programs import run_python
from tests.unit.packaging.test_files import settings

pytestmark = pytest.mark.processes

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
COMMAND = [sys.executable, "-m", "p2pavg"]
ENVIRONMENT = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
WATCHDOG_SECONDS = 180.0  # a machine that does much else starts a process in half a minute


class Daemon:
    """A daemon whose output goes into files beside its folder."""

    def __init__(
        self, home: Path, arguments: list[str], environment: Mapping[str, str] = ENVIRONMENT
    ) -> None:
        self.home = home
        self._out, self._log = home.with_suffix(".out"), home.with_suffix(".log")
        with self._out.open("w") as out, self._log.open("w") as log:
            self.process = subprocess.Popen(arguments, stdout=out, stderr=log, env=environment)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def addresses(self) -> list[str]:
        return self._out.read_text().splitlines()

    def until(self, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + WATCHDOG_SECONDS
        while not (found := condition()):
            assert time.monotonic() < end, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.1)
        return found

    def address(self, number: int = 1) -> str:
        """Return the address that the daemon printed at its ``number``-th start."""
        self.until(lambda: len(self.addresses) >= number)
        return self.addresses[number - 1]

    def ended(self) -> int:
        code = self.process.wait(WATCHDOG_SECONDS)
        assert "Traceback" not in self.log, self.log
        return code


Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts ``p2pavg peer`` with a folder."""
    begun: list[Daemon] = []

    def begin(name: str, *arguments: str, command: list[str] | None = None, **environment: str) -> Daemon:
        home = tmp_path / name
        given = [*COMMAND, "peer", "--home", str(home), "--no-port-mapping", *arguments]
        begun.append(Daemon(home, given if command is None else command, ENVIRONMENT | environment))
        return begun[-1]

    yield begin
    for each in begun:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait(WATCHDOG_SECONDS)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_python(*COMMAND[1:], *arguments, timeout=WATCHDOG_SECONDS, env=ENVIRONMENT)


def status(home: Path) -> tuple[int, dict[str, Any]]:
    done = run("status", "--home", home, "--json")
    found = json.loads(done.stdout)
    return done.returncode, found[0] if found else {}


def test_status_and_stop(start: Start, tmp_path: Path) -> None:
    assert run("status", "--home", tmp_path / "none").returncode == ExitCode.NOT_RUNNING
    assert run("stop", "--home", tmp_path / "none").returncode == ExitCode.NOT_RUNNING
    first = start("first", "--listen", LOOPBACK, "--run-id", "open")
    address = first.address()
    code, found = status(first.home)
    assert (code, found["peers"], found["run_id"]) == (ExitCode.ALONE, 0, "open")
    assert found["addresses"] == [address]
    assert found["pid"] == first.process.pid
    second = start("second", "--listen", LOOPBACK, "--bootstrap", address)
    second.address()
    code, found = status(second.home)
    assert (code, found["peers"], found["connected"]) == (ExitCode.DONE, 1, True)
    done = run("status", "--home", second.home)
    assert done.returncode == ExitCode.DONE
    assert "1 other peer of the network" in done.stdout
    again = run("peer", "--home", second.home, "--listen", LOOPBACK)
    assert again.returncode == ExitCode.TRY_AGAIN
    assert "another process uses the folder" in again.stderr
    for each in (first, second):
        done = run("stop", "--home", each.home)
        assert (done.returncode, done.stdout) == (0, f"the daemon of {each.home} has ended\n")
        assert each.ended() == 0
        assert not (each.home / "control.sock").exists()
    assert "told to stop by a local command" in first.log


def test_a_hangup_starts_the_daemon_again_in_its_place(start: Start) -> None:
    daemon = start("one", "--listen", LOOPBACK, "--run-id", "open")
    address = daemon.address()
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.address(2) == address, "another identity or port"
    assert status(daemon.home)[1]["pid"] == daemon.process.pid
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.ended() == 0
    assert "starting again, with the files as they are now" in daemon.log


@pytest.mark.long
def test_a_daemon_joins_again_through_peers_that_it_knew(start: Start) -> None:
    """Its bootstrap peer is gone for good; another peer of the network is there."""
    hub = start("hub", "--listen", LOOPBACK)
    other = start("other", "--listen", LOOPBACK, "--bootstrap", hub.address())
    other.address()
    late = start("late", "--listen", LOOPBACK, "--bootstrap", hub.address())
    late.until(lambda: status(late.home)[1].get("peers", 0) == 2)
    for each in (late, hub):
        each.process.send_signal(signal.SIGTERM)
        assert each.ended() == 0
    back = start("late", "--listen", LOOPBACK, "--bootstrap", hub.address())
    back.address()
    back.until(lambda: status(back.home)[0] == ExitCode.DONE)


@pytest.mark.long
def test_a_bootstrap_peer_starts_first_and_meets_those_that_it_knew(start: Start) -> None:
    """Everything was stopped. It waits for no other peer, and finds them when they are there."""
    hub = start("hub", "--listen", LOOPBACK)
    other = start("other", "--listen", LOOPBACK, "--bootstrap", hub.address())
    other.address()
    hub.until(lambda: status(hub.home)[1].get("peers", 0) == 1)
    for each in (other, hub):
        each.process.send_signal(signal.SIGTERM)
        assert each.ended() == 0
    again = start("hub", "--listen", LOOPBACK)
    assert again.address() == hub.address()
    assert status(again.home)[0] == ExitCode.ALONE
    start("other", "--listen", LOOPBACK, "--bootstrap", hub.address()).address()
    again.until(lambda: status(again.home)[0] == ExitCode.DONE)


class Manager:
    """The service manager, as far as a unit's command sees it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(WATCHDOG_SECONDS)

    def hears(self, state: str) -> None:
        while not self._socket.recv(1000).decode().startswith(state):
            pass

    def close(self) -> None:
        self._socket.close()


def test_the_command_of_the_unit_as_it_is_written(start: Start, tmp_path: Path) -> None:
    """It becomes ready, starts again on a reload, and ends on a stop, with what the unit gives it and nothing else."""
    credentials, state = tmp_path / "credentials", tmp_path / "state"
    credentials.mkdir(mode=0o700)
    state.mkdir(mode=0o700)
    create("lab", tmp_path, [], {})
    peer_id = Ed25519Signer(load_or_make_seed(state / "identity.key")).peer_id
    authority = open_authority(tmp_path / "lab.run", None)
    given = {"roles": ["auxiliary"], "max_weight": 1.0, "days": 1.0}
    invite(authority, peer_id, output=state / "lab.cert", **given)  # type: ignore[arg-type]
    (credentials / "this.run").write_text((tmp_path / "lab.run").read_text())
    (credentials / "this.toml").write_text(f'listen = ["{LOOPBACK}"]\nport-mapping = false\n')
    (written,) = settings()["ExecStart"]
    with contextlib.closing(Manager(tmp_path)) as manager:
        given_by_unit = {
            "CREDENTIALS_DIRECTORY": str(credentials),
            "STATE_DIRECTORY": str(state),
            "NOTIFY_SOCKET": str(manager.path),
        }
        for name, value in given_by_unit.items():
            written = written.replace(f"${{{name}}}", value)
        program, *arguments = shlex.split(written)
        assert program == "/opt/p2pavg/bin/p2pavg"
        daemon = start("unit", command=[*COMMAND, *arguments], **given_by_unit, HOME="/")
        manager.hears("READY=1")
        manager.hears("STATUS=began a new network; no other peer of run 'lab' takes part in its rounds now")
        assert status(state)[1]["run_id"] == "lab"
        daemon.process.send_signal(signal.SIGHUP)
        manager.hears("RELOADING=1")
        manager.hears("READY=1")
        daemon.process.send_signal(signal.SIGTERM)
        manager.hears("STOPPING=1")
        assert daemon.ended() == 0
