"""Streams that are opened while their connection ends."""

from __future__ import annotations

import pytest

from p2pavg.errors import UnreachableError
from p2pavg.net.libp2p.stream import Libp2pStream
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.testing.transport_conformance import ECHO
from tests.integration.hosts import LOOPBACK, TIMEOUT, assert_serves, eventually, open_host, watched


class Tried:
    """The streams that a host has tried to open; the connection ends before each of the first ones."""

    def __init__(self, host: Libp2pTransport, monkeypatch: pytest.MonkeyPatch, *, ends: int) -> None:
        self.count = 0
        self._host = host
        self._ends = ends
        self._open = host._opener.open
        monkeypatch.setattr(host._opener, "open", self.open)

    async def open(self, peer_id: str, protocol: str) -> Libp2pStream:
        self.count += 1
        if self.count <= self._ends:
            await self._host._connections.abort(peer_id)
            await eventually(lambda: not self._host.is_connected(peer_id))
        return await self._open(peer_id, protocol)


@watched
async def test_a_connection_that_has_just_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of a round would otherwise be lost to another one."""
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        tried = Tried(here, monkeypatch, ends=1)
        await assert_serves(here, there)
        assert tried.count == 2


@watched
async def test_a_peer_whose_connections_always_end_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        tried = Tried(here, monkeypatch, ends=9)
        with pytest.raises(UnreachableError):
            await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)
        assert tried.count == 2


@watched
async def test_a_refused_protocol_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        tried = Tried(here, monkeypatch, ends=0)
        with pytest.raises(UnreachableError):
            await here.open_stream(there.peer_id, "/nobody/1", addresses=there.addresses, timeout=TIMEOUT)
        assert tried.count == 1
