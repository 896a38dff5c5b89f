"""The guarantees of a round in which one elected member reduces everything: kills, stops, lies, memory, reach."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import trio

import p2pavg
from p2pavg.allreduce.carry import Inputs
from p2pavg.allreduce.messages import MAX_WAITING_PARTS
from p2pavg.allreduce.sender import Sender
from p2pavg.base.result import RoundResult, Success
from p2pavg.group.candidate import Candidate
from p2pavg.net.transport import Buffer
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.peer import Peer
from p2pavg.testing import After, At, Crash, Fault, MemoryNetwork, Milestone, Throttle, simulated_peers
from tests.simulation.false_averages import lie
from tests.simulation.liars import name
from tests.simulation.swarm import (
    LAN,
    check_one_result,
    config,
    play_round,
    play_rounds,
    same_bits,
    successes,
    values,
)
from tests.simulation.test_behind_routers import kinds_of, relayed_bytes

SIZE = 4
FAST = 2
"""The member that announces the largest bandwidth, and is neither the leader nor the last in the roster."""
SECOND = 3
ELEMENTS = 40_000
RATES = (100.0, 100.0, 1000.0, 500.0)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 2_000)


def star(*rates: float, **changes: Any) -> list[p2pavg.AveragingConfig]:
    """Return the configurations of peers that announce these bandwidths, or the usual ones."""
    how = {"group_size": len(rates or RATES), "topology": "star", **changes}
    return [config(bandwidth=rate, **how) for rate in rates or RATES]


async def play(*faults: Fault, **changes: Any) -> dict[int, RoundResult]:
    """Return the results of one round of all peers that do not crash."""
    return await play_round(star(**changes), network(), faults, elements=ELEMENTS)


def reducer_of(found: Mapping[int, RoundResult]) -> int:
    """Return the member whose share is the whole vector."""
    shares = {index: result.share for index, result in found.items() if isinstance(result, Success)}
    [reducer] = [index for index, (start, stop) in shares.items() if stop > start]
    assert all(share == (0, 0) for index, share in shares.items() if index != reducer)
    return reducer


def network() -> MemoryNetwork:
    """Links on which contributions take a third of a second, and the averages two thirds more."""
    return MemoryNetwork(latency=(0.002, 0.006), bandwidth=5e5)


async def test_the_member_with_the_largest_bandwidth_reduces_everything() -> None:
    found = await play()
    check_one_result(found.values(), ELEMENTS)
    assert reducer_of(found) == FAST
    vector = 4 * ELEMENTS
    for index, result in found.items():
        assert isinstance(result, Success)
        times = SIZE - 1 if index == FAST else 1
        assert result.bytes_sent == pytest.approx(times * vector, rel=0.02)
        assert result.bytes_received == pytest.approx(times * vector, rel=0.02)


# ------------------------------------------------------------------ kills and stops


async def test_each_attempt_after_a_loss_elects_anew() -> None:
    """The reducer is killed among the contributions, and then the one that was elected in its place."""
    faults = [
        Fault(Crash(FAST), After(Milestone.FORMED, seconds=0.2)),
        Fault(Crash(SECOND), After(Milestone.FORMED, seconds=0.4)),
    ]
    found = await play(*faults)
    check_one_result(found.values(), ELEMENTS)
    assert reducer_of(found) == min((0, 1), key=name)


async def test_the_loss_of_a_contributor_repeats_no_contribution() -> None:
    calm = await play()
    fault = Fault(Crash(0), After(Milestone.FORMED, of=0, seconds=0.2))
    found = await play(fault)
    check_one_result(found.values(), ELEMENTS)
    for index, result in found.items():
        before = calm[index]
        assert isinstance(result, Success)
        assert isinstance(before, Success)
        assert name(0) not in result.peers
        if index != FAST:
            assert result.bytes_sent < 1.4 * before.bytes_sent


# ------------------------------------------------------------------ slow members and lies about bandwidth


LARGE = 200_000


@pytest.fixture
def larger_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a part take a second on a slow link, so that votes are not late."""
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 10_000)


