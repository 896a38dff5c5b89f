"""Acknowledgements of the other end of a connection, with real sockets."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator

import pytest

from p2pavg.net.keep_alive import is_acknowledged

LONG = 3600.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when it was acknowledged")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


def test_a_system_acknowledges_what_its_process_never_reads(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = pair
    end = time.monotonic() + 30.0
    while is_acknowledged(near, 0.1) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_acknowledged(near, 0.1), "nothing was sent since"
    while not is_acknowledged(near, 0.1) and time.monotonic() < end:
        near.send(b"ping")
    assert is_acknowledged(near, LONG)


def test_a_connection_that_has_ended_does_not_count(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    near.send(b"ping")
    far.close()
    end = time.monotonic() + 30.0
    while is_acknowledged(near, LONG) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_acknowledged(near, LONG)
    near.close()
    assert not is_acknowledged(near, LONG)
