"""The doctor in a network namespace of its own: no route, and a firewall. It needs root, ip and iptables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from p2pavg_dht import Ed25519Signer

SOME_PEER = Ed25519Signer(b"s" * 32).peer_id
WATCHDOG_SECONDS = 60.0
NO_ROUTE = f"/ip4/203.0.113.7/tcp/4001/p2p/{SOME_PEER}"
DROPPED = f"/ip4/127.0.0.1/tcp/4002/p2p/{SOME_PEER}"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False)


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network with loopback alone, in which connections to port 4002 are dropped."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    for program in ("ip", "iptables"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    name = f"p2pavg-doctor-{os.getpid()}"
    if (made := run("ip", "netns", "add", name)).returncode:
        pytest.skip(f"the system makes no network namespace: {made.stderr.strip()}")
    try:
        for command in (
            "ip link set lo up",
            "iptables -A INPUT -p tcp --dport 4002 -j DROP",
        ):
            done = run("ip", "netns", "exec", name, *command.split())
            if done.returncode:
                pytest.skip(f"{command}: {done.stderr.strip()}")
        yield name
    finally:
        run("ip", "netns", "delete", name)


def test_no_route_and_a_firewall_that_drops(namespace: str) -> None:
    done = run(
        *("ip", "netns", "exec", namespace, sys.executable, "-m", "p2pavg", "doctor", "--json"),
        *("--bootstrap", NO_ROUTE, "--bootstrap", DROPPED),
    )
    assert (done.returncode, done.stderr) == (1, "")
    faults = [each for each in json.loads(done.stdout)["findings"] if each["level"] == "fault"]
    assert [each["name"] for each in faults] == ["bootstrap", "bootstrap"]
    assert [each["cause"] for each in faults] == [
        "no route leads from this machine to 203.0.113.7",
        "127.0.0.1 port 4002 does not answer: a firewall or router drops the connection, or the machine is off",
    ]
