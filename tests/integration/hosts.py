"""Hosts on loopback over real libp2p, and helpers of their tests."""

import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from p2pavg.net.libp2p.transport import Libp2pTransport, open_libp2p_transport
from p2pavg.net.nat.reach.options import ReachOptions
from p2pavg.net.transport import Transport, receive_message, send_message
from tests.transport_conformance import ECHO, echo

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TIMEOUT = 20.0

seeds = iter(number.to_bytes(32, "big") for number in range(1, 100_000))


def watched(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Add a watchdog to a test, because a missing guard would make it wait without end."""

    @functools.wraps(test)
    async def bounded(*args: Any, **kwargs: Any) -> None:
        with trio.fail_after(150.0):
            await test(*args, **kwargs)

    return bounded


@asynccontextmanager
async def open_host(*listen: str, options: ReachOptions | None = None) -> AsyncIterator[Libp2pTransport]:
    """Open a host that echoes. Without an address, it only dials, and is reached through relays."""
    async with open_libp2p_transport(seed=next(seeds), listen=listen, options=options) as host:
        host.serve(ECHO, echo)
        yield host


def assert_checked_while_idle(opened: socket.socket | trio.socket.SocketType) -> None:
    """Assert that the system checks an idle connection, before a router forgets it that does so after 20 s."""
    assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_KEEPIDLE"):
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 15


def hide(host: Libp2pTransport) -> None:
    """Let a host announce no address of its listeners, as if it had none."""
    host._connections.listens = False
    host._reaching._watcher.begin()


async def eventually(condition: Callable[[], bool]) -> None:
    """Poll for a condition that no event announces; the watchdog bounds the wait."""
    while not condition():
        await trio.sleep(0.005)


def port_of(host: Transport) -> int:
    return int(host.addresses[0].split("/")[4])


async def assert_serves(here: Transport, there: Transport) -> None:
    stream = await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)
    await send_message(stream, b"are you there?")
    assert await receive_message(stream) == b"are you there?"
    await stream.aclose()
