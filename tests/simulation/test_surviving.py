"""Loss of members during a round, with real peers on a simulated network: the others' results."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.peer.peer import Peer
from p2pavg.testing import (
    After,
    At,
    Crash,
    Fault,
    FaultPlan,
    MemoryNetwork,
    Milestone,
    Partition,
    Stop,
    Throttle,
    run_peers,
    simulated_peers,
)
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN, check_one_result, config, values


async def until_exchanging(averager: p2pavg.DecentralizedAverager) -> None:
    """Call ``step`` until the group exchanges."""
    with trio.fail_after(9.0):
        while True:
            progress = await averager.step(wait=0.0005)
            assert isinstance(progress, p2pavg.InProgress)
            if progress.reason == "the group exchanges":
                return


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06])
@pytest.mark.parametrize("victim", [0, 2], ids=["leader", "follower"])
async def test_a_member_that_crashes_costs_its_own_contribution_only(
    autojump_clock: MockClock, victim: int, seconds: float
) -> None:
    """Survivors end the same round with one result: without the victim, or with its whole contribution."""
    network = MemoryNetwork(latency=(0.002, 0.006), bandwidth=2e6)
    how = config(group_size=3, min_group_size=2)

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(how) as averager:
            await trio.sleep(0.1 * index)
            averager.accumulate([values(index, 20_000)], weight=2.0)
            result = await averager.step(wait=None)
            assert averager.weight == 0
            return result

    plan = FaultPlan([Fault(Crash(victim), After(Milestone.FORMED, seconds=seconds))])
    results = list((await run_peers(network, 3, average, plan=plan)).values())
    check_one_result(results, 20_000)
    # Three if the round was committed before the victim crashed, so that it has a result too.
    assert len(results) in (2, 3)
    lost = simulated_signer(victim).peer_id
    for result in results:
        assert isinstance(result, p2pavg.Success)
        if seconds > 0.01 and lost not in result.peers:  # otherwise the group was formed without it
            assert lost in result.lost


@pytest.mark.parametrize("stopped", [0, 2], ids=["leader", "follower"])
async def test_silent_member_is_dropped_and_learns_it_later(autojump_clock: MockClock, stopped: int) -> None:
    """The others end within seconds. When it resumes, it learns that it was dropped, and keeps its contribution."""
    network = MemoryNetwork(latency=LAN, bandwidth=1e6)
    how = config(group_size=3, exchange_timeout=60.0)
    took: dict[int, float] = {}

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(how) as averager:
            await trio.sleep(0.1 * index)
            averager.accumulate([values(index, 50_000)])
            result = await averager.step(wait=None)
            took[index] = result.exchange_duration if isinstance(result, p2pavg.Success) else 0.0
            assert averager.weight == (0 if isinstance(result, p2pavg.Success) else 1)
            return result

    plan = FaultPlan([Fault(Stop(stopped, seconds=20.0), After(Milestone.FORMED, seconds=0.05))])
    results = await run_peers(network, 3, average, plan=plan)
    back = results.pop(stopped)
    assert isinstance(back, p2pavg.Failed)
    assert back.contribution_used is False
    assert "gave this peer up" in back.reason
    assert back.code is p2pavg.FailedCode.LEFT_OUT
    check_one_result(list(results.values()), 50_000)
    assert all(isinstance(result, p2pavg.Success) and len(result.peers) == 2 for result in results.values())
    assert max(took.values()) < 5.0


async def test_no_member_is_lost_without_faults(autojump_clock: MockClock) -> None:
    """The last message of a member that has ended is read, even if it is slow."""
    network = MemoryNetwork(latency=(0.01, 0.01), bandwidth=5e4)
    how = config(group_size=5)
    lost: list[str] = []

    async def average(peer: Peer, index: int) -> None:
        async with peer.averager(how) as averager:
            for _ in range(10):
                averager.accumulate([values(index, 500)])
                result = await averager.step(wait=None)
                assert isinstance(result, p2pavg.Success), result
                lost.extend(result.lost)

    await run_peers(network, 5, average)
    assert not lost


async def test_a_slow_member_is_waited_for(autojump_clock: MockClock) -> None:
    """It has a twentieth of the others' bandwidth, so that a part takes longer than the shortest suspicious silence."""
    network = MemoryNetwork(latency=LAN, bandwidth=1e6)
    how = config(group_size=3, exchange_timeout=120.0)

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(how) as averager:
            averager.accumulate([values(index, 50_000)])
            return await averager.step(wait=None)

    plan = FaultPlan([Fault(Throttle(1, bandwidth=5e4), At(0.0))])
    results = list((await run_peers(network, 3, average, plan=plan)).values())
    check_one_result(results, 50_000)
    for result in results:
        assert isinstance(result, p2pavg.Success)
        assert len(result.peers) == 3
        assert result.exchange_duration > 3.0


