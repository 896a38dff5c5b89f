"""The guarantees of a round in which one elected member reduces everything: kills, stops, lies, memory, reach."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.inputs import Inputs
from p2pavg.allreduce.messages import MAX_WAITING_PARTS, Lane
from p2pavg.allreduce.sender import Sender
from p2pavg.base.result import RoundResult, Success
from p2pavg.group.candidate import Candidate
from p2pavg.group.shares import SharePart
from p2pavg.net.transport import Buffer, Stream
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.peer import Peer
from p2pavg.round import exchange
from p2pavg.testing import (
    After,
    At,
    Crash,
    Fault,
    FaultPlan,
    MemoryNetwork,
    Milestone,
    Stop,
    Throttle,
    run_peers,
    simulated_peers,
)
from tests.simulation.false_averages import lie
from tests.simulation.liars import instead, name
from tests.simulation.swarm import LAN, check_one_result, config, same_bits, values
from tests.simulation.test_behind_routers import kinds_of, relayed_bytes
from tests.simulation.test_lies import deliver, lying

SIZE = 4
FAST = 2
"""The member that announces the largest bandwidth, and is neither the leader nor the last in the roster."""
SECOND = 3
ELEMENTS = 40_000
RATES = {FAST: 1000.0, SECOND: 500.0}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 2_000)


def star(index: int, **changes: Any) -> p2pavg.AveragingConfig:
    """Return the configuration of one peer."""
    rate = changes.pop("rates", RATES).get(index, 100.0)
    how = {"group_size": SIZE, "topology": "star", "bandwidth": rate, **changes}
    return config(**how)


async def play(
    network: MemoryNetwork,
    plan: FaultPlan | None = None,
    *,
    size: int = SIZE,
    rounds: int = 1,
    elements: int = ELEMENTS,
    pause: float = 0.0,
    **changes: Any,
) -> dict[int, list[RoundResult]]:
    """Return the results of rounds of all peers that do not crash. Peers announce themselves in their order."""

    async def average(peer: Peer, index: int) -> list[RoundResult]:
        results: list[RoundResult] = []
        async with peer.averager(star(index, **{"group_size": size, **changes})) as averager:
            for _ in range(rounds):
                await trio.sleep(0.1 * index)
                averager.clear()
                averager.accumulate([values(index, elements)])
                results.append(await averager.step(wait=None))
                await trio.sleep(pause)
        return results

    return await run_peers(network, size, average, plan=plan)


def firsts(found: dict[int, list[RoundResult]]) -> dict[int, RoundResult]:
    return {index: results[0] for index, results in found.items()}


def reducer_of(found: dict[int, RoundResult]) -> int:
    """Return the member whose share is the whole vector."""
    shares = {index: result.share for index, result in found.items() if isinstance(result, Success)}
    [reducer] = [index for index, (start, stop) in shares.items() if stop > start]
    assert all(share == (0, 0) for index, share in shares.items() if index != reducer)
    return reducer


def network() -> MemoryNetwork:
    """Links on which contributions take a third of a second, and the averages two thirds more."""
    return MemoryNetwork(latency=(0.002, 0.006), bandwidth=5e5)


async def test_the_member_with_the_largest_bandwidth_reduces_everything(autojump_clock: MockClock) -> None:
    found = firsts(await play(network()))
    check_one_result(list(found.values()), ELEMENTS)
    assert reducer_of(found) == FAST
    vector = 4 * ELEMENTS
    for index, result in found.items():
        assert isinstance(result, Success)
        times = SIZE - 1 if index == FAST else 1
        assert result.bytes_sent == pytest.approx(times * vector, rel=0.02)
        assert result.bytes_received == pytest.approx(times * vector, rel=0.02)


async def test_peers_with_another_topology_never_meet_and_hear_why(autojump_clock: MockClock) -> None:
    results: dict[int, RoundResult] = {}

    async def look(peer: Peer, index: int) -> None:
        how = config(group_size=2, topology="star" if index else "butterfly")
        async with peer.averager(how) as averager:
            averager.accumulate([values(index)])
            results[index] = await averager.step(wait=None)
            await trio.sleep(10.0)

    await run_peers(MemoryNetwork(latency=LAN), 2, look)
    for index, words in enumerate(("topology star, you with butterfly", "topology butterfly, you with star")):
        result = results[index]
        assert isinstance(result, p2pavg.NoPeers)
        assert result.code is p2pavg.NoPeersCode.OTHER_SETTINGS
        assert words in result.reason


# ------------------------------------------------------------------ kills and stops


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.2, 0.4, 0.7, 1.0])
@pytest.mark.parametrize("victim", [0, 1, FAST], ids=["leader", "contributor", "reducer"])
async def test_a_member_that_crashes_costs_its_own_contribution_only(
    autojump_clock: MockClock, victim: int, seconds: float
) -> None:
    plan = FaultPlan([Fault(Crash(victim), After(Milestone.FORMED, seconds=seconds))])
    found = firsts(await play(network(), plan))
    check_one_result(list(found.values()), ELEMENTS)
    for result in found.values():
        assert isinstance(result, Success)
        p2pavg.verify_certificate(result.certificate)
        if seconds > 0.05 and name(victim) not in result.peers:
            assert name(victim) in result.lost
    if victim == FAST and all(name(FAST) not in result.peers for result in found.values()):  # type: ignore[union-attr]
        shares = [result.taken_over for index, result in found.items() if index == SECOND]  # type: ignore[union-attr]
        assert shares == [()], "a range of a first attempt"


async def test_each_attempt_after_a_loss_elects_anew(autojump_clock: MockClock) -> None:
    """The reducer is killed among the contributions, and then the one that was elected in its place."""
    faults = [
        Fault(Crash(FAST), After(Milestone.FORMED, seconds=0.2)),
        Fault(Crash(SECOND), After(Milestone.FORMED, seconds=0.4)),
    ]
    found = firsts(await play(network(), FaultPlan(faults)))
    check_one_result(list(found.values()), ELEMENTS)
    assert reducer_of(found) == min((0, 1), key=name)


async def test_the_loss_of_a_contributor_repeats_no_contribution(autojump_clock: MockClock) -> None:
    calm = firsts(await play(network()))
    plan = FaultPlan([Fault(Crash(0), After(Milestone.FORMED, of=0, seconds=0.2))])
    found = firsts(await play(network(), plan))
    check_one_result(list(found.values()), ELEMENTS)
    for index, result in found.items():
        before = calm[index]
        assert isinstance(result, Success)
        assert isinstance(before, Success)
        assert name(0) not in result.peers
        if index != FAST:
            assert result.bytes_sent < 1.4 * before.bytes_sent


async def test_the_loss_of_the_reducer_costs_one_more_exchange(autojump_clock: MockClock) -> None:
    """The contributions went with it. Nothing is lost, and nothing counts twice."""
    calm = firsts(await play(network()))
    plan = FaultPlan([Fault(Crash(FAST), After(Milestone.FORMED, seconds=0.2))])
    found = firsts(await play(network(), plan))
    check_one_result(list(found.values()), ELEMENTS)
    assert reducer_of(found) == SECOND
    took, took_calm = (
        max(result.exchange_duration for result in each.values() if isinstance(result, Success))
        for each in (found, calm)
    )
    assert took < 0.2 + 2.0 * took_calm + 0.5


@pytest.mark.parametrize("stopped", [0, FAST], ids=["leader", "reducer"])
async def test_a_silent_member_is_dropped_and_learns_it_later(
    autojump_clock: MockClock, stopped: int
) -> None:
    plan = FaultPlan([Fault(Stop(stopped, seconds=20.0), After(Milestone.FORMED, seconds=0.1))])
    found = firsts(await play(network(), plan, exchange_timeout=60.0))
    back = found.pop(stopped)
    assert isinstance(back, p2pavg.Failed)
    assert back.contribution_used is False
    assert back.code is p2pavg.FailedCode.LEFT_OUT
    check_one_result(list(found.values()), ELEMENTS)
    assert all(isinstance(result, Success) and result.exchange_duration < 8.0 for result in found.values())


# ------------------------------------------------------------------ slow members and lies about bandwidth


LARGE = 200_000


@pytest.fixture
def larger_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a part take a second on a slow link, so that votes are not late."""
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 10_000)


