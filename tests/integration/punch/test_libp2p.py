"""Punched connections of libp2p on loopback: what they carry, and what they do not change."""

from __future__ import annotations

import socket

import pytest
import trio

from p2pavg.base.errors import UnreachableError
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.nat.punch.meeting import RefusedPunchError
from p2pavg.net.nat.punch.service import PunchService
from p2pavg.net.nat.reach.reachability import Kind, Reachability
from p2pavg_dht import Ed25519Signer
from tests.integration.hosts import (
    LOOPBACK,
    TIMEOUT,
    assert_checked_while_idle,
    assert_serves,
    eventually,
    open_host,
    watched,
)
from tests.integration.lanes.company import Inbox, Serving, lane_to, pair, post
from tests.integration.punch.peers import kept


def behind_a_router(host: Libp2pTransport, kind: Kind = Kind.PUNCHABLE) -> PunchService:
    """Let a host believe that it is behind a router that keeps ports, and return its service of punches."""
    reaching = host._reaching
    reaching.reachability = Reachability(
        kind=kind,
        sentence=f"behind a {kind} router",
        outer_hosts=("127.0.0.1",),
        punch_hosts=("127.0.0.1",) if kind is Kind.PUNCHABLE else (),
    )
    reaching._watcher.outer_port = kept  # type: ignore[method-assign]
    return reaching.punches


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection that no listener of a host has accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mine = socket.create_connection(listening.getsockname())
        return mine, listening.accept()[0]


@watched
async def test_streams_and_lanes_go_on_over_a_punched_connection() -> None:
    """It takes the place of the connection over which the two peers agreed on it."""
    async with pair() as (here, there):
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        (first,) = here._connections.of(there.peer_id)
        service = behind_a_router(here)
        behind_a_router(there)
        await service.connect(there.peer_id, timeout=TIMEOUT)
        (punched,) = (found for found in here._connections.of(there.peer_id) if found is not first)
        assert punched.punched
        assert punched.is_initiator
        for host, peer in ((here, there), (there, here)):
            for each in host._connections.of(peer.peer_id):
                assert each.socket is not None
                assert_checked_while_idle(each.socket)
        await first.abort()
        await eventually(lambda: here.path_to(there.peer_id) == there.path_to(here.peer_id) == "punched")
        await assert_serves(here, there)

        inbox = Inbox()
        there.serve_lanes(Serving(inbox))
        here._reaching.addresses = there._reaching.addresses = ()
        assert here._connections.dialled_addresses(there.peer_id) == [], "no other connection gets in there"
        await post(await lane_to(here, there), b"hello")
        assert await inbox.messages.receive() == b"hello"


@watched
async def test_a_peer_behind_a_symmetric_router_refuses_by_its_reachability() -> None:
    async with pair() as (here, there):
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        service = behind_a_router(here)
        behind_a_router(there, Kind.RELAYED)
        with pytest.raises(
            RefusedPunchError, match=r"the peer takes part in no punch: .*behind a relayed router"
        ):
            await service.connect(there.peer_id, timeout=TIMEOUT)


@watched
async def test_a_peer_that_is_asked_dials_directly_and_never_through_a_relay() -> None:
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there, open_host(LOOPBACK) as relay:
        await there.dial(here.addresses[0], timeout=TIMEOUT)
        service = behind_a_router(here)
        circuit = f"{relay.addresses[0]}/p2p-circuit/p2p/{here.peer_id}"
        with pytest.raises(UnreachableError, match=r"reported: no connection\n"):
            await service.ask_to_dial(there.peer_id, [circuit], timeout=TIMEOUT)
        assert not there.is_connected(relay.peer_id)
        await service.ask_to_dial(there.peer_id, [circuit, here.addresses[0]], timeout=TIMEOUT)
        assert len(here._connections.of(there.peer_id)) == 2


@watched
async def test_a_punched_socket_to_another_peer_is_closed() -> None:
    async with pair() as (here, there), open_host(LOOPBACK) as other:
        mine, theirs = socket_pair()
        async with trio.open_nursery() as nursery:

            async def responder() -> None:
                with pytest.raises(UnreachableError):
                    await other._connections.adopt_socket(theirs, here.peer_id, initiator=False)

            nursery.start_soon(responder)
            with pytest.raises(UnreachableError):
                await here._connections.adopt_socket(mine, there.peer_id, initiator=True)
        assert mine.fileno() == theirs.fileno() == -1
        assert not here.is_connected(other.peer_id)
        assert not here.is_connected(there.peer_id)


@watched
async def test_a_punched_connection_that_gives_way_in_its_handshake_is_no_success() -> None:
    """The peer that asked learns then that it was refused, and not that it is connected."""
    async with open_host(LOOPBACK) as host:
        mine, theirs = socket_pair()
        entrance, some_peer = host._connections.entrance, Ed25519Signer(b"s" * 32).peer_id
        async with trio.open_nursery() as nursery:

            async def admission() -> None:
                await eventually(lambda: bool(entrance._drops))
                (arrival,) = entrance._drops
                entrance._drop([arrival])

            nursery.start_soon(admission)
            with mine, pytest.raises(UnreachableError, match="gives way"):
                await host._connections.adopt_socket(theirs, some_peer, initiator=False)
        assert theirs.fileno() == -1
        assert not entrance._drops
