"""The doctor in a network namespace of its own: no route, and firewalls. It needs root, ip and iptables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from p2pavg_dht import Ed25519Signer

SOME_PEER = Ed25519Signer(b"s" * 32).peer_id
WATCHDOG_SECONDS = 120.0
NO_ROUTE = f"/ip4/198.51.100.7/tcp/4001/p2p/{SOME_PEER}"
DROPPED = f"/ip4/203.0.113.10/tcp/4002/p2p/{SOME_PEER}"
PEER_HOST, DOCTOR_HOST = "203.0.113.10", "203.0.113.20"
COMMAND = [sys.executable, "-m", "p2pavg"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False)


def within(name: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", name, *command]


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two machines on one cable: that of a peer, which drops connections to port 4002, and one that drops all."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program in ("ip", "iptables"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    peer, doctor = (f"p2pavg-doctor-{os.getpid()}-{number}" for number in range(2))
    try:
        for command in (
            f"ip netns add {peer}",
            f"ip netns add {doctor}",
            f"ip link add cable netns {peer} type veth peer name cable netns {doctor}",
            f"ip -n {peer} addr add {PEER_HOST}/24 dev cable",
            f"ip -n {doctor} addr add {DOCTOR_HOST}/24 dev cable",
            *(f"ip -n {name} link set {device} up" for name in (peer, doctor) for device in ("lo", "cable")),
            f"ip netns exec {peer} iptables -A INPUT -p tcp --dport 4002 -j DROP",
            f"ip netns exec {doctor} iptables -A INPUT -i cable -p tcp --syn -j DROP",
        ):
            if (done := run(*command.split())).returncode:
                pytest.skip(f"{command}: {done.stderr.strip()}")
        yield peer, doctor
    finally:
        for name in (peer, doctor):
            run("ip", "netns", "delete", name)


@contextmanager
def daemon(name: str) -> Iterator[str]:
    """Run a peer in a namespace. Yield its address."""
    listen = f"/ip4/{PEER_HOST}/tcp/4001"
    process = subprocess.Popen(
        within(name, *COMMAND, "peer", "--open", "--listen", listen, "--no-port-mapping"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    watchdog = threading.Timer(WATCHDOG_SECONDS, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def test_no_route_and_firewalls(namespaces: tuple[str, str]) -> None:
    peer, doctor = namespaces
    with daemon(peer) as address:
        done = run(
            *within(doctor, *COMMAND, "doctor", "--json", "--no-port-mapping"),
            *("--listen", "/ip4/0.0.0.0/tcp/4005"),
            *("--bootstrap", NO_ROUTE, "--bootstrap", DROPPED, "--bootstrap", address),
        )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["findings"]
    causes = {
        name: [each["cause"] for each in found if each["name"] == name] for name in ("bootstrap", "firewall")
    }
    assert causes["bootstrap"][:2] == [
        "no route leads from this machine to 198.51.100.7",
        "203.0.113.10 port 4002 does not answer: a firewall or router drops the connection, or the machine is off",
    ]
    assert causes["firewall"] == [
        "no router translates addresses, so a firewall drops inbound connections to port 4005"
    ]
    assert {each["level"] for each in found if each["name"] in ("bootstrap", "firewall")} == {"warning", "ok"}