@pytest.mark.parametrize("leads", [False, True], ids=["follows", "leads"])
@pytest.mark.usefixtures("larger_parts")
async def test_a_reducer_that_is_slower_than_it_announced_costs_half_of_the_time(
    autojump_clock: MockClock, leads: bool
) -> None:
    liar = 0 if leads else FAST
    plan = FaultPlan([Fault(Throttle(liar, bandwidth=4e4), At(0.0))])
    rates = {liar: 1e5, SECOND: 500.0}
    found = firsts(await play(network(), plan, elements=LARGE, rates=rates, exchange_timeout=20.0))
    slow = found.pop(liar)
    assert isinstance(slow, p2pavg.Failed)
    assert slow.contribution_used is not True
    check_one_result(list(found.values()), LARGE)
    assert reducer_of(found) == SECOND
    for result in found.values():
        assert isinstance(result, Success)
        assert 10.0 <= result.exchange_duration < 20.0


@pytest.mark.usefixtures("larger_parts")
async def test_a_reducer_that_was_too_slow_twice_is_not_met_for_a_while(autojump_clock: MockClock) -> None:
    plan = FaultPlan([Fault(Throttle(FAST, bandwidth=4e4), At(0.0))])
    how: dict[str, Any] = {"rounds": 3, "elements": LARGE, "exchange_timeout": 20.0, "match_timeout": 3.0}
    found = await play(network(), plan, **how)
    del found[FAST]
    for number, took in enumerate((20.0, 20.0, 9.0)):
        results = [results[number] for results in found.values()]
        check_one_result(results, LARGE)
        assert all(isinstance(result, Success) and result.exchange_duration < took for result in results)
    assert all(isinstance(result, Success) and name(FAST) not in result.lost for result in results)


