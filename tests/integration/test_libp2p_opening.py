"""Streams that are opened while their connection ends."""

from __future__ import annotations

import socket

import pytest

from p2pavg.base.errors import UnreachableError
from p2pavg.net.libp2p.stream import Libp2pStream
from p2pavg.net.libp2p.transport import Libp2pTransport
from tests.integration.hosts import LOOPBACK, TIMEOUT, assert_serves, open_host, watched
from tests.transport_conformance import ECHO


class Tried:
    """Counts the streams that a host tries to open. The other end closes the connections before the first ones."""

    def __init__(
        self, here: Libp2pTransport, there: Libp2pTransport, monkeypatch: pytest.MonkeyPatch, *, ends: int
    ) -> None:
        self.count = 0
        self._here, self._there = here, there
        self._ends = ends
        self._open = here._connections.open_stream
        monkeypatch.setattr(here._connections, "open_stream", self.open)

    async def open(self, peer_id: str, protocol: str) -> Libp2pStream:
        self.count += 1
        if self.count <= self._ends:
            for muxed in self._there._connections.of(self._here.peer_id):
                assert muxed.socket is not None
                muxed.socket.shutdown(socket.SHUT_RDWR)
        return await self._open(peer_id, protocol)


@pytest.mark.parametrize("is_inbound", [False, True], ids=["outbound", "inbound"])
@watched
async def test_a_connection_that_ends_while_a_stream_is_opened_is_replaced(
    is_inbound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of a round would otherwise be lost to another one.

    This end cleans up after a connection that the other end has closed. That is not a reason to give the peer up.
    """
    for _ in range(5):
        async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
            tried = Tried(here, there, monkeypatch, ends=1)
            if is_inbound:
                await there.dial(here.addresses[0], timeout=TIMEOUT)
            await assert_serves(here, there)
            assert tried.count == 2


@watched
async def test_a_peer_whose_connections_always_end_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        tried = Tried(here, there, monkeypatch, ends=9)
        with pytest.raises(UnreachableError):
            await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)
        assert tried.count == 2


@watched
async def test_a_connection_that_this_end_has_dropped_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        tried = Tried(here, there, monkeypatch, ends=0)
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        here._connections.of(there.peer_id)[0].dropped_here = True
        tried._ends = 1
        with pytest.raises(UnreachableError):
            await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)
        assert tried.count == 1


@watched
async def test_a_refused_protocol_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        tried = Tried(here, there, monkeypatch, ends=0)
        with pytest.raises(UnreachableError):
            await here.open_stream(there.peer_id, "/unserved/1", addresses=there.addresses, timeout=TIMEOUT)
        assert tried.count == 1
