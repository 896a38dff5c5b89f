"""The mapper of ports with a real ``miniupnpd``, between a machine at home and one on the internet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.nat.crew import ROOT
from tests.nat.lab import Host, Kind, Lab
from tests.nat.mapping_work import GREETING

pytestmark = pytest.mark.processes

CONNECT = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).recv(9))"


@contextmanager
def work(home: Host, *protocol: str) -> Iterator[subprocess.Popen[str]]:
    """Run the program that maps a port at home, by one protocol or by the first one that the router speaks."""
    command = [
        "ip",
        "netns",
        "exec",
        home.namespace,
        sys.executable,
        "-m",
        "tests.nat.mapping_work",
        "1",
        *protocol,
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str], *, logged: bool = False) -> str:
    """Return the next line that the mapper tells, or that it logs."""
    assert process.stdout is not None
    for found in process.stdout:
        if found.startswith("log: ") == logged:
            return found.strip()
    raise AssertionError("the program has ended")


def end(process: subprocess.Popen[str]) -> list[str]:
    """Let the program end by itself, and return what the mapper tells until then."""
    rest, _ = process.communicate(timeout=60)
    return [found for found in rest.splitlines() if not found.startswith("log: ")]


def greeting(outside: Host, home: Host, port: str) -> str:
    """Connect from outside to a port of the router, and return what comes; empty if there is no connection."""
    command = [
        "ip",
        "netns",
        "exec",
        outside.namespace,
        sys.executable,
        "-c",
        CONNECT,
        home.site.public,
        port,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


@pytest.mark.parametrize("protocol", ["NAT-PMP", "PCP", "UPnP"])
def test_a_mapped_port_is_reached_from_outside_until_the_end_also_if_the_router_forgets_it(
    internet: Lab, port_mapping: None, protocol: str
) -> None:
    home, outside = internet.site(Kind.UPNP).hosts[0], internet.site(Kind.PUBLIC).hosts[0]
    router = home.site.port_mapping
    assert router is not None
    with work(home, protocol) as program:
        name, host, port = line(program).split()
        assert (name, host) == (protocol, home.site.public)
        assert greeting(outside, home, port) == repr(GREETING)
        router.switch_off()
        assert greeting(outside, home, port) == ""
        router.start()
        if protocol != "PCP":  # whose check makes the mapping again, without a word
            assert line(program) == "lost"
            port = line(program).split()[2]
        assert any(
            greeting(outside, home, port) == repr(GREETING) for _ in range(20)
        )  # a failed try takes 2 s
        assert end(program)[-1:] == ["lost"]
    assert greeting(outside, home, port) == ""


def test_router_without_port_mapping_maps_nothing(internet: Lab) -> None:
    with work(internet.site(Kind.CONE).hosts[0]) as program:
        assert line(program, logged=True).startswith("log: the router maps no port: NAT-PMP: ")
        assert end(program) == []
