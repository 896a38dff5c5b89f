"""The mapper of ports with a real ``miniupnpd``, between a machine at home and one on the internet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.mapping_work import GREETING
from tests.integration.router_lab import OUTER, RouterLab, open_router_lab, reason_to_skip

pytestmark = pytest.mark.processes

CONNECT = "import socket, sys; print(socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).recv(9))"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[RouterLab]:
    """Open a lab, or skip the test with the reason."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    with open_router_lab(tmp_path) as found:
        yield found


class Work:
    """The program at home."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def line(self, *, logged: bool = False) -> str:
        """Return the next line that the mapper tells, or that it logs."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("log: ") == logged:
                return line.strip()
        raise AssertionError("the program has ended")

    def end(self) -> list[str]:
        """Let it end by itself, and return what the mapper tells until then."""
        rest, _ = self._process.communicate(timeout=60)
        return [line for line in rest.splitlines() if not line.startswith("log: ")]


@contextmanager
def work(lab: RouterLab, protocol: str = "") -> Iterator[Work]:
    """Run the program that maps a port at home, by PCP or by the first protocol that the router speaks."""
    command = lab.command("home", sys.executable, "-m", "tests.integration.mapping_work", "1", protocol)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield Work(process)
    finally:
        process.kill()
        process.communicate()


def greeting(lab: RouterLab, port: str) -> str:
    """Connect from outside to a port of the router, and return what comes; empty if there is no connection."""
    command = lab.command("outside", sys.executable, "-c", CONNECT, OUTER, port)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


@pytest.mark.parametrize("protocol", ["NAT-PMP", "PCP", "UPnP"])
def test_mapped_port_is_reached_from_outside_until_the_end(lab: RouterLab, protocol: str) -> None:
    lab.start_router(upnp=protocol == "UPnP", natpmp=protocol != "UPnP")
    with work(lab, protocol) as program:
        name, host, port = program.line().split()
        assert (name, host) == (protocol, OUTER)
        assert greeting(lab, port) == repr(GREETING)
        assert program.end() == ["lost"]
    assert greeting(lab, port) == ""


@pytest.mark.parametrize("protocol", ["NAT-PMP", "PCP", "UPnP"])
def test_router_that_forgets_is_asked_again(lab: RouterLab, protocol: str) -> None:
    kinds = {"upnp": protocol == "UPnP", "natpmp": protocol != "UPnP"}
    lab.start_router(**kinds)
    with work(lab, protocol) as program:
        port = program.line().split()[2]
        lab.kill_router()
        assert greeting(lab, port) == ""
        lab.start_router(**kinds)
        if protocol != "PCP":  # whose check makes the mapping again, without a word
            assert program.line() == "lost"
            port = program.line().split()[2]
        assert any(greeting(lab, port) == repr(GREETING) for _ in range(20))  # a failed try takes 2 s


def test_router_without_port_mapping_maps_nothing(lab: RouterLab) -> None:
    with work(lab) as program:
        assert program.line(logged=True).startswith("log: the router maps no port: NAT-PMP: ")
        assert program.end() == []
