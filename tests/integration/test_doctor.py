"""The doctor beside real peers: faults that are made on purpose, and the cause that it names for each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.certificate import Role, issue
from p2pavg.runs.records.identity import make_seed
from p2pavg.tools.cli.authority import create, invite, open_authority
from p2pavg.tools.cli.authority import revoke as revoke_certificates
from p2pavg.tools.cli.publishing import publish
from p2pavg.tools.doctor.examination import ExaminedPeer, examine
from p2pavg.tools.doctor.findings import ORDER
from p2pavg_dht import Ed25519Signer
from tests.integration.doctor_peers import ABSENT_RUN, LATE_RUN, LATE_SECONDS, RECIPES
from tests.unit.tools.cli.commands import Commands

pytestmark = pytest.mark.processes

SOME_PEER = Ed25519Signer(b"s" * 32).peer_id
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
WATCHDOG_SECONDS = 180.0
START_SECONDS = 240.0  # of a process that needs 6 s of a core, on a machine that is busy with other tests
DAY = 86400.0


@dataclass(frozen=True)
class Scene:
    """Peers in another process, and the files of their run."""

    addresses: dict[str, str]
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "lab.run"

    def certificate(self, peer_id: str, name: str, *, begins: float, ends: float) -> Path:
        """Sign a certificate of the run, with times relative to now."""
        authority = open_authority(self.run, None)
        now = time.time()
        signed = issue(
            authority.key.sign,
            authority=authority.run.authority,
            peer_id=peer_id,
            roles=[Role.CONTRIBUTOR],
            max_weight=10.0,
            not_before=now + begins,
            expires=now + ends,
            serial=os.urandom(16),
        )
        file = self.folder / f"{name}.cert"
        file.write_text(certificate_text(signed))
        return file


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Four peers in three networks, in one process that all tests share."""
    folder = tmp_path_factory.mktemp("doctor")
    settings: dict[str, Any] = {"match_timeout": 1.0, "compression": "fp32"}
    create("lab", folder, [], settings)
    keys, certificates = {}, {}
    for name in ("one", "two", "late", "old"):
        keys[name] = str(folder / f"{name}.key")
        peer_id = Ed25519Signer(make_seed(keys[name], what="identity")).peer_id
        certificates[name] = str(folder / f"{name}.cert")
        invite(
            open_authority(folder / "lab.run", None),
            peer_id,
            roles=["contributor"],
            max_weight=10.0,
            days=1.0,
            output=Path(certificates[name]),
        )
    arguments = {"keys": keys, "certificates": certificates, "run": str(folder / "lab.run")}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.doctor_peers", json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        watchdog.cancel()
        yield Scene(json.loads(line), folder)
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(Commands(monkeypatch, capsys))


class Doctor:
    """The command in this process: importing torch takes longer than a whole examination."""

    def __init__(self, commands: Commands) -> None:
        self.call = commands

    def __call__(self, *arguments: object, listen: str = LOOPBACK) -> Report:
        done = self.call("doctor", "--json", "--listen", listen, *arguments)
        assert done.err == ""
        read = json.loads(done.out)
        found = Report(read["findings"])
        assert read["faults"] == len(found.faults())
        assert done.code == (1 if read["faults"] else 0)
        return found


@dataclass(frozen=True)
class Report:
    """The findings of one call."""

    findings: list[dict[str, str]]

    def faults(self) -> list[str]:
        return [each["name"] for each in self.findings if each["level"] == "fault"]

    def only(self, name: str) -> str:
        """Return the one fault, its cause and its remedy. There must be no other fault."""
        assert self.faults() == [name], self.findings
        return self.told(name)

    def told(self, name: str, level: str = "fault") -> str:
        """Return the findings of a name and level as text."""
        found = [each for each in self.findings if (each["name"], each["level"]) == (name, level)]
        assert found, [each for each in self.findings if each["name"] == name]
        return "; ".join(f"{each['what']}: {each['cause']}: {each['remedy']}" for each in found)


@contextmanager
def listener(words: bytes | None) -> Iterator[str]:
    """A service of another kind. It says its words and hangs up; ``None``: it says nothing and stays."""
    ended = threading.Event()

    def serve() -> None:
        connection, _ = opened.accept()
        with connection:
            if words is None:
                ended.wait(WATCHDOG_SECONDS)
            else:
                connection.sendall(words)

    with socket.create_server(("127.0.0.1", 0)) as opened:
        opened.settimeout(WATCHDOG_SECONDS)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"/ip4/127.0.0.1/tcp/{opened.getsockname()[1]}/p2p/{SOME_PEER}"
        finally:
            ended.set()
            thread.join()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


