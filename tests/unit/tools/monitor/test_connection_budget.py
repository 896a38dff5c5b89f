"""The monitor answers a host only as long as this host has processor time left."""

from __future__ import annotations

import socket

import pytest
import trio

from p2pavg.net.limits.call_budget import CallBudget, CallRates
from p2pavg.tools.monitor import serving as connections
from p2pavg.tools.monitor.serving import Connection, serving

SECONDS = 60.0


async def greet(connection: Connection) -> None:
    await connection.send_all(b"hello")


async def answer_from(port: int) -> bytes:
    """Connect, and return what comes until the end."""
    found = b""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        try:
            while piece := await stream.receive_some(100):
                found += piece
        except trio.BrokenResourceError:
            pass
    return found


async def test_connections_beyond_the_budget_of_their_host_are_closed_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = CallRates(peer_seconds=1e-6, peer_burst_seconds=1e-6)
    monkeypatch.setattr(connections, "CallBudget", lambda: CallBudget(rates))
    answered = 0

    async def count(connection: Connection) -> None:
        nonlocal answered
        answered += 1
        await greet(connection)

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.setblocking(False)
    with trio.fail_after(SECONDS):
        async with serving(listener, count):
            for _ in range(3):
                await answer_from(listener.getsockname()[1])
    assert answered == 1