@pytest.mark.parametrize("slow", [1, SECOND], ids=["before the reducer", "after it"])
@pytest.mark.usefixtures("larger_parts")
async def test_a_slow_contributor_is_left_behind_and_not_the_reducer(
    autojump_clock: MockClock, slow: int
) -> None:
    """Its contribution would take 20 s, and the leader sees nothing of it."""
    plan = FaultPlan([Fault(Throttle(slow, bandwidth=4e4), At(0.0))])
    found = firsts(await play(network(), plan, elements=LARGE, exchange_timeout=20.0))
    behind = found.pop(slow)
    assert isinstance(behind, p2pavg.Failed)
    check_one_result(list(found.values()), LARGE)
    assert reducer_of(found) == FAST
    for result in found.values():
        assert isinstance(result, Success)
        assert result.lost.keys() == {name(slow)}
        assert result.exchange_duration < 16.0


@pytest.mark.parametrize("stalls", [1, SECOND], ids=["before the reducer", "after it"])
async def test_a_contributor_that_sends_nothing_costs_itself_only(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, stalls: int
) -> None:
    """It votes and takes the averages. Only the reducer sees that its contribution does not come."""
    send_to = Sender.send_to

    async def send_nothing(self: Sender, member: Candidate) -> None:
        if self._plan.me != name(stalls):
            await send_to(self, member)

    monkeypatch.setattr(Sender, "send_to", send_nothing)
    found = firsts(await play(network(), exchange_timeout=60.0))
    assert isinstance(found.pop(stalls), p2pavg.Failed)
    check_one_result(list(found.values()), ELEMENTS)
    assert reducer_of(found) == FAST
    for result in found.values():
        assert isinstance(result, Success)
        assert "sent no part of its contribution" in result.lost[name(stalls)]
        assert result.lost.keys() == {name(stalls)}