async def test_member_too_slow_for_the_round_is_dropped(autojump_clock: MockClock) -> None:
    """It is never silent, but would exceed the round's time. (A leader cannot detect this of itself.)"""
    network = MemoryNetwork(latency=LAN, bandwidth=1e6)
    how = config(group_size=3, exchange_timeout=20.0)

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(how) as averager:
            await trio.sleep(0.1 * index)
            averager.accumulate([values(index, 150_000)])
            return await averager.step(wait=None)

    plan = FaultPlan([Fault(Throttle(2, bandwidth=2e4), At(0.0))])
    results = await run_peers(network, 3, average, plan=plan)
    behind = results.pop(2)
    assert isinstance(behind, p2pavg.Failed)
    check_one_result(list(results.values()), 150_000)


async def test_last_survivor_keeps_its_contribution(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=LAN, bandwidth=1e6)
    how = config(group_size=4)

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(how) as averager:
            averager.accumulate([values(index, 50_000)])
            result = await averager.step(wait=None)
            assert averager.weight == 1
            return result

    plan = FaultPlan([Fault(Crash(index), After(Milestone.FORMED, of=3, seconds=0.05)) for index in range(3)])
    [alone] = (await run_peers(network, 4, average, plan=plan)).values()
    assert isinstance(alone, p2pavg.Failed)
    assert alone.code is p2pavg.FailedCode.PEERS_LOST
    assert alone.contribution_used is False


async def test_half_of_a_group_survives_the_loss_of_the_other_half(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=LAN, bandwidth=1e6)
    how = config(group_size=4)

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(how) as averager:
            await trio.sleep(0.1 * index)
            averager.accumulate([values(index, 50_000)])
            return await averager.step(wait=None)

    plan = FaultPlan([Fault(Crash(index), After(Milestone.FORMED, of=3, seconds=0.05)) for index in range(2)])
    results = list((await run_peers(network, 4, average, plan=plan)).values())
    check_one_result(results, 50_000)
    assert [len(result.peers) for result in results if isinstance(result, p2pavg.Success)] == [2, 2]


async def test_one_of_two_separated_halves_continues_and_the_other_learns_it(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork(latency=LAN, bandwidth=1e6)
    how = config(group_size=4, exchange_timeout=60.0)

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(how) as averager:
            await trio.sleep(0.1 * index)
            averager.accumulate([values(index, 50_000)])
            result = await averager.step(wait=None)
            assert averager.weight == (0 if isinstance(result, p2pavg.Success) else 1)
            return result

    plan = FaultPlan([Fault(Partition((2, 3), seconds=15.0), After(Milestone.FORMED, of=0, seconds=0.05))])
    results = await run_peers(network, 4, average, plan=plan)
    check_one_result([results[0], results[1]], 50_000)
    for index in (2, 3):
        assert isinstance(results[index], p2pavg.Failed), results[index]


def test_member_lost_at_any_part_breaks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member crashes among many small parts: survivors succeed, and nothing is raised."""
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 64)
    how = config(group_size=4, min_group_size=3, exchange_timeout=5.0)

    async def main(seed: int) -> None:
        network = MemoryNetwork(seed=seed, latency=(0.0005, 0.002), bandwidth=2e5)
        results: list[p2pavg.RoundResult] = []

        async def survive(peer: Peer, index: int) -> None:
            async with peer.averager(how) as averager:
                averager.accumulate([values(index)])
                results.append(await averager.step(wait=None))
                assert averager.weight == (0 if isinstance(results[-1], p2pavg.Success) else 1)

        async def die(peer: Peer) -> None:
            with trio.CancelScope() as scope:
                async with peer.averager(how) as averager:
                    averager.accumulate([values(0)])
                    await until_exchanging(averager)
                    await trio.sleep(0.004 * seed)
                    network.crash(peer.id)
                    scope.cancel()

        async with simulated_peers(network, 4) as peers, trio.open_nursery() as nursery:
            nursery.start_soon(die, peers[0])
            for index, peer in enumerate(peers[1:]):
                nursery.start_soon(survive, peer, index)
        assert all(isinstance(result, p2pavg.Success) for result in results), results

    for seed in range(0, 30, 3):  # ``scripts/faults simulate`` draws thousands of moments
        trio.run(main, seed, clock=MockClock(autojump_threshold=0))
