"""Averagers with the topology ``gossip``: small groups that change, values that come together, and peers that fail."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
import trio

import p2pavg
from p2pavg.base.result import RoundResult
from p2pavg.group.places.gossip import MAX_LAG, ROUND, Rotation, SearchPlace, SearchStage
from p2pavg.peer.peer import Peer
from p2pavg.testing import (
    After,
    Crash,
    Fault,
    FaultPlan,
    MemoryNetwork,
    Milestone,
    Stop,
    run_peers,
    simulated_peers,
)
from tests.simulation.false_averages import lie
from tests.simulation.liars import name
from tests.simulation.swarm import LAN, config, values

PEERS = 8
ROUNDS = 4
ELEMENTS = 400


@dataclass
class Swarm:
    """Peers that average what they hold, again and again, until each one has taken its rounds.

    Args:
        rounds: successes after which a peer has done its part; it goes on until all others have.
        slow: peers that need not come to so many.
        weights: of the contributions of some peers; that of the others is 1.
        until: must be true too before the peers end.
    """

    rounds: int
    slow: frozenset[int] = frozenset()
    weights: Mapping[int, float] = field(default_factory=dict)
    until: Callable[[Swarm], bool] = lambda _swarm: True
    held: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """The values of each peer before the first round, and after each success."""
    results: dict[int, list[RoundResult]] = field(default_factory=dict)
    averagers: dict[int, p2pavg.DecentralizedAverager] = field(default_factory=dict)

    def groups(self, index: int) -> list[frozenset[str]]:
        """Return the members of the groups in which this peer took its rounds."""
        return [frozenset(each.peers) for each in self.results[index] if isinstance(each, p2pavg.Success)]

    def distance(self, number: int, of: Sequence[int]) -> float:
        """Return the mean squared distance of these peers' values from the mean of all first ones.

        Args:
            number: rounds that each peer has taken.
        """
        mean = torch.stack([self.held[index][0] for index in of]).mean(0)
        now = torch.stack([self.held[index][number] for index in of])
        return float((now - mean).square().sum(1).mean())

    def are_done(self) -> bool:
        """Return whether all peers have taken their rounds, and need no more."""
        others = [held for index, held in self.held.items() if index not in self.slow]
        return all(len(held) > self.rounds for held in others) and self.until(self)

    async def live(self, peer: Peer, index: int, how: p2pavg.AveragingConfig) -> None:
        """Average in a loop, as a program without an optimizer does."""
        held = self.held.setdefault(index, [values(index, ELEMENTS)])
        results = self.results.setdefault(index, [])
        draws = random.Random(index)
        async with peer.averager(how) as averager:
            self.averagers[index] = averager
            await trio.sleep(10.0)  # by then each peer has heard of the others
            while not self.are_done():
                averager.clear()
                averager.accumulate([held[-1]], weight=self.weights.get(index, 1.0))
                result = await averager.step(wait=1.0)
                while isinstance(result, p2pavg.InProgress) and not self.are_done():
                    result = await averager.step(wait=1.0)
                results.append(result)
                if isinstance(result, p2pavg.Success):
                    assert isinstance(result.averaged, list)
                    held.append(result.averaged[0])
                await trio.sleep(draws.uniform(1.0, 3.0))

    def check_averages(self, of: Sequence[int]) -> None:
        """Check that each pair's average is the weighted mean of one whole contribution of each of its members."""
        by_name = {name(index): index for index in self.held}
        for index in of:
            for (before, after), group in zip(
                itertools.pairwise(self.held[index]), self.groups(index), strict=True
            ):
                (other,) = group - {name(index)}
                weight, others = (self.weights.get(each, 1.0) for each in (index, by_name[other]))
                share = others / (weight + others)
                expected = [before.lerp(given, share) for given in self.held[by_name[other]]]
                assert any(torch.allclose(after, each, rtol=1e-5, atol=1e-6) for each in expected)