@pytest.mark.parametrize("when", ["after", "before"])
async def test_a_reducer_that_lies_is_found_and_excluded(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    lie(monkeypatch, FAST)
    found = await play(network(), rounds=2, pause=1.0, elements=2_000, audit=f"{when}:1.0")
    honest = [index for index in range(SIZE) if index != FAST]
    for index in honest:
        first, second = found[index]
        assert isinstance(first, Success)
        assert isinstance(second, Success)
        assert (name(FAST) in first.peers) == (when == "after")
        assert name(FAST) not in second.peers
    check_one_result([found[index][1] for index in honest], 2_000)


async def test_a_reducer_that_sends_different_averages_is_left_out(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def another(stream: Stream, part: SharePart, payload: bytes) -> None:
        """Send the leader another first number than the rest."""
        await deliver(stream, part, bytes(4) + payload[4:] if stream.remote == name(0) else payload)

    instead(monkeypatch, "Attempt", FAST, lying(Lane.AVERAGES, another))
    found = firsts(await play(network()))
    assert isinstance(found.pop(FAST), p2pavg.Failed)
    check_one_result(list(found.values()), ELEMENTS)
    for result in found.values():
        assert isinstance(result, Success)
        assert "signed both" in result.lost[name(FAST)]


async def test_a_member_that_names_averages_that_were_not_signed_is_left_out_and_the_reducer_stays(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = exchange.Exchange._completed

    def other(self: exchange.Exchange, attempt: Attempt, digests: tuple[bytes, ...]) -> None:
        if attempt.number == 0 and self._context.transport.peer_id == name(1):
            at = attempt.roster.position(name(FAST))
            digests = (*digests[:at], bytes(32), *digests[at + 1 :])
        completed(self, attempt, digests)

    monkeypatch.setattr(exchange.Exchange, "_completed", other)
    found = firsts(await play(network()))
    assert isinstance(found.pop(1), p2pavg.Failed)
    check_one_result(list(found.values()), ELEMENTS)
    assert reducer_of(found) == FAST
    assert all(name(1) in result.lost for result in found.values() if isinstance(result, Success))


# ------------------------------------------------------------------ rules and codecs


@pytest.mark.parametrize(
    ("compression", "robust"),
    [
        (None, "median"),
        ("int8:64", "trimmed_mean:0.25"),
        ("blockwise8:64", "centered_clip:1.0:3"),
        ("blockwise8", None),
        ("topk:64:8", None),
    ],
)
async def test_members_hold_the_same_bits_with_every_rule_and_codec_and_no_audit_complains(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, compression: str | None, robust: str | None
) -> None:
    caplog.set_level(logging.INFO, "p2pavg.round")
    how: dict[str, Any] = {
        "compression": compression,
        "robust": robust,
        "max_norm": 2.0,
        "audit": "before:1.0",
    }
    found = await play(network(), rounds=2, elements=9_001, **how)
    for number in range(2):
        results = [results[number] for results in found.values()]
        assert same_bits([result for result in results if isinstance(result, Success)])
        assert all(isinstance(result, Success) and len(result.peers) == SIZE for result in results), results
    assert "audit" not in caplog.text


@pytest.mark.parametrize("compression", [None, "topk:64:8"])
async def test_a_kill_among_the_contributions_leaves_an_average_that_audits_pass(
    autojump_clock: MockClock, compression: str | None
) -> None:
    when = 0.15 if compression is None else 0.02
    plan = FaultPlan([Fault(Crash(1), After(Milestone.FORMED, seconds=when))])
    found = firsts(await play(network(), plan, compression=compression, audit="before:1.0"))
    assert all(isinstance(result, Success) for result in found.values()), found
    assert same_bits([result for result in found.values() if isinstance(result, Success)])


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("audit", ["off", "after"])
async def test_memory_of_the_reducer(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, audit: str
) -> None:
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
    found = firsts(await play(network(), audit=audit))
    check_one_result(list(found.values()), ELEMENTS)
    assert max(most.values()) <= MAX_WAITING_PARTS + 1
    assert max(held) == (0 if audit == "off" else (SIZE - 1) * 4 * ELEMENTS)


# ------------------------------------------------------------------ observers, auxiliaries, relayed members


async def test_an_observer_may_be_the_reducer(autojump_clock: MockClock) -> None:
    results: dict[int, RoundResult] = {}

    async def average(peer: Peer, index: int) -> None:
        async with peer.averager(star(index)) as averager:
            await trio.sleep(0.1 * index)
            averager.declare([values(index, ELEMENTS)])
            if index != FAST:
                averager.accumulate([values(index, ELEMENTS)])
            results[index] = await averager.step(wait=None, observe=index == FAST)

    await run_peers(network(), SIZE, average)
    check_one_result(list(results.values()), ELEMENTS)
    assert reducer_of(results) == FAST
    for result in results.values():
        assert isinstance(result, Success)
        assert result.observers == (name(FAST),)


async def test_an_auxiliary_may_be_the_reducer(autojump_clock: MockClock) -> None:
    """So a machine without a model can serve a run as its parameter server. Members go on without it when it dies."""
    results: dict[int, list[RoundResult]] = {index: [] for index in range(3)}
    served = trio.Event()

    async def average(peer: Peer, index: int) -> None:
        async with peer.averager(star(index, group_size=3, rates={})) as averager:
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
    helped = [each for each in rounds if isinstance(each[0], Success) and each[0].auxiliaries]
    assert helped
    for each in helped:
        assert all(isinstance(result, Success) and result.share == (0, 0) for result in each)
    for each in rounds:
        check_one_result(each, ELEMENTS)
    last = rounds[-1]
    assert all(isinstance(result, Success) and not result.auxiliaries for result in last)


async def test_a_member_that_all_reach_is_elected_before_relayed_ones(autojump_clock: MockClock) -> None:
    net = MemoryNetwork(latency=LAN, bandwidth=12.5e6)
    letters = "dprr"
    rates = {1: 200.0, 2: 1000.0, 3: 1000.0}
    results: dict[int, RoundResult] = {}

    async def average(peer: Peer, index: int) -> None:
        async with peer.averager(star(index, rates=rates)) as averager:
            averager.accumulate([values(index, ELEMENTS)])
            results[index] = await averager.step(wait=None)

    async with simulated_peers(net, len(letters), kinds=kinds_of(letters)) as peers:
        async with trio.open_nursery() as nursery:
            for index, peer in enumerate(peers):
                nursery.start_soon(average, peer, index)
        assert relayed_bytes(net, peers) < 2 * ELEMENTS, "votes, and not one vector of four bytes an element"
    check_one_result(list(results.values()), ELEMENTS)
    assert reducer_of(results) == 0


async def test_relayed_members_alone_elect_one_of_them(autojump_clock: MockClock) -> None:
    net = MemoryNetwork(latency=LAN, bandwidth=12.5e6)
    results: list[RoundResult] = []

    async def average(peer: Peer, index: int) -> None:
        async with peer.averager(star(index, group_size=3)) as averager:
            averager.accumulate([values(index, ELEMENTS)])
            results.append(await averager.step(wait=None))

    async with simulated_peers(net, 4, kinds=kinds_of("drrr")) as (_, *peers), trio.open_nursery() as nursery:
        for index, peer in enumerate(peers, start=1):
            nursery.start_soon(average, peer, index)
    check_one_result(results, ELEMENTS)
