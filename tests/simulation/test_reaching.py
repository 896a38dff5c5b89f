"""Peers that some or all others cannot dial: which peer leads, which peers meet, and the reported reasons."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import trio

import p2pavg
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, MemoryTransport, simulated_peers
from tests.simulation.swarm import LAN, step_each


def config(**changes: object) -> p2pavg.AveragingConfig:
    chosen = {"run_id": "sim", "group_size": 2, "match_timeout": 20.0, "exchange_timeout": 8.0, **changes}
    return p2pavg.AveragingConfig(**chosen)  # type: ignore[arg-type]


def transport_of(peer: Peer) -> MemoryTransport:
    transport = peer.context.transport
    assert isinstance(transport, MemoryTransport)
    return transport


async def average(
    peers: Sequence[Peer], how: p2pavg.AveragingConfig, delays: Sequence[float]
) -> list[tuple[float, p2pavg.RoundResult]]:
    """Start each peer after its delay; return the times and results."""
    began = trio.current_time()
    swarm = await step_each(peers, how, delays)
    return [(swarm.ended[peer.id] - began, swarm.results[peer.id]) for peer in peers]


async def test_a_peer_that_no_one_can_dial_does_not_lead_those_that_can_be_dialled() -> None:
    """It announces first. In version 0.1 it led, and the other peer without an address could not reach it."""
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        for peer in peers[1:]:
            transport_of(peer).listens = False
        found = await average([peers[1], peers[0], peers[2]], config(group_size=3), [0.0, 0.5, 1.0])
    for took, result in found:
        assert isinstance(result, p2pavg.Success), result
        assert len(result.peers) == 3
        assert took < 3.0


async def test_a_peer_behind_a_router_leads_one_that_it_has_dialled() -> None:
    """The later peer cannot dial it. It dials the later peer, which then asks at once over that connection."""
    async with simulated_peers(MemoryNetwork(latency=LAN), 2, first=1) as peers:
        for peer in peers:  # the bootstrap connection must not count
            await peer.context.transport.disconnect(peers[0].id)
            await peer.context.transport.disconnect(peers[1].id)
        transport_of(peers[1]).inbound = "refused"
        found = await average([peers[1], peers[0]], config(), [0.0, 2.0])
    for took, result in found:
        assert isinstance(result, p2pavg.Success), result
        assert took < 6.5


async def test_peers_that_cannot_reach_each_other_get_that_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Two peers behind home routers, and a bootstrap peer that both can dial. Version 0.1 reported no ready peer."""
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        for peer in peers[1:]:
            transport_of(peer).inbound = "dropped"
        await peers[1].context.transport.disconnect(peers[2].id)
        await peers[2].context.transport.disconnect(peers[1].id)
        with caplog.at_level(logging.WARNING):
            (_, first), (_, second) = await average(peers[1:], config(), [0.0, 0.1])
    for result, other in ((first, peers[2]), (second, peers[1])):
        assert isinstance(result, p2pavg.NoPeers)
        assert result.code is p2pavg.NoPeersCode.UNREACHABLE
        address = other.addresses[0].partition("/p2p/")[0]
        assert "saw 1 other peer and could not reach it: 12D3.." in result.reason
        assert f"{other.id[-6:]} at {address} (timed out)" in result.reason
