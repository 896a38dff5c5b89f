"""The plan of an epoch: each sample is covered once while peers come and go, and a stranger's plan costs nothing."""

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
from p2pavg.data.plan import KEPT_UPDATES


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
        for name, peer in self.peers.items():
            peer.stepped(takes.get(name, 0))
            peer.took(weights, 0.0)
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


def test_what_a_dead_peer_held_is_given_to_others_after_some_updates() -> None:
    swarm = Swarm(1000, 2)
    swarm.update({"0": 10, "1": 10}, set())
    lane = swarm.peers["0"].saved()["lanes"]["1"]
    swarm.update({"0": 10, "1": 10}, {"1"})
    for _ in range(KEPT_UPDATES):
        assert swarm.peers["0"].saved()["lanes"]["1"] == lane
        swarm.update({"0": 1}, set())
    saved = swarm.peers["0"].saved()
    assert "1" not in saved["lanes"]
    assert saved["rest"][: len(lane)] == lane


def test_a_peer_that_misses_an_update_goes_on_in_its_lane() -> None:
    swarm = Swarm(1000, 2)
    swarm.update({"0": 10, "1": 10}, set())
    late = swarm.peers["1"]
    held = [next(swarm.streams["1"]) for _ in range(10)]
    late.stepped(10)
    swarm.peers["0"].took({"0": 10.0}, 0.0)
    late.took({"0": 10.0}, 10.0)  # its batch stays accumulated
    more = [next(swarm.streams["1"]) for _ in range(10)]
    late.stepped(10)
    for peer in swarm.peers.values():
        peer.took({"1": 20.0}, 0.0)
    assert not set(held) & set(more)
    first, end = swarm.peers["0"].saved()["lanes"]["1"][0][1:]
    assert not set(SampleOrder(1000, 7).samples(0, first, end - first)) & {*held, *more}


@pytest.mark.parametrize("ahead", [0, 8, 16])
def test_a_loader_may_fetch_ahead(ahead: int) -> None:
    """Each peer contributes 8 samples to an update, and its loader holds some more."""
    length, names = 1000, "abcd"
    peers = {name: SharedSampler(length, peer_id=name, seed=7) for name in names}
    streams = {name: iter(peer) for name, peer in peers.items()}
    held: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    counted: Counter[tuple[int, int]] = Counter()
    while peers["a"].plan.begun < 5:
        for name, peer in peers.items():
            while len(held[name]) < ahead + 8:
                held[name].append((peer.epoch, next(streams[name])))
            counted.update(held[name][:8])
            del held[name][:8]
            peer.stepped(8)
        for peer in peers.values():
            peer.took(dict.fromkeys(names, 8.0), 0.0)
    for epoch in (1, 2):  # in the first one, all begin where they like
        taken = {sample: times for (at, sample), times in counted.items() if at == epoch}
        assert len(taken) == length
        assert sum(taken.values()) == length


def test_a_loader_that_holds_more_than_a_lane_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    swarm = Swarm(10_000, 2)
    for _ in range(3):
        for _ in range(100):
            next(swarm.streams["0"])
        swarm.update({"0": 1, "1": 1}, set())
    assert "the data loader holds" in caplog.text
    assert caplog.text.count("the data loader holds") == 1


def test_two_iterations_of_one_sampler_repeat_nothing() -> None:
    sampler = SharedSampler(1000, peer_id="a", seed=7)
    first = iter(sampler)
    one = [next(first) for _ in range(5)]
    sampler.stepped(5)
    second = iter(sampler)
    two = [next(second) for _ in range(5)]
    assert not set(one) & set(two)
    assert not {next(first)} & {*one, *two}


def test_a_member_that_claims_everything_uses_up_one_epoch() -> None:
    plan = EpochPlan(SampleOrder(100, 0))
    plan.took({"liar": 1e15, "honest": 3.0})
    assert plan.begun <= 6


def saved_plan() -> dict[str, Any]:
    plan = EpochPlan(SampleOrder(1000, 7))
    for _ in range(3):
        plan.took({"a": 30.0, "b": 7.0})
    return plan.saved()


WRONG: dict[str, list[Any]] = {
    "begun": [-1, True, 2**40 + 1, 1.0],
    "length": [999],
    "seed": [8],
    "scheme": [2],
    "lanes": [
        *([], {"a": 3}, {str(number): [] for number in range(1025)}, {1: []}),
        *(
            {"a": [piece]}
            for piece in ([0, 5, 5], [0, 5, 1001], [1, 0, 5], [-1, 0, 5], [0, 0.0, 5], [0, 0], None)
        ),
    ],
    "rest": [[[0, 0, 5]] * 10_001, {}],
    "absent": [{"c": 1}, {"a": 4}, []],
    "early": [[[5, 9], [1, 2]], [[5, 9], [8, 12]], [[5]], [5]],
    "\x1b[2J": [1],
}


@pytest.mark.parametrize(
    "change",
    [{name: value} for name, values in WRONG.items() for value in values],
    ids=lambda each: repr(each)[:40],
)
def test_a_malformed_plan_is_refused(change: dict[str, Any]) -> None:
    plan = EpochPlan(SampleOrder(1000, 7))
    assert plan.loaded(saved_plan()).saved() == saved_plan()
    with pytest.raises(ValueError, match="data: ") as caught:
        plan.loaded({**saved_plan(), **change})
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 3, [], {}], ids=repr)
def test_what_is_no_plan_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="data: "):
        EpochPlan(SampleOrder(1000, 7)).loaded(wrong)


@pytest.mark.parametrize("wrong", [{"dataset_or_length": 0}, {"seed": 2**63}, {"peer_id": ""}], ids=repr)
def test_arguments_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SharedSampler(**{"dataset_or_length": 10, "peer_id": "a", **wrong})


def test_the_plan_stays_the_same() -> None:
    """Peers of two versions would cover other samples."""
    assert saved_plan() == {
        "scheme": 1,
        "length": 1000,
        "seed": 7,
        "begun": 1,
        "lanes": {"a": [[0, 60, 180]], "b": [[0, 194, 222]]},
        "absent": {},
        "rest": [[0, 222, 753], [0, 783, 918], [0, 925, 1000]],
        "early": [],
    }
