"""A peer that names the peers of its next round keeps their places when a newcomer comes before them."""

from __future__ import annotations

import pytest
import torch
import trio

import p2pavg
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, run_peers
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN, config, values

NEWCOMER = 1
BEGIN = (0.0, 1.0, 2.0)
"""Seconds after which each peer is ready; the newcomer comes before the expected peer."""


@pytest.mark.parametrize("process", ["", "/p0"], ids=["a peer", "a process of a peer"])
async def test_an_expected_peer_is_not_displaced_by_a_newcomer(process: str) -> None:
    """The leader expects the third peer alone, so its group has two places."""

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(config(group_size=2)) as averager:
            averager.accumulate([values(index)])
            if index != NEWCOMER:
                averager.expect([simulated_signer(2 - index).peer_id + process])
            await trio.sleep(BEGIN[index])
            return await averager.step(wait=None)

    network = MemoryNetwork(latency=LAN)
    results = await run_peers(network, 3, average)
    for result in results.values():
        assert isinstance(result, p2pavg.Success), result
        assert set(result.peers) == {simulated_signer(index).peer_id for index in range(3)}
        [averaged] = result.averaged
        torch.testing.assert_close(averaged, sum(values(index) for index in range(3)) / 3)


async def test_a_peer_that_expects_nobody_takes_the_first_that_comes() -> None:
    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(config(group_size=2)) as averager:
            averager.accumulate([values(index)])
            averager.expect([simulated_signer(2).peer_id])
            averager.expect([])
            await trio.sleep(BEGIN[index])
            return await averager.step(wait=30.0)

    results = await run_peers(MemoryNetwork(latency=LAN), 3, average)
    assert isinstance(results[0], p2pavg.Success)
    assert set(results[0].peers) == {simulated_signer(index).peer_id for index in (0, 1)}
    assert isinstance(results[2], p2pavg.NoPeers | p2pavg.InProgress)
