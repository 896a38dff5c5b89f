"""Helpers: one step of several peers of which one lies, and checks of the others' results."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import trio

import p2pavg
from p2pavg.peer.peer import Peer
from p2pavg.round import exchange
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN, Swarm, config, mean, same_bits, tensors_of, values

ELEMENTS = 2_000
SIZE = 4


def name(index: int) -> str:
    """Return the id of the peer that is ``index``-th in the roster."""
    return simulated_signer(index).peer_id


def honest(liar: int, size: int = SIZE) -> list[int]:
    return [index for index in range(size) if index != liar]


async def play(
    network: MemoryNetwork | None = None,
    *,
    size: int = SIZE,
    how: p2pavg.AveragingConfig | None = None,
    prepare: Callable[[Peer, int], None] = lambda _peer, _index: None,
    stranger: Callable[[Peer, bytes, Sequence[Peer]], Awaitable[None]] | None = None,
) -> Swarm:
    """Run one step of each peer; they announce themselves in the order of their indices.

    A stranger, if given, is told the group that they form.
    """
    swarm = Swarm()
    here = size + (stranger is not None)
    how = how or config(group_size=size)
    async with (
        simulated_peers(network or MemoryNetwork(latency=LAN), here) as peers,
        trio.open_nursery() as beside,
    ):
        async with trio.open_nursery() as nursery:
            for index, peer in enumerate(peers[:size]):
                prepare(peer, index)
                tensors = [values(index, ELEMENTS)]
                nursery.start_soon(
                    partial(swarm.step_once, peer, index, how, after=0.1 * index, tensors=tensors)
                )
            if stranger is not None:
                group_id = await formed(swarm, peers[0])
                beside.start_soon(stranger, peers[-1], group_id, peers[:size])
        beside.cancel_scope.cancel()
    return swarm


async def formed(swarm: Swarm, leader: Peer) -> bytes:
    """Wait until a peer is in a group; return the group's id."""
    with trio.fail_after(9.0):
        while True:
            averager = swarm.averagers.get(leader.id)
            if averager is not None and averager._round and averager._round._roster is not None:
                return averager._round._roster.group_id
            await trio.sleep(0.0002)


def check_exact(swarm: Swarm, members: Sequence[int]) -> list[p2pavg.Success]:
    """Check that these peers ended with the mean of exactly their own contributions, to the same bits."""
    results = [swarm.results[name(index)] for index in members]
    found = [result for result in results if isinstance(result, p2pavg.Success)]
    assert len(found) == len(results), results
    assert same_bits(found)
    for result in found:
        assert set(result.peers) == {name(index) for index in members}
        check_certificate(result)
    torch.testing.assert_close(tensors_of(found[0])[0], mean(members, ELEMENTS).float(), rtol=1e-5, atol=1e-6)
    return found


def check_certificate(result: p2pavg.Success) -> None:
    """Check that a result's certificate proves what the result says."""
    proof = p2pavg.verify_certificate(result.certificate)
    assert proof.group_id == result.group_id
    assert proof.peers == result.peers
    assert proof.weights == result.weights
    assert set(proof.signers) >= (set(result.peers) | set(result.observers)) - set(result.lost)


def check_costs_itself(swarm: Swarm, liar: int, reason: str, size: int = SIZE) -> None:
    """Check that the others exclude exactly the liar by name, and report its action."""
    for result in check_exact(swarm, honest(liar, size)):
        assert set(result.lost) == {name(liar)}
        assert reason in result.lost[name(liar)], dict(result.lost)


def instead(monkeypatch: pytest.MonkeyPatch, what: str, liar: int, lying: Callable[..., Any]) -> None:
    """Replace the class of that name by ``lying`` in one peer's exchanges."""
    real = getattr(exchange, what)

    def make(**given: Any) -> Any:
        transport = given["transport"] if "transport" in given else given["context"].transport
        return (lying if transport.peer_id == name(liar) else real)(**given)

    monkeypatch.setattr(exchange, what, make)
