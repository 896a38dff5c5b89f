"""The lab itself: its routers translate, keep ports and drop like the routers that they stand for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nat.lab import Host, Kind, Lab
from tests.nat.namespaces import PREFIX, LabError, clean, inside, run
from tests.nat.routers import FORWARDED_PORT

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SECONDS = 10.0

# Accepts connections and tells each the address that it comes from.
_LISTENER = """
import socket
listener = socket.create_server(("0.0.0.0", {port}))
print("ready", flush=True)
while True:
    connection, (host, port) = listener.accept()
    connection.sendall(f'["{{host}}", {{port}}]'.encode())
    connection.close()
"""
# Connects, and prints what it is told.
_DIALLER = """
import socket
with socket.socket() as dialler:
    dialler.settimeout(2)
    dialler.bind(("0.0.0.0", {own_port}))
    dialler.connect(("{host}", {port}))
    print(dialler.makefile().read())
"""


@contextmanager
def listening(host: Host, port: int) -> Iterator[None]:
    """Listen at a host, in a process that ends with the block."""
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-c", _LISTENER.format(port=port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def dial(here: Host, address: str, port: int, own_port: int = 0) -> tuple[str, int]:
    """Connect, and return the address that the other end sees."""
    program = _DIALLER.format(host=address, port=port, own_port=own_port)
    host, outer_port = json.loads(inside(here.namespace, sys.executable, "-S", "-c", program))
    return host, outer_port


@pytest.mark.parametrize("kind", [Kind.CONE, Kind.FORWARDED, Kind.CGNAT])
def test_a_router_that_keeps_ports(internet: Lab, kind: Kind) -> None:
    server, home = internet.site(Kind.PUBLIC).hosts[0], internet.site(kind)
    with listening(server, 4001):
        assert dial(home.hosts[0], server.address, 4001, own_port=5000) == (home.public, 5000)


def test_a_symmetric_router_gives_each_connection_another_port(internet: Lab) -> None:
    server, home = internet.site(Kind.PUBLIC).hosts[0], internet.site(Kind.SYMMETRIC)
    with listening(server, 4001), listening(server, 4002):
        seen = {dial(home.hosts[0], server.address, port, own_port=5000) for port in (4001, 4002)}
    assert {host for host, _ in seen} == {home.public}
    assert len({port for _, port in seen} | {5000}) == 3


@pytest.mark.parametrize("kind", [Kind.CONE, Kind.SYMMETRIC, Kind.CGNAT, Kind.FORWARDED])
def test_a_router_drops_what_comes_unasked(internet: Lab, kind: Kind) -> None:
    dialler, home = internet.site(Kind.PUBLIC).hosts[0], internet.site(kind)
    port = FORWARDED_PORT + 1
    with listening(home.hosts[0], port), pytest.raises(LabError, match="timed out"):
        dial(dialler, home.public, port)


def test_the_lab_of_a_killed_process_is_removed_by_the_next_one() -> None:
    program = (
        "import os, signal\n"
        "from tests.nat.lab import Kind, lab\n"
        "with lab() as made:\n"
        "    made.site(Kind.CONE)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    killed.wait(SECONDS)
    prefix = f"{PREFIX}-{killed.pid}-"
    assert prefix in run("ip", "netns", "list")
    assert any(name.startswith(prefix) for name in clean())
    assert prefix not in run("ip", "netns", "list")