@pytest.mark.usefixtures("larger_parts")
async def test_a_reducer_that_is_slower_than_it_announced_costs_half_of_the_time() -> None:
    liar = 0
    throttle = Fault(Throttle(liar, bandwidth=4e4), At(0.0))
    rates = [1e5 if index == liar else 500.0 if index == SECOND else 100.0 for index in range(SIZE)]
    found = await play_round(star(*rates), network(), [throttle], elements=LARGE)
    slow = found.pop(liar)
    assert isinstance(slow, p2pavg.Failed)
    assert slow.contribution_used is not True
    assert reducer_of(found) == SECOND
    for result in check_one_result(found.values(), LARGE):
        assert 10.0 <= result.exchange_duration < 20.0


@pytest.mark.usefixtures("larger_parts")
async def test_a_reducer_that_was_too_slow_twice_is_not_met_for_a_while() -> None:
    throttle = Fault(Throttle(FAST, bandwidth=4e4), At(0.0))
    found = await play_rounds(star(match_timeout=3.0), network(), [throttle], rounds=3, elements=LARGE)
    del found[FAST]
    for number, took in enumerate((20.0, 20.0, 9.0)):
        results = check_one_result([results[number] for results in found.values()], LARGE)
        assert all(result.exchange_duration < took for result in results)
    assert all(name(FAST) not in result.lost for result in results)