async def run(
    size: int,
    rounds: int,
    *,
    plan: FaultPlan | None = None,
    network: MemoryNetwork | None = None,
    slow: Sequence[int] = (),
    weights: Mapping[int, float] = MappingProxyType({}),
    until: Callable[[Swarm], bool] = lambda _swarm: True,
    **changes: Any,
) -> Swarm:
    swarm = Swarm(rounds, frozenset(slow), weights, until)
    how = config(**{"topology": "gossip", "match_timeout": 20.0, **changes})

    async def live(peer: Peer, index: int) -> None:
        await swarm.live(peer, index, how)

    with trio.fail_after(600.0):  # on the virtual clock
        await run_peers(network or MemoryNetwork(latency=LAN), size, live, plan=plan)
    return swarm


async def test_pairs_halve_the_distance_between_all_peers() -> None:
    """Boyd et al. 2006: a round of random pairs divides the mean squared distance from the mean by two."""
    swarm = await run(PEERS, ROUNDS)
    everyone = range(PEERS)
    groups = [swarm.groups(index) for index in everyone]
    assert {len(group) for each in groups for group in each} == {2}
    # One peer may meet another one three times by chance; all together do not.
    assert sum(len(set(each[:ROUNDS])) for each in groups) > PEERS * ROUNDS / 2
    repeated = sum(first == second for each in groups for first, second in itertools.pairwise(each[:ROUNDS]))
    assert repeated < PEERS, "a peer avoids its last partner while it can"
    swarm.check_averages(everyone)
    factor = (swarm.distance(ROUNDS, everyone) / swarm.distance(0, everyone)) ** (1 / ROUNDS)
    assert factor < 0.7, "0.5 by the formula; 0.87 if all kept their partners"


async def test_larger_groups_come_together_faster() -> None:
    swarm = await run(9, 3, topology=p2pavg.Gossip(degree=2))
    everyone = range(9)
    sizes = [len(group) for index in everyone for group in swarm.groups(index)]
    assert max(sizes) == 3
    assert sizes.count(3) > len(sizes) / 2
    assert (swarm.distance(3, everyone) / swarm.distance(0, everyone)) ** (1 / 3) < 0.45, (
        "0.33 by the formula"
    )


# ------------------------------------------------------------------ kills, stops and lies


def slow_network() -> MemoryNetwork:
    """Links on which a round takes a third of a second."""
    return MemoryNetwork(latency=(0.002, 0.006), bandwidth=5e3)


SIZE = 4
VICTIM = 1


async def test_a_peer_that_crashes_costs_its_partner_one_search() -> None:
    """Its partner keeps its values, and averages with another peer."""
    crash = Fault(Crash(VICTIM), After(Milestone.FORMED, of=VICTIM, seconds=0.15))
    swarm = await run(SIZE, 3, plan=FaultPlan([crash]), network=slow_network(), slow=[VICTIM])
    others = [index for index in range(SIZE) if index != VICTIM]
    assert len(swarm.held[VICTIM]) <= 2
    swarm.check_averages(others)
    for index in others:
        for result in swarm.results[index]:
            assert not isinstance(result, p2pavg.Failed) or result.contribution_used is not True
    assert swarm.distance(3, others) < swarm.distance(0, others) / 3