class TestHealthy:
    def test_no_fault_is_found_in_a_healthy_run(self, scene: Scene, doctor: Doctor) -> None:
        report = doctor("--bootstrap", scene.addresses["one"], "--run-id", "healthy")
        assert report.faults() == []
        assert "answered in" in report.told("bootstrap", "ok")
        assert "2 peers of the run 'healthy'" in report.told("run", "ok")
        assert "2 peers can meet" in report.told("peers", "ok")
        assert "agrees with 2 peers" in report.told("clock", "ok")
        assert "same protocols as 2 peers" in report.told("version", "ok")
        assert report.told("bandwidth", "ok").count("Mbit/s up") == 2

    def test_a_member_with_all_its_files_is_healthy(self, scene: Scene, doctor: Doctor) -> None:
        files = ["--certificate", scene.folder / "late.cert", "--identity", scene.folder / "late.key"]
        report = doctor("--bootstrap", scene.addresses["one"], "--run", scene.run, *files)
        assert report.faults() == []
        # A check in ORDER that nothing makes would be reported as one for which there was no time.
        assert {each["name"] for each in report.findings} == set(ORDER) - {"announced"}
        assert not [each for each in report.findings if "the doctor's time was over" in each["cause"]]
        assert "it expires in 24 hours" in report.told("certificate", "warning")
        assert "2 peers can meet" in report.told("peers", "ok")

    def test_the_table_names_every_check_once_and_the_result(self, doctor: Doctor) -> None:
        done = doctor.call("doctor", "--listen", LOOPBACK)
        assert (done.code, done.err) == (0, "")
        lines = done.out.splitlines()
        assert lines[-1] == "nothing wrong was found"
        assert [line for line in lines if line.startswith("key file      note")]


class TestAddresses:
    def test_wrong_port(self, doctor: Doctor) -> None:
        port = closed_port()
        told = doctor("--bootstrap", f"/ip4/127.0.0.1/tcp/{port}/p2p/{SOME_PEER}").only("bootstrap")
        assert f"127.0.0.1 refuses connections to port {port}" in told
        assert "the port is wrong" in told

    def test_another_peer_at_the_address(self, scene: Scene, doctor: Doctor) -> None:
        address, _, found = scene.addresses["one"].rpartition("/")
        told = doctor("--bootstrap", f"{address}/{SOME_PEER}").only("bootstrap")
        assert f"another peer is there: {found}, not {SOME_PEER}" in told

    def test_a_relay_without_the_peer(self, scene: Scene, doctor: Doctor) -> None:
        told = doctor("--bootstrap", f"{scene.addresses['one']}/p2p-circuit/p2p/{SOME_PEER}").only(
            "bootstrap"
        )
        assert "the relay at 127.0.0.1 port" in told
        assert f"leads to no peer {SOME_PEER}" in told

    @pytest.mark.parametrize(
        ("words", "cause"),
        [
            (b"SSH-2.0-OpenSSH_9.6\r\n", "the port of another service, which says 'SSH-2.0-OpenSSH_9.6'"),
            (b"", "closes it at once"),
            (None, "says nothing"),
        ],
        ids=["ssh", "closes", "silent"],
    )
    def test_port_of_another_service(self, doctor: Doctor, words: bytes | None, cause: str) -> None:
        with listener(words) as address:
            assert cause in doctor("--bootstrap", address).only("bootstrap")

    def test_unknown_name(self, doctor: Doctor) -> None:
        told = doctor("--bootstrap", f"/dns4/no-such-name.invalid/tcp/4001/p2p/{SOME_PEER}").only("bootstrap")
        assert "the name no-such-name.invalid is unknown" in told or "no name server answers" in told

    def test_port_in_use(self, doctor: Doctor) -> None:
        with socket.create_server(("127.0.0.1", 0)) as opened:
            port = opened.getsockname()[1]
            told = doctor(listen=f"/ip4/127.0.0.1/tcp/{port}").only("port")
        assert f"port {port} is in use by" in told
        assert f"process {os.getpid()}" in told

    def test_port_of_the_peer_itself_is_no_fault(self, scene: Scene, doctor: Doctor) -> None:
        listen = scene.addresses["one"].partition("/p2p/")[0]
        report = doctor("--identity", scene.folder / "one.key", listen=listen)
        assert report.faults() == []
        assert "held by this peer, which runs already" in report.told("port", "ok")

    def test_address_of_no_interface(self, doctor: Doctor) -> None:
        told = doctor(listen="/ip4/203.0.113.77/tcp/4001").only("port")
        assert "no interface of this machine has that address" in told