async def test_a_contributor_that_sends_nothing_costs_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It votes and takes the averages. Only the reducer sees that its contribution does not come."""
    stalls, send_to = 1, Sender.send_to

    async def send_nothing(self: Sender, member: Candidate) -> None:
        if self._plan.me != name(stalls):
            await send_to(self, member)

    monkeypatch.setattr(Sender, "send_to", send_nothing)
    found = await play(exchange_timeout=60.0)
    assert isinstance(found.pop(stalls), p2pavg.Failed)
    assert reducer_of(found) == FAST
    for result in check_one_result(found.values(), ELEMENTS):
        assert "sent no part of its contribution" in result.lost[name(stalls)]
        assert result.lost.keys() == {name(stalls)}


async def test_a_reducer_that_lies_is_found_and_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, FAST)
    hows = star(audit="before:1.0")
    found = await play_rounds(hows, network(), rounds=2, pause=1.0, elements=2_000)
    honest = [index for index in range(SIZE) if index != FAST]
    for index in honest:
        first, second = found[index]
        assert isinstance(first, Success)
        assert isinstance(second, Success)
        assert name(FAST) not in first.peers
        assert name(FAST) not in second.peers
    check_one_result([found[index][1] for index in honest], 2_000)


# ------------------------------------------------------------------ rules and codecs


@pytest.mark.parametrize(
    ("compression", "robust"),
    [("int8:64", "trimmed_mean:0.25"), ("blockwise8:64", "centered_clip:1.0:3"), ("topk:64:8", None)],
)
async def test_members_hold_the_same_bits_with_every_rule_and_codec_and_no_audit_complains(
    caplog: pytest.LogCaptureFixture, compression: str | None, robust: str | None
) -> None:
    caplog.set_level(logging.INFO, "p2pavg.round")
    hows = star(compression=compression, robust=robust, max_norm=2.0, audit="before:1.0")
    found = await play_rounds(hows, network(), rounds=2, elements=9_001)
    for number in range(2):
        results = successes({index: results[number] for index, results in found.items()})
        assert same_bits(results)
        assert all(len(result.peers) == SIZE for result in results)
    assert "audit" not in caplog.text


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("audit", ["off", "after"])
async def test_memory_of_the_reducer(monkeypatch: pytest.MonkeyPatch, audit: str) -> None:
    """With audits it keeps what came, encoded, for its auditors. Without them it holds one average and few parts."""
    most: Counter[str] = Counter()
    held: list[int] = []
    take, averaged = Inputs.take, Inputs.averaged

    def note(self: Inputs, contributor: str, index: int, payload: Buffer) -> None:
        take(self, contributor, index, payload)
        most[contributor] = max(most[contributor], sum(contributor in parts for parts in self._waiting))

    def count(self: Inputs, index: int) -> None:
        averaged(self, index)
        kept = sum(len(memoryview(each)) for parts in self._averaged for each in parts.values())
        held.append(kept)

    monkeypatch.setattr(Inputs, "take", note)
    monkeypatch.setattr(Inputs, "averaged", count)
    found = await play(audit=audit)
    check_one_result(found.values(), ELEMENTS)
    assert max(most.values()) <= MAX_WAITING_PARTS + 1
    assert max(held) == (0 if audit == "off" else (SIZE - 1) * 4 * ELEMENTS)


# ------------------------------------------------------------------ observers, auxiliaries, relayed members


async def test_an_observer_may_be_the_reducer() -> None:
    found = await play_round(star(), network(), elements=ELEMENTS, observers=[FAST])
    assert all(result.observers == (name(FAST),) for result in check_one_result(found.values(), ELEMENTS))
    assert reducer_of(found) == FAST


async def test_an_auxiliary_may_be_the_reducer() -> None:
    """So a machine without a model can serve a run as its parameter server. Members go on without it when it dies."""
    results: dict[int, list[RoundResult]] = {index: [] for index in range(3)}
    served, hows = trio.Event(), star(100.0, 100.0, 100.0)

    async def average(peer: Peer, index: int) -> None:
        async with peer.averager(hows[index]) as averager:
            for number in range(6):
                averager.accumulate([values(index, ELEMENTS)])
                results[index].append(await averager.step(wait=None))
                if number == 3:
                    served.set()
                await trio.sleep(10.0)

    async with simulated_peers(network(), 4) as (*workers, helper), trio.open_nursery() as outer:
        scope = trio.CancelScope()

        async def help_until_served() -> None:
            with scope:
                await assist(helper, "sim", bandwidth=1000.0)

        outer.start_soon(help_until_served)
        async with trio.open_nursery() as nursery:
            for index, peer in enumerate(workers):
                nursery.start_soon(partial(average, peer, index))
            await served.wait()
            scope.cancel()
        outer.cancel_scope.cancel()
    rounds = list(zip(*results.values(), strict=True))
    checked = [check_one_result(each, ELEMENTS) for each in rounds]
    helped = [each for each in checked if each[0].auxiliaries]
    assert helped
    assert all(result.share == (0, 0) for each in helped for result in each)
    assert not any(result.auxiliaries for result in checked[-1])


@pytest.mark.parametrize(
    ("letters", "first"),
    [("dprr", 0), ("drrr", 1)],
    ids=["a member that all reach is elected", "relayed members elect one of them"],
)
async def test_relayed_members(letters: str, first: int) -> None:
    """The first peer of the second group only is their relay."""
    net = MemoryNetwork(latency=LAN, bandwidth=12.5e6)
    hows = star(100.0, 200.0, 1000.0, 1000.0, group_size=len(letters) - first)
    results: dict[int, RoundResult] = {}

    async def average(peer: Peer, index: int) -> None:
        async with peer.averager(hows[index]) as averager:
            averager.accumulate([values(index, ELEMENTS)])
            results[index] = await averager.step(wait=None)

    async with simulated_peers(net, len(letters), kinds=kinds_of(letters)) as peers:
        async with trio.open_nursery() as nursery:
            for index, peer in enumerate(peers):
                if index >= first:
                    nursery.start_soon(average, peer, index)
        relayed = relayed_bytes(net, peers)
    check_one_result(results.values(), ELEMENTS)
    assert len(results) == len(letters) - first
    if not first:
        assert relayed < 2 * ELEMENTS, "votes, and not one vector of four bytes an element"
        assert reducer_of(results) == 0
