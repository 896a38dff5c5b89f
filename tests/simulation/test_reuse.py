"""A member that is lost in the middle of an exchange: the others send only what has not come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.carry import ResumeState
from p2pavg.allreduce.context import AttemptPlan
from p2pavg.allreduce.messages import Lane, LaneHeader
from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.group.milestones import Milestone
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, run_peers
from p2pavg.testing.faults import After, Crash, Fault, FaultPlan
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import config, mean, same_bits, tensors_of, values

ELEMENTS = 600_000
SIZE = 6
RATE = 600_000.0
"""Bytes per second that each member sends. A round of fp32 takes about 6.7 s, half of it for contributions."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 20_000)


def name(index: int) -> str:
    return simulated_signer(index).peer_id


async def play(
    faults: list[tuple[int, float]], *, size: int = SIZE, **changes: Any
) -> dict[int, p2pavg.RoundResult]:
    """Return the survivors' results of a round in which members crash some seconds after it has begun."""
    how = config(group_size=size, min_group_size=2, exchange_timeout=60.0, **changes)
    network = MemoryNetwork(latency=(0.01, 0.02), bandwidth=RATE)

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(how) as averager:
            await trio.sleep(0.1 * index)
            averager.accumulate([values(index, ELEMENTS)])
            return await averager.step(wait=None)

    plan = FaultPlan([Fault(Crash(who), After(Milestone.FORMED, seconds=when)) for who, when in faults])
    results = await run_peers(network, size, average, plan=plan)
    return {index: result for index, result in results.items() if index not in dict(faults)}


def check(results: dict[int, p2pavg.RoundResult], members: list[int]) -> list[p2pavg.Success]:
    found = [result for result in results.values() if isinstance(result, p2pavg.Success)]
    assert len(found) == len(results) == len(members), results
    assert same_bits(found)
    for success in found:
        assert set(success.peers) == {name(index) for index in members}
        p2pavg.verify_certificate(success.certificate)
    torch.testing.assert_close(tensors_of(found[0])[0], mean(members, ELEMENTS).float(), rtol=1e-4, atol=1e-5)
    return found


async def seconds(faults: list[tuple[int, float]], members: list[int], **changes: Any) -> float:
    return max(one.exchange_duration for one in check(await play(faults, **changes), members))


@pytest.mark.parametrize("victim", [0, 3], ids=["leader", "follower"])
@pytest.mark.parametrize("when", [0.5, 1.5, 2.5])
async def test_a_kill_among_the_contributions_costs_little_time(
    autojump_clock: MockClock, victim: int, when: float
) -> None:
    calm = await seconds([], list(range(SIZE)))
    left = [index for index in range(SIZE) if index != victim]
    assert await seconds([(victim, when)], left) < calm + 0.2 * calm


async def test_a_kill_among_the_averages_costs_no_contributions(autojump_clock: MockClock) -> None:
    calm = await seconds([], list(range(SIZE)))
    left = [0, 1, 2, 4, 5]
    assert await seconds([(3, 0.75 * calm)], left) < 0.75 * calm + 0.7 * calm


async def test_two_kills_one_after_the_other_cost_little_time(autojump_clock: MockClock) -> None:
    calm = await seconds([], list(range(SIZE)))
    assert await seconds([(3, 1.0), (5, 2.2)], [0, 1, 2, 4]) < calm + 0.3 * calm


async def test_without_audits_the_next_attempt_repeats_everything(autojump_clock: MockClock) -> None:
    """Its reducers keep nothing; the result is right all the same."""
    calm = await seconds([], list(range(SIZE)), audit="off")
    assert await seconds([(3, 2.5)], [0, 1, 2, 4, 5], audit="off") > calm + 2.0


@pytest.mark.parametrize("compression", [None, "blockwise8"])
@pytest.mark.parametrize("robust", [None, "median"])
async def test_an_audit_finds_nothing_wrong_with_what_was_kept(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, compression: str | None, robust: str | None
) -> None:
    when = 2.0 if compression is None else 0.6
    how: dict[str, Any] = {"compression": compression, "robust": robust, "audit": "before:1.0"}
    results = await play([(3, when)], **how)
    assert all(isinstance(result, p2pavg.Success) for result in results.values()), results
    found = [result for result in results.values() if isinstance(result, p2pavg.Success)]
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


@pytest.mark.parametrize("liar", [0, 4], ids=["leads", "follows"])
async def test_a_contributor_that_skips_what_has_not_come_is_excluded_by_name(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, liar: int
) -> None:
    seen = lying(monkeypatch, liar, lambda begin: ResumeMark(begin.parts + 1, 0))
    results = await play([(3, 2.0)])
    honest = [index for index in (0, 1, 2, 4, 5) if index != liar]
    found = check({index: results[index] for index in honest}, honest)
    assert any(mark > START for mark in seen)
    for one in found:
        assert "it broke the protocol" in one.lost[name(liar)]


async def test_a_reducer_that_claims_what_has_not_come_costs_itself_only(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = ResumeState.mark

    def false(self: ResumeState, contributor: str) -> ResumeMark:
        found = mark(self, contributor)
        return ResumeMark(2**31 - 1, 2**31 - 1) if self._ledger.me == name(4) else found

    monkeypatch.setattr(ResumeState, "mark", false)
    results = await play([(3, 1.0)])
    honest = [0, 1, 2, 5]
    found = [results[index] for index in honest]
    assert all(isinstance(result, p2pavg.Success) for result in found), results
    assert same_bits([result for result in found if isinstance(result, p2pavg.Success)])


async def test_an_attempt_that_ended_keeps_nothing_of_a_vectors_size(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            assert attempt.averaged.numel() == 0
            assert not attempt.values._inputs._waiting
