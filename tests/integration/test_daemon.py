"""Daemons as processes: the unit's command, status and stop, restarts, and what is remembered."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pavg.runs.records.identity import load_or_make_seed
from p2pavg.tools.cli.authority import create, invite, open_authority
from p2pavg.tools.daemon.words import ExitCode
from p2pavg_dht import Ed25519Signer
from tests.integration.daemons import COMMAND, ENVIRONMENT, LOOPBACK, WATCHDOG_SECONDS, Daemon
from tests.unit.packaging.test_files import settings
from tests.unit.tools.cli.commands import Commands

pytestmark = pytest.mark.processes


class DaemonAtHome(Daemon):
    """A daemon with a folder; its output goes into files beside it."""

    def __init__(self, home: Path, words: list[str], environment: dict[str, str]) -> None:
        super().__init__(words, home, ENVIRONMENT | environment)
        self.home = home


Start = Callable[..., DaemonAtHome]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts ``p2pavg peer`` with a folder."""
    begun: list[DaemonAtHome] = []

    def begin(
        name: str, *arguments: str, command: list[str] | None = None, **environment: str
    ) -> DaemonAtHome:
        home = tmp_path / name
        given = [*COMMAND, "peer", "--home", str(home), "--no-port-mapping", *arguments]
        begun.append(DaemonAtHome(home, given if command is None else command, environment))
        return begun[-1]

    yield begin
    for each in begun:
        each.kill()


Status = Callable[[Path], tuple[int, dict[str, Any]]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    """The command in this process, without the time that a process takes to start."""
    return Commands(monkeypatch, capsys)


@pytest.fixture
def status(call: Commands) -> Status:
    """Return a function that returns the exit code of ``p2pavg status`` with a folder, and what it prints."""

    def of(home: Path) -> tuple[int, dict[str, Any]]:
        done = call("status", "--home", home, "--json")
        found = json.loads(done.out)
        return done.code, found[0] if found else {}

    return of


def test_status_and_stop(start: Start, tmp_path: Path, call: Commands, status: Status) -> None:
    assert call("status", "--home", tmp_path / "none").code == ExitCode.NOT_RUNNING
    assert call("stop", "--home", tmp_path / "none").code == ExitCode.NOT_RUNNING
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
    done = call("status", "--home", second.home)
    assert done.code == ExitCode.DONE
    assert "1 other peer of the network" in done.out
    again = call("peer", "--home", second.home, "--listen", LOOPBACK)
    assert again.code == ExitCode.TRY_AGAIN
    assert "another process uses the folder" in again.err
    for each in (first, second):
        done = call("stop", "--home", each.home)
        assert (done.code, done.out) == (0, f"the daemon of {each.home} has ended\n")
        assert each.ended() == 0
        assert not (each.home / "control.sock").exists()
    assert "told to stop by a local command" in first.log


@pytest.mark.long
def test_a_daemon_joins_again_through_peers_that_it_knew(start: Start, status: Status) -> None:
    """Its bootstrap peer is gone for good; another peer of the network is there."""
    hub = start("hub", "--listen", LOOPBACK)
    other = start("other", "--listen", LOOPBACK, "--bootstrap", hub.address())
    other.address()
    late = start("late", "--listen", LOOPBACK, "--bootstrap", hub.address())
    late.until(lambda: status(late.home)[1].get("peers", 0) == 2)
    for each in (late, hub):
        assert each.leave() == 0
    back = start("late", "--listen", LOOPBACK, "--bootstrap", hub.address())
    back.address()
    back.until(lambda: status(back.home)[0] == ExitCode.DONE)


@pytest.mark.long
def test_a_bootstrap_peer_starts_first_and_meets_those_that_it_knew(start: Start, status: Status) -> None:
    """Everything was stopped. It waits for no other peer, and finds them when they are there."""
    hub = start("hub", "--listen", LOOPBACK)
    other = start("other", "--listen", LOOPBACK, "--bootstrap", hub.address())
    other.address()
    hub.until(lambda: status(hub.home)[1].get("peers", 0) == 1)
    for each in (other, hub):
        assert each.leave() == 0
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


def test_the_command_of_the_unit_as_it_is_written(start: Start, tmp_path: Path, status: Status) -> None:
    """It becomes ready, starts again on a reload, and ends on a stop, with what the unit gives it and nothing else.

    The process stays the same, with its identity and port.
    """
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
        address = daemon.address()
        daemon.process.send_signal(signal.SIGHUP)
        manager.hears("RELOADING=1")
        manager.hears("READY=1")
        assert daemon.address(2) == address, "another identity or port"
        assert status(state)[1]["pid"] == daemon.process.pid
        assert "starting again, with the files as they are now" in daemon.log
        daemon.process.send_signal(signal.SIGTERM)
        manager.hears("STOPPING=1")
        assert daemon.ended() == 0