class TestPeers:
    def test_clock_of_this_machine_is_off(self, scene: Scene) -> None:
        """The doctor corrects its clock, and finds the run whose records look expired."""

        async def examined() -> list[str]:
            options = ExaminedPeer(
                listen=[LOOPBACK],
                bootstrap=[scene.addresses["one"]],
                run_id="healthy",
                wall_clock=lambda: time.time() + LATE_SECONDS,
            )
            found = await examine(options)
            assert [each.name for each in found if each.level == "fault"] == ["clock"]
            assert "2 peers can meet" in [each.what for each in found if each.name == "peers"]
            return [each.cause for each in found if each.name == "clock"]

        assert trio.run(examined) == [f"your clock is {LATE_SECONDS:.0f} s ahead of 2 peers"]

    def test_clock_ahead_of_another_network(self, scene: Scene, doctor: Doctor) -> None:
        report = doctor("--bootstrap", scene.addresses["late"], "--run-id", LATE_RUN)
        assert "s ahead of 1 peer" in report.only("clock")
        assert "1 peer of the run" in report.told("run", "ok")

    def test_another_version(self, scene: Scene, doctor: Doctor) -> None:
        told = doctor("--bootstrap", scene.addresses["old"]).only("version")
        assert "1 peer speaks match/1.0.0, this one match/" in told

    def test_no_such_run(self, scene: Scene, doctor: Doctor) -> None:
        told = doctor("--bootstrap", scene.addresses["one"], "--run-id", "heathly").only("run")
        assert "no peer of the run 'heathly' was found" in told
        assert "none of the 2 peers of this network takes part in it" in told

    @pytest.mark.parametrize(
        ("run_id", "causes"),
        [
            ("schemas", ("schema: 1 tensors of", "1 tensors of 100 elements", "1 tensors of 200 elements")),
            ("codecs", ("codec: fp", "fp16", "fp32")),
            (RECIPES, ("recipe: lr 0.",)),
        ],
    )
    def test_peers_that_do_not_meet(
        self, scene: Scene, doctor: Doctor, run_id: str, causes: tuple[str, ...]
    ) -> None:
        told = doctor("--bootstrap", scene.addresses["one"], "--run-id", run_id).only("peers")
        assert all(cause in told for cause in causes)

    def test_a_ready_peer_that_is_not_there(self, scene: Scene, doctor: Doctor) -> None:
        report = doctor("--bootstrap", scene.addresses["one"], "--run-id", ABSENT_RUN)
        assert report.faults() == []
        told = report.told("peers", "warning")
        assert "1 of 1 peer that are ready for a round cannot be reached" in told
        assert "at /ip4/127.0.0.1/tcp/1 (" in told
        assert "Connection refused" in told


class TestFiles:
    @pytest.fixture
    def key(self, tmp_path: Path) -> tuple[Path, str]:
        file = tmp_path / "peer.key"
        return file, Ed25519Signer(make_seed(file, what="identity")).peer_id

    def test_files_that_are_wrong(self, scene: Scene, doctor: Doctor, key: tuple[Path, str]) -> None:
        """The rules have further tests in ``unit/tools/doctor``."""
        key[0].chmod(0o644)
        report = doctor("--identity", key[0], "--run", scene.run, "--certificate", scene.folder / "one.cert")
        assert report.faults() == ["key file", "certificate"]
        assert f"chmod 600 {key[0]}" in report.told("key file")
        assert f"the key file is that of {key[1]}" in report.told("certificate")
        assert "cannot read the run file" in doctor("--run", scene.folder / "none.run").only("run file")

    def test_revoked_certificate(self, scene: Scene, doctor: Doctor, key: tuple[Path, str]) -> None:
        """The list comes from the members of the run."""
        certificate = scene.certificate(key[1], "revoked", begins=-DAY, ends=DAY)
        authority = open_authority(scene.run, None)
        revoke_certificates(authority, [str(certificate)], None)
        publish(authority, [scene.addresses["one"]])
        files = ["--certificate", certificate, "--identity", key[0]]
        told = doctor("--bootstrap", scene.addresses["one"], "--run", scene.run, *files).only("certificate")
        assert "it was revoked" in told


class TestAnnouncedAddresses:
    """Each is dialled by other peers, at the host where they see this machine."""

    def test_one_that_others_can_dial(self, scene: Scene, doctor: Doctor) -> None:
        (port,) = free_ports(1)
        address = f"/ip4/127.0.0.1/tcp/{port}"
        told = doctor("--bootstrap", scene.addresses["one"], "--announce", address, listen=address)
        assert f"dialled {address}" in told.told("announced", "ok")

    def test_one_that_no_peer_can_dial_and_one_of_another_machine(self, scene: Scene, doctor: Doctor) -> None:
        mine, forwarded = free_ports(2)
        wrong, other = f"/ip4/127.0.0.1/tcp/{forwarded}", "/ip4/203.0.113.7/tcp/4001"
        announced = ("--announce", wrong, "--announce", other)
        listen = f"/ip4/127.0.0.1/tcp/{mine}"
        told = doctor("--bootstrap", scene.addresses["one"], *announced, listen=listen)
        assert f"others cannot dial {wrong}" in told.only("announced")
        assert f"forward port {forwarded}" in told.told("announced")
        assert "others see this machine at 127.0.0.1, and not at 203.0.113.7" in told.told(
            "announced", "warning"
        )

    def test_without_another_peer_nothing_is_known(self, doctor: Doctor) -> None:
        told = doctor("--announce", "/ip4/203.0.113.7/tcp/4001")
        assert "no peer that could be asked" in told.told("announced", "note")


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


@pytest.mark.parametrize(
    "arguments",
    [
        "--bootstrap 127.0.0.1:4001",
        "--listen /ip4/127.0.0.1",
        "--run lab.run --run-id lab",
        "--certificate lab.cert",
        "--run-id=",
        "--announce /ip4/0.0.0.0/tcp/4001",
        "--no-such-option",
    ],
)
def test_wrong_arguments_end_with_exit_code_2(doctor: Doctor, arguments: str) -> None:
    done = doctor.call("doctor", *arguments.split())
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err
