"""Groups of peers that can be dialled, punched or only relayed: who meets, over which paths, and lost relays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import trio

import p2pavg
from p2pavg.consensus.certificate import verified_commit
from p2pavg.group.reach import Reach
from p2pavg.net.nat.reach.reachability import Kind
from p2pavg.peer.peer import Peer
from p2pavg.testing import (
    After,
    Crash,
    Fault,
    FaultPlan,
    MemoryNetwork,
    MemoryTransport,
    Milestone,
    run_peers,
    simulated_peers,
)
from p2pavg.testing.memory import DIRECT_KINDS
from tests.simulation.swarm import LAN, check_one_result, config, step_each, values

KINDS = {"d": Kind.PUBLIC, "p": Kind.PUNCHABLE, "r": Kind.RELAYED}
ELEMENTS = 100_000


def kinds_of(letters: str) -> list[Kind]:
    return [KINDS[letter] for letter in letters]


def transport_of(peer: Peer) -> MemoryTransport:
    transport = peer.context.transport
    assert isinstance(transport, MemoryTransport)
    return transport


def relayed_bytes(network: MemoryNetwork, peers: Sequence[Peer]) -> int:
    return sum(network.bytes_relayed(peer.id) for peer in peers)


async def average(peers: Sequence[Peer], how: p2pavg.AveragingConfig) -> list[p2pavg.RoundResult]:
    """Run a round on all peers at once."""
    swarm = await step_each(peers, how, tensors=lambda index: [values(index, ELEMENTS)])
    return [swarm.results[peer.id] for peer in peers]


@pytest.mark.parametrize("kinds", ["rr", "pp", "dprr"])
async def test_peers_of_all_kinds_average_beside_a_peer_that_relays(kinds: str) -> None:
    network = MemoryNetwork(latency=LAN, bandwidth=12.5e6)
    async with simulated_peers(network, 1 + len(kinds), kinds=kinds_of("d" + kinds)) as (relay, *peers):
        results = await average(peers, config(group_size=len(kinds)))
        relayed = network.bytes_relayed(relay.id)
    assert all(isinstance(result, p2pavg.Success) for result in results), results
    first = results[0]
    assert isinstance(first, p2pavg.Success)
    expected = torch.stack([values(index, ELEMENTS).double() for index in range(len(kinds))]).mean(0).float()
    assert isinstance(first.averaged, list)
    torch.testing.assert_close(first.averaged[0], expected, rtol=1e-5, atol=1e-6)
    if "r" not in kinds:
        assert relayed < ELEMENTS, "a pair that connects directly uses no relay for its tensors"
    elif "d" not in kinds:
        assert relayed > 2 * 4 * ELEMENTS, "one vector there and one back"


async def test_a_mixed_swarm_averages_and_each_group_has_a_peer_that_can_be_dialled() -> None:
    """8 peers, of which 3 can be dialled, in groups of 4. Relayed peers among themselves would need relays."""
    network = MemoryNetwork(latency=LAN, bandwidth=12.5e6)
    letters = "ddd" + "pp" + "rrr"
    async with simulated_peers(network, len(letters), kinds=kinds_of(letters)) as peers:
        letter_of = dict(zip((peer.id for peer in peers), letters, strict=True))
        results = await average(peers, config(group_size=4, match_timeout=30.0))
    groups = set()
    for result in results:
        assert isinstance(result, p2pavg.Success), result
        groups.add("".join(sorted(letter_of[peer_id] for peer_id in result.peers)))
    assert all("d" in group for group in groups), groups


async def test_a_group_with_enough_peers_that_can_be_dialled_sends_little_through_relays() -> None:
    """Votes go through relays, and of the tensors what relays carry in the time of the round."""
    network = MemoryNetwork(latency=LAN, bandwidth=12.5e6)
    letters = "ddd" + "pp" + "rrr"
    async with simulated_peers(network, len(letters), kinds=kinds_of(letters)) as peers:
        relayed = dict[Milestone, int]()
        network.watchers.append(
            lambda _, milestone: relayed.update({milestone: relayed_bytes(network, peers)})
        )
        results = await average(peers, config(group_size=len(letters)))
    assert all(isinstance(result, p2pavg.Success) for result in results), results
    assert relayed[Milestone.COMMITTED] - relayed[Milestone.FORMED] < 4 * ELEMENTS


async def test_a_relayed_member_does_not_slow_a_group_with_members_that_can_be_dialled() -> None:
    took = {}
    for kinds in ("ddddpp", "ddddpr"):
        network = MemoryNetwork(latency=LAN, bandwidth=1.25e6)
        async with simulated_peers(network, len(kinds), kinds=kinds_of(kinds)) as peers:
            results = await average(peers, config(group_size=len(kinds), bandwidth=10.0))
        assert all(isinstance(result, p2pavg.Success) for result in results), results
        took[kinds] = max(r.exchange_duration for r in results if isinstance(r, p2pavg.Success))
    # Four members reduce what five did: 2 vectors each way instead of 1.8, and some of it late.
    assert took["ddddpr"] < 1.5 * took["ddddpp"]


@pytest.mark.parametrize(
    ("kinds", "milestone"),
    [
        ("rr", Milestone.FORMED),
        ("rr", Milestone.CONTRIBUTION_SENT),
        ("dprr", Milestone.AVERAGE_SENT),
        ("dprr", Milestone.HOLDING),
    ],
)
async def test_a_relay_that_dies_in_a_round_is_a_lost_connection(kinds: str, milestone: Milestone) -> None:
    """The relay is no member. Its connections break, and members end as after any lost connection."""
    network = MemoryNetwork(latency=(0.002, 0.006), bandwidth=2e6)
    how = config(group_size=len(kinds), min_group_size=len(kinds), exchange_timeout=10.0)

    async def work(peer: Peer, index: int) -> p2pavg.RoundResult | None:
        if index == 0:
            return None
        async with peer.averager(how) as averager:
            averager.accumulate([values(index, ELEMENTS)])
            result = await averager.step(wait=None)
            if isinstance(result, p2pavg.Success):
                assert averager.weight == 0
            elif isinstance(result, p2pavg.NoPeers) or getattr(result, "contribution_used", None) is False:
                assert averager.weight == 1
            return result

    plan = FaultPlan([Fault(Crash(0), After(milestone, of=len(kinds)))])
    results = await run_peers(network, 1 + len(kinds), work, plan=plan, kinds=kinds_of("d" + kinds))
    ended = [result for index, result in sorted(results.items()) if index]
    assert len(ended) == len(kinds)
    won = [result for result in ended if isinstance(result, p2pavg.Success)]
    if won:
        check_one_result(won, ELEMENTS)
    for result in ended:
        if milestone is Milestone.FORMED:  # before another member has heard the commit
            assert isinstance(result, p2pavg.Failed | p2pavg.NoPeers | p2pavg.InProgress | p2pavg.Success), (
                result
            )
        else:
            assert isinstance(result, p2pavg.Success | p2pavg.Failed), result


async def test_peers_meet_again_through_another_relay() -> None:
    network = MemoryNetwork(latency=LAN)
    async with simulated_peers(network, 4, kinds=kinds_of("ddrr")) as peers:
        transport = transport_of(peers[2])
        assert len(transport.addresses) == 2
        first = await average(peers[2:], config(group_size=2))
        network.crash(peers[1].id)
        assert len(transport.addresses) == 1
        second = await average(peers[2:], config(group_size=2))
    for result in (*first, *second):
        assert isinstance(result, p2pavg.Success), result


async def test_a_peer_that_learns_its_reach_begins_its_attempt_anew() -> None:
    """Its first candidate says that it can be dialled, which is wrong. It does not wait for the next attempt."""
    network = MemoryNetwork(latency=LAN)
    async with simulated_peers(network, 3, kinds=kinds_of("drr")) as peers:
        for peer in peers[1:]:
            transport_of(peer).kind = Kind.UNKNOWN
            transport_of(peer).inbound = "dropped"
        for peer in peers:
            for other in peers:
                await peer.context.transport.disconnect(other.id)

        async def learn() -> None:
            await trio.sleep(4.0)
            for peer in peers[1:]:
                transport_of(peer).kind = Kind.RELAYED

        async with trio.open_nursery() as nursery:
            nursery.start_soon(learn)
            results = await average(peers[1:], config(group_size=2, match_timeout=60.0))
    for result in results:
        assert isinstance(result, p2pavg.Success), result
        assert result.duration < 30.0
        roster, _ = verified_commit(result.certificate)
        assert {member.reach for member in roster.members} == {Reach.RELAYED}


async def test_peers_without_a_way_to_each_other_hear_why_for_each_way() -> None:
    """Their relay refuses to relay. The reason is not that no other peer was ready."""
    network = MemoryNetwork(latency=LAN)
    async with simulated_peers(network, 3, kinds=kinds_of("drr")) as peers:
        relay, *apart = peers
        for peer in apart:
            for other in apart:
                await peer.context.transport.disconnect(other.id)
        network.refuse_circuits(relay.id)
        results = await average(apart, config(group_size=2, match_timeout=12.0))
    for result, other in zip(results, reversed(apart), strict=True):
        assert isinstance(result, p2pavg.NoPeers)
        assert "no other peer was ready" not in result.reason
        assert "saw 1 other peer and could not reach it: 12D3.." in result.reason
        assert f"{other.id[-6:]} (through relay" in result.reason
        assert "the relay gives no circuit: there are too many" in result.reason
        assert all(transport_of(peer).kind not in DIRECT_KINDS for peer in apart)