async def test_a_peer_that_stops_is_left_and_comes_back() -> None:
    stop = Fault(Stop(VICTIM, seconds=30.0), After(Milestone.FORMED, of=VICTIM, seconds=0.1))
    swarm = await run(SIZE, 4, plan=FaultPlan([stop]), network=slow_network())
    swarm.check_averages(range(SIZE))
    [first, *later] = swarm.results[VICTIM]
    assert isinstance(first, p2pavg.Failed), "of the round in which it stopped"
    assert any(isinstance(result, p2pavg.Success) for result in later)
    assert swarm.distance(4, range(SIZE)) < swarm.distance(0, range(SIZE)) / 4


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_peer_that_sends_false_averages_is_excluded_by_all(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """One of a pair proves it to the peers that have never met the liar."""
    lie(monkeypatch, VICTIM)
    honest = [index for index in range(SIZE) if index != VICTIM]

    def is_excluded(swarm: Swarm) -> bool:
        return all(name(VICTIM) in swarm.averagers[index].excluded for index in honest)

    swarm = await run(SIZE, 4, slow=[VICTIM], until=is_excluded, audit=f"{when}:1.0")
    for index in honest:
        false = sum(name(VICTIM) in group for group in swarm.groups(index))
        assert false <= (when == "after"), "its partner audits each of its averages"
    if when == "before":
        swarm.check_averages(honest)


async def test_a_false_number_of_rounds_moves_nobody_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its partner computes the number from the mean, in which the liar's weight is the larger one."""
    metrics = vars(Rotation)["metrics"].fget

    def false(self: Rotation) -> dict[str, float]:
        return {ROUND: 1e100} if self._peer_id == name(VICTIM) else metrics(self)

    monkeypatch.setattr(Rotation, "metrics", property(false))
    swarm = await run(SIZE, 3, weights={VICTIM: 3.0})
    swarm.check_averages(range(SIZE))
    assert any(
        name(VICTIM) in group for index in range(SIZE) if index != VICTIM for group in swarm.groups(index)
    )
    for averager in swarm.averagers.values():
        assert averager._rotation is not None
        assert averager._rotation.number <= (MAX_LAG + 1) * len(swarm.groups(VICTIM)) + 10


# ------------------------------------------------------------------ one averager


async def test_a_peer_that_is_alone_hears_so_when_its_time_is_over() -> None:
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 1) as (peer,),
        peer.averager(config(topology="gossip", match_timeout=20.0)) as averager,
    ):
        averager.accumulate([values(0)])
        began = trio.current_time()
        result = await averager.step(wait=None)
        assert isinstance(result, p2pavg.NoPeers)
        assert trio.current_time() - began < 25.0, "on the virtual clock"
        assert averager.weight == 1.0, "the contribution is for the next round"
        assert isinstance(await averager.step(wait=0.0), p2pavg.InProgress)


async def test_groups_have_the_size_of_the_topology() -> None:
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 1) as (peer,),
        peer.averager(config(topology=p2pavg.Gossip(degree=2))) as averager,
    ):
        averager.accumulate([values(0)])
        progress = await averager.step(wait=0.0)
        assert isinstance(progress, p2pavg.InProgress)
        assert progress.target_size == 3
        with pytest.raises(
            ValueError, match="group_size must be None or 3 with the topology 'gossip:2:grid'"
        ):
            await averager.step(wait=0.0, group_size=2)
        with pytest.raises(
            p2pavg.AccumulateError, match="metric 'gossip_round' belongs to the run's topology"
        ):
            averager.accumulate([values(0)], metrics={ROUND: 1.0})
        with pytest.raises(p2pavg.AccumulateError, match="at most 15 metrics"):
            averager.accumulate([values(0)], metrics={f"metric {index}": 1.0 for index in range(16)})


async def test_a_member_that_refuses_a_stages_group_costs_the_others_no_later_stage() -> None:
    """The stage waits as long as its group may, so the second proposal comes after its end."""
    how = config(group_size=4, min_group_size=2, match_timeout=10.0)
    place = SearchPlace(place=b"p", patience=3.0)
    stages = [SearchStage(place, 3.0), SearchStage(SearchPlace(patience=10.0))]

    async def average(peer: Peer, index: int) -> RoundResult:
        async with peer.averager(how) as averager:
            await trio.sleep(0.3 * index)
            averager.accumulate([values(index, ELEMENTS)])
            await averager.step(wait=2.0, meeting=stages)
            if index == 1:
                assert averager._rounds is not None
                averager._rounds.matchmaker.ban(name(2), "a test", 600.0)
            result = await averager.step(wait=None, meeting=stages)
            took[index] = trio.current_time()
            return result

    took: dict[int, float] = {}
    began = trio.current_time()
    found = await run_peers(MemoryNetwork(latency=LAN), 3, average)
    assert isinstance(found[0], p2pavg.Success), found
    assert took[0] - began < 8.0
