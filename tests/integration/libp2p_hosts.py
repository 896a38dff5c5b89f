"""Hosts that can be dialled, and a host whose socket to a stranger is full."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

import trio
from libp2p.peer.id import ID
from trio.testing import wait_all_tasks_blocked

from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.transport import Stream, Transport
from tests.integration import hosts
from tests.integration.hosts import LOOPBACK, assert_serves, eventually
from tests.integration.raw_peers import RawPeer, raw_peer

HELD = "/held/1"
FLOOD = "/flood/1"
HUGE_WINDOW = 1 << 30


def open_host(*listen: str) -> AbstractAsyncContextManager[Libp2pTransport]:
    """Open a host that can be dialled."""
    return hosts.open_host(*(listen or (LOOPBACK,)))


async def assert_serves_strangers(host: Transport) -> None:
    async with open_host() as stranger:
        await assert_serves(stranger, host)


def connection_of(host: Libp2pTransport, peer_id: str) -> GuardedYamux:
    (connection,) = host._swarm.get_connections(ID.from_base58(peer_id))
    return cast(GuardedYamux, connection.muxed_conn)


async def hold(_: Stream) -> None:
    await trio.sleep_forever()


async def flood(stream: Stream) -> None:
    await stream.send_all(bytes(256 * 1024 * 1024))


async def until_it_cannot_write(host: Libp2pTransport, stranger: RawPeer) -> None:
    await eventually(lambda: host.is_connected(stranger.peer_id))
    lock = connection_of(host, stranger.peer_id)._write_lock
    await eventually(lock.locked)
    await wait_all_tasks_blocked(0.05)
    assert lock.locked()


@asynccontextmanager
async def host_that_cannot_write() -> AsyncIterator[tuple[Libp2pTransport, RawPeer]]:
    """Open a host whose socket to a stranger is full: it floods a huge window, and the stranger reads nothing."""
    async with open_host() as host:
        host.serve(FLOOD, flood)
        async with raw_peer(host) as stranger:
            await stranger.open(1, FLOOD, window=HUGE_WINDOW)
            await until_it_cannot_write(host, stranger)
            yield host, stranger
