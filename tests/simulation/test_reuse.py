"""A member that is lost in the middle of an exchange: the others send only what has not come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import p2pavg
from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.carry import ResumeState
from p2pavg.allreduce.context import AttemptPlan
from p2pavg.allreduce.messages import Lane, LaneHeader
from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.group.milestones import Milestone
from p2pavg.testing import MemoryNetwork
from p2pavg.testing.faults import After, Crash, Fault
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import config, ids, mean, play_round, same_bits, successes, tensors_of

ELEMENTS = 600_000
SIZE = 6
RATE = 600_000.0
"""Bytes per second that each member sends. A round of fp32 takes about 6.7 s, half of it for contributions."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 20_000)


def name(index: int) -> str:
    return simulated_signer(index).peer_id


async def play(faults: list[tuple[int, float]], **changes: Any) -> dict[int, p2pavg.RoundResult]:
    """Return the survivors' results of a round in which members crash some seconds after it has begun."""
    hows = [config(group_size=SIZE, exchange_timeout=60.0, **changes)] * SIZE
    network = MemoryNetwork(latency=(0.01, 0.02), bandwidth=RATE)
    crashes = [Fault(Crash(who), After(Milestone.FORMED, seconds=when)) for who, when in faults]
    results = await play_round(hows, network, crashes, elements=ELEMENTS)
    return {index: result for index, result in results.items() if index not in dict(faults)}


def check(results: dict[int, p2pavg.RoundResult], members: list[int]) -> list[p2pavg.Success]:
    found = successes(results)
    assert len(found) == len(members)
    assert same_bits(found)
    for success in found:
        assert set(success.peers) == ids(*members)
        p2pavg.verify_certificate(success.certificate)
    torch.testing.assert_close(tensors_of(found[0])[0], mean(members, ELEMENTS).float(), rtol=1e-4, atol=1e-5)
    return found


async def seconds(faults: list[tuple[int, float]], members: list[int], **changes: Any) -> float:
    return max(one.exchange_duration for one in check(await play(faults, **changes), members))


async def test_a_kill_costs_little_time() -> None:
    """Among the contributions it costs a moment; among the averages, no contribution is sent again."""
    calm = await seconds([], list(range(SIZE)))
    for crashes, factor in (([(3, 1.0), (5, 2.2)], 1.3), ([(3, 0.75 * calm)], 1.45)):
        left = [index for index in range(SIZE) if index not in dict(crashes)]
        assert await seconds(crashes, left) < factor * calm


async def test_without_audits_the_next_attempt_repeats_everything() -> None:
    """Its reducers keep nothing; the result is right all the same."""
    calm = await seconds([], list(range(SIZE)), audit="off")
    assert await seconds([(3, 2.5)], [0, 1, 2, 4, 5], audit="off") > calm + 2.0


@pytest.mark.parametrize(("compression", "robust"), [(None, "median"), ("blockwise8", None)])
async def test_an_audit_finds_nothing_wrong_with_what_was_kept(
    monkeypatch: pytest.MonkeyPatch, compression: str | None, robust: str | None
) -> None:
    when = 2.0 if compression is None else 0.6
    how: dict[str, Any] = {"compression": compression, "robust": robust, "audit": "before:1.0"}
    found = successes(await play([(3, when)], **how))
    assert same_bits(found)
    assert all(set(one.lost) == {name(3)} for one in found)
    assert any(one.taken_over for one in found)


def lying(monkeypatch: pytest.MonkeyPatch, liar: int, lie: Any) -> list[ResumeMark]:
    """Let one member go on at a place of its own in the contributions of later attempts."""
    seen: list[ResumeMark] = []
    header = AttemptPlan.header

    def false(self: AttemptPlan, lane: Lane, reducer: int = 0, begin: ResumeMark = START) -> LaneHeader:
        if self.number and lane in (Lane.PARTS, Lane.CONTRIBUTIONS):
            seen.append(begin)
            if self.me == name(liar):
                begin = lie(begin)
        return header(self, lane, reducer, begin)

    monkeypatch.setattr(AttemptPlan, "header", false)
    return seen


async def test_a_contributor_that_skips_what_has_not_come_is_excluded_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    liar = 4
    seen = lying(monkeypatch, liar, lambda begin: ResumeMark(begin.parts + 1, 0))
    results = await play([(3, 2.0)])
    honest = [index for index in (0, 1, 2, 4, 5) if index != liar]
    found = check({index: results[index] for index in honest}, honest)
    assert any(mark > START for mark in seen)
    for one in found:
        assert "it broke the protocol" in one.lost[name(liar)]


async def test_a_reducer_that_claims_what_has_not_come_splits_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lacks the rest. It may take a contributor's place with it: one word decides who sent damage."""
    mark = ResumeState.mark

    def false(self: ResumeState, contributor: str) -> ResumeMark:
        found = mark(self, contributor)
        return ResumeMark(2**31 - 1, 2**31 - 1) if self._ledger.me == name(4) else found

    monkeypatch.setattr(ResumeState, "mark", false)
    results = await play([(3, 1.0)])
    assert same_bits(successes({index: results[index] for index in (0, 1, 2, 5)}))


async def test_an_attempt_that_ended_keeps_nothing_of_a_vectors_size(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Attempt] = []
    init = Attempt.__init__

    def note(self: Attempt, **given: Any) -> None:
        init(self, **given)
        begun.append(self)

    monkeypatch.setattr(Attempt, "__init__", note)
    check(await play([(3, 2.0)]), [0, 1, 2, 4, 5])
    assert any(attempt.number for attempt in begun)
    for attempt in begun:
        if not attempt.number and attempt.plan.me != name(3):
            assert attempt.values.averages.values.numel() == 0
            assert not attempt.values._inputs._waiting
