"""The plan of an epoch: each sample is covered once, whoever comes and goes, and a stranger's plan costs nothing."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.data import EpochPlan, SharedSampler
from p2pavg.data.order import SampleOrder


class Swarm:
    """Peers that take samples, and updates that count them."""

    def __init__(self, length: int, peers: int) -> None:
        self.length = length
        self.counted: Counter[tuple[int, int]] = Counter()
        self.peers = {str(index): self.sampler(index) for index in range(peers)}
        self.streams = {name: iter(peer) for name, peer in self.peers.items()}
        self.number = peers

    def sampler(self, index: int) -> SharedSampler:
        return SharedSampler(self.length, peer_id=str(index), seed=7)

    def update(self, takes: dict[str, int], dies: set[str]) -> None:
        """Let each peer take samples, and some of them die before the update counts them."""
        weights = {}
        for name, count in takes.items():
            taken = [(self.peers[name].epoch, next(self.streams[name])) for _ in range(count)]
            if name not in dies:
                weights[name] = float(count)
                self.counted.update(taken)
        for name in dies:
            del self.peers[name], self.streams[name]
        for peer in self.peers.values():
            peer.took(weights)
        assert len({json.dumps(peer.saved()) for peer in self.peers.values()}) == 1

    def join(self) -> None:
        """Let a peer come, which gets the plan of another one."""
        donor = next(iter(self.peers.values()))
        found = self.sampler(self.number)
        found.load(found.plan.loaded(json.loads(json.dumps(donor.saved()))))
        self.peers[str(self.number)] = found
        self.streams[str(self.number)] = iter(found)
        self.number += 1


@given(
    seed=st.integers(0, 2**32),
    length=st.integers(100, 1000),
    peers=st.integers(1, 6),
    most=st.integers(4, 20),
)
@settings(max_examples=30, deadline=None)
def test_each_sample_of_an_epoch_is_covered_once(seed: int, length: int, peers: int, most: int) -> None:
    rng = random.Random(seed)
    swarm = Swarm(length, peers)
    while next(iter(swarm.peers.values())).plan.begun < 4:
        names = list(swarm.peers)
        dies = {rng.choice(names)} if len(names) > 1 and rng.random() < 0.2 else set()
        swarm.update({name: rng.randint(0, most) for name in names}, dies)
        if rng.random() < 0.2:
            swarm.join()
    # What the lanes still hold of the epochs before the last one is missed by no one.
    left = Counter(
        (epoch, sample)
        for piece in _pieces(swarm)
        for epoch, first, end in [piece]
        for sample in SampleOrder(length, 7).samples(epoch, first, end - first)
    )
    for epoch in range(3):
        covered = Counter(
            {sample: times for (each, sample), times in (swarm.counted + left).items() if each == epoch}
        )
        assert len(covered) == length
        # Two newcomers may meet in the epoch to come.
        assert sum(covered.values()) - length <= 2 * most


def _pieces(swarm: Swarm) -> list[tuple[int, int, int]]:
    saved = next(iter(swarm.peers.values())).saved()
    return [tuple(piece) for lane in (*saved["lanes"].values(), saved["rest"]) for piece in lane]


def test_a_peer_that_is_faster_than_its_lane_takes_from_the_epoch_to_come() -> None:
    swarm = Swarm(1000, 2)
    swarm.update({"0": 10, "1": 10}, set())
    assert swarm.peers["0"].epoch == 0
    swarm.update({"0": 100, "1": 10}, set())
    assert {epoch for epoch, _ in swarm.counted} == {0, 1}
    assert max(swarm.counted.values()) == 1


def test_what_a_dead_peer_held_is_taken_next() -> None:
    swarm = Swarm(1000, 2)
    swarm.update({"0": 10, "1": 10}, set())
    lane = swarm.peers["0"].saved()["lanes"]["1"]
    swarm.update({"0": 25, "1": 10}, {"1"})
    saved = swarm.peers["0"].saved()
    assert "1" not in saved["lanes"]
    # Peer 0's own lane has to be filled up, and begins with what the dead one has left.
    assert saved["lanes"]["0"][-len(lane) - 1 : -1] == lane or saved["lanes"]["0"][-len(lane) :] == lane


def test_a_member_that_claims_everything_uses_up_one_epoch() -> None:
    plan = EpochPlan(SampleOrder(100, 0))
    plan.took({"liar": 1e15, "honest": 3.0})
    assert plan.begun <= 6


def saved_plan() -> dict[str, Any]:
    plan = EpochPlan(SampleOrder(1000, 7))
    for _ in range(3):
        plan.took({"a": 30.0, "b": 7.0})
    return plan.saved()


@pytest.mark.parametrize(
    "change",
    [
        {"begun": -1},
        {"begun": True},
        {"begun": 1.0},
        {"length": 999},
        {"seed": 8},
        {"scheme": 2},
        {"lanes": []},
        {"lanes": {"a": 3}},
        {"lanes": {str(number): [] for number in range(1025)}},
        {"lanes": {"a": [[0, 5, 5]]}},
        {"lanes": {"a": [[0, 5, 1001]]}},
        {"lanes": {"a": [[1, 0, 5]]}},
        {"lanes": {"a": [[-1, 0, 5]]}},
        {"lanes": {"a": [[0, 0.0, 5]]}},
        {"lanes": {"a": [[0, 0]]}},
        {"lanes": {"a": [None]}},
        {"lanes": {1: []}},
        {"rest": [[0, 0, 5]] * 100_001},
        {"rest": {}},
        {"early": [[5, 9], [1, 2]]},
        {"early": [[5, 9], [8, 12]]},
        {"early": [[5]]},
        {"early": [5]},
        {"more": 1},
    ],
)
def test_a_malformed_plan_is_refused(change: dict[str, Any]) -> None:
    plan = EpochPlan(SampleOrder(1000, 7))
    assert plan.loaded(saved_plan()).saved() == saved_plan()
    with pytest.raises(ValueError, match="data: "):
        plan.loaded({**saved_plan(), **change})


@pytest.mark.parametrize("wrong", [None, 3, [], {}], ids=repr)
def test_what_is_no_plan_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="data: "):
        EpochPlan(SampleOrder(1000, 7)).loaded(wrong)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dataset_or_length": 0}, "dataset_or_length"),
        ({"dataset_or_length": 1.5}, "dataset_or_length"),
        ({"seed": 2**63}, "seed"),
        ({"peer_id": ""}, "peer_id"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SharedSampler(**{"dataset_or_length": 10, "peer_id": "a", **arguments})


def test_the_plan_stays_the_same() -> None:
    """Peers of two versions would cover other samples."""
    assert saved_plan() == {
        "scheme": 1,
        "length": 1000,
        "seed": 7,
        "begun": 1,
        "lanes": {"a": [[0, 60, 120]], "b": [[0, 134, 148]]},
        "rest": [[0, 148, 753], [0, 783, 918], [0, 925, 1000]],
        "early": [],
    }
