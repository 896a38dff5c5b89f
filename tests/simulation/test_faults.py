"""The simulated faults: plans, effects, deterministic runs, and a short version of ``scripts/faults simulate``."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch
import trio
from trio.testing import wait_all_tasks_blocked

import p2pavg
from p2pavg.allreduce.vector.accumulation import Accumulation
from p2pavg.base.errors import UnreachableError
from p2pavg.peer.peer import Peer
from p2pavg.round.voting import FIND_OUT_SECONDS
from p2pavg.testing import (
    After,
    At,
    Crash,
    Cut,
    Delay,
    Disconnect,
    Fault,
    FaultPlan,
    MemoryNetwork,
    Milestone,
    Partition,
    Stop,
    Throttle,
    run_peers,
    simulate,
)
from p2pavg.testing.simulation import simulated_signer
from scripts.fault_search import simulate as simulate_rounds
from scripts.fault_search.simulate import PART_ELEMENTS

LAN = (0.001, 0.002)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process have the parts of ``scripts/faults simulate``, which also sets the number of threads."""
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: PART_ELEMENTS)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1, 5, 8),
        pytest.param(501981, id="a follower is stopped when the commit arrives of a leader that dies"),
        pytest.param(7001118, id="a leader with its share averaged is cut off", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("small_parts")
def test_rounds_with_faults(seed: int) -> None:
    """``scripts/faults simulate`` runs thousands of them."""
    _, _, wrong = simulate_rounds.one(seed)
    assert not wrong, f"{wrong}; again: scripts/faults simulate --seed {seed} --log"


@pytest.mark.usefixtures("small_parts")
def test_wrong_result_is_found_and_its_seed_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A round that gives back a used contribution is reported with the command that repeats it."""
    monkeypatch.setattr(Accumulation, "release", Accumulation.give_back)
    monkeypatch.setattr(multiprocessing, "Pool", ThreadPool)
    monkeypatch.setattr(sys, "argv", ["simulate", "--rounds", "1", "--first", "0", "--processes", "1"])
    assert simulate_rounds.main() == 1
    assert "scripts/faults simulate --seed 0 --log" in capsys.readouterr().out


async def play(
    faults: Sequence[Fault], *, seed: int, elements: int, size: int = 4, later: float = 0.0, **changes: Any
) -> dict[int, tuple[p2pavg.RoundResult, float]]:
    """Return each survivor's result of one round, and its weight some seconds later."""
    how = {"group_size": size, "min_group_size": 2, "match_timeout": 5.0, "exchange_timeout": 60.0}
    config = p2pavg.AveragingConfig(run_id="played", **{**how, **changes})

    async def average(peer: Peer, index: int) -> tuple[p2pavg.RoundResult, float]:
        async with peer.averager(config) as averager:
            averager.accumulate([torch.ones(elements) * index])
            result = await averager.step(wait=None)
            await trio.sleep(later)
            return result, averager.weight

    network = MemoryNetwork(seed=seed, latency=(0.005, 0.02))
    return await run_peers(network, size, average, plan=FaultPlan(faults))


def test_a_member_that_sat_out_an_attempt_is_no_liar() -> None:
    """Its reducer has dropped what it had said to have. The leader is lost to it first, and crashes then."""
    faults = [
        Fault(Disconnect(3, 0), After(Milestone.AVERAGE_SENT, count=2, of=0)),
        Fault(Crash(0), After(Milestone.AVERAGE_SENT, count=3, of=0)),
    ]
    found = simulate(partial(play, faults, seed=2, elements=1000))
    assert all(isinstance(result, p2pavg.Success) for result, _ in found.values()), found


def test_a_reducer_that_dies_unaudited_is_left_out_at_once() -> None:
    """With audits before the end, a member whose audit it cannot answer any more does not take its averages."""
    crash = Fault(Crash(2), After(Milestone.AVERAGE_SENT, count=3, of=2, seconds=0.025))
    found = simulate(partial(play, [crash], seed=3, elements=8000, audit="before:0.3"))
    for result, _ in found.values():
        assert isinstance(result, p2pavg.Success)
        assert result.exchange_duration < 5.0


def test_a_contribution_that_never_left_its_peer_is_kept() -> None:
    cut_off = Fault(Partition((2,), None), After(Milestone.FORMED, of=2))
    later = FIND_OUT_SECONDS + 60.0
    found = simulate(partial(play, [cut_off], seed=1, elements=20_000, size=3, later=later))
    result, weight = found[2]
    assert isinstance(result, p2pavg.Failed)
    assert weight == 1.0


def test_plan_is_deterministic() -> None:
    def plans(seed: int) -> str:
        return repr([FaultPlan.draw(seed + i, peers=5, faults=3) for i in range(5)])

    assert plans(7) == plans(7)
    assert plans(7) != plans(8)
    assert "Fault(what=" in plans(7)


def test_the_order_in_which_tasks_wake_follows_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trio cancels them in the order of their places in memory, so those of earlier runs are kept in theirs."""
    monkeypatch.setattr("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING", False)  # pytest-trio has set it
    kept: list[trio.lowlevel.Task] = []

    async def main() -> list[int]:
        ended: list[int] = []

        async def end_last(number: int) -> None:
            kept.append(trio.lowlevel.current_task())
            try:
                await trio.sleep_forever()
            finally:
                ended.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(end_last, number)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return ended

    assert simulate(main, seed=3) == simulate(main, seed=3)
    assert simulate(main, seed=3) != simulate(main, seed=4)


def test_run_is_deterministic() -> None:
    """Runs agree to the last message: the peers end at the same moments."""
    config = p2pavg.AveragingConfig(run_id="again", group_size=4, match_timeout=5.0, compression=None)

    async def main() -> list[tuple[int, str, float]]:
        ended: list[tuple[int, str, float]] = []

        async def work(peer: Peer, index: int) -> None:
            async with peer.averager(config) as averager:
                averager.accumulate([torch.ones(5_000) * index])
                result = await averager.step(wait=None)
                ended.append((index, type(result).__name__, trio.current_time()))

        plan = FaultPlan([Fault(Crash(2), After(Milestone.AVERAGE_SENT))])
        await run_peers(MemoryNetwork(seed=5, bandwidth=1e5), 5, work, plan=plan)
        return ended

    assert simulate(main, seed=3) == simulate(main, seed=3)


async def test_fault_can_wait_for_the_third_part_of_a_reducer() -> None:
    """A delay after the part is possible too; a fault after a peer's death does not happen."""
    network = MemoryNetwork(latency=LAN, bandwidth=1e6)
    config = p2pavg.AveragingConfig(run_id="third", group_size=3, match_timeout=5.0, compression=None)
    victim = simulated_signer(1).peer_id
    sent: list[bool] = []
    reached = network.reached

    def watch(peer_id: str, milestone: Milestone) -> None:
        reached(peer_id, milestone)
        if (peer_id, milestone) == (victim, Milestone.AVERAGE_SENT) and (not sent or sent[-1]):
            sent.append(network.has(victim))

    network.reached = watch  # type: ignore[method-assign]

    async def work(peer: Peer, index: int) -> None:
        async with peer.averager(config) as averager:
            averager.accumulate([torch.ones(2_000_000)])
            await averager.step(wait=None)

    plan = FaultPlan([Fault(Crash(1), After(Milestone.AVERAGE_SENT, count=3))])
    await run_peers(network, 3, work, plan=plan)
    assert sent == [True, True, False]


class Watch:
    """Log of the answers that peers of a network get from each other."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.heard: dict[tuple[int, int], list[float]] = {}

    async def talk(self, peer: Peer, index: int) -> None:
        """Send a question to all others twice a second, for twenty seconds."""
        async with trio.open_nursery() as nursery:
            for other in range(3):
                if other != index:
                    nursery.start_soon(self.ask, peer, index, other)
            await trio.sleep(20.0)
            nursery.cancel_scope.cancel()

    async def ask(self, peer: Peer, index: int, other: int) -> None:
        """Note the moments of the answers."""
        signer = simulated_signer(other)
        location = self.network.location_of(signer.peer_id)
        while True:
            try:
                await peer.context.transport.dial(f"{location}/p2p/{signer.peer_id}", timeout=0.4)
                await peer.context.transport.disconnect(signer.peer_id)
            except UnreachableError:
                pass
            else:
                self.heard.setdefault((index, other), []).append(trio.current_time())
            await trio.sleep(0.5)


@pytest.mark.parametrize(
    ("what", "silent"),
    [
        (Cut(0, 1, seconds=5.0), {(0, 1), (1, 0)}),
        (Partition((2,), seconds=5.0), {(0, 2), (2, 0), (1, 2), (2, 1)}),
        (Stop(1, seconds=5.0), {(0, 1), (1, 0), (1, 2), (2, 1)}),
    ],
    ids=["cut", "partition", "stop"],
)
async def test_silence_begins_and_ends_as_planned(
    what: Cut | Partition | Stop, silent: set[tuple[int, int]]
) -> None:
    network = MemoryNetwork(latency=LAN)
    watch = Watch(network)
    began = trio.current_time()
    await run_peers(network, 3, watch.talk, plan=FaultPlan([Fault(what, At(5.0))]))
    for pair in [(a, b) for a in range(3) for b in range(3) if a != b]:
        during = [moment for moment in watch.heard[pair] if 6.5 < moment - began < 10.0]
        after = [moment for moment in watch.heard[pair] if moment - began > 12.0]
        assert bool(during) == (pair not in silent), pair
        assert after, pair


async def test_lost_connection_can_be_replaced() -> None:
    network = MemoryNetwork(latency=LAN)
    replaced: list[bool] = []

    async def work(peer: Peer, index: int) -> None:
        transport = peer.context.transport
        other = simulated_signer(1 - index).peer_id
        await trio.sleep(1.0)
        if index == 1:
            await transport.dial(f"{network.location_of(other)}/p2p/{other}", timeout=1.0)
        await trio.sleep(1.0)
        assert transport.is_connected(other)
        with trio.fail_after(10.0):
            while transport.is_connected(other):  # soon after, the records connect the two again
                await trio.sleep(0.01)
        await transport.dial(f"{network.location_of(other)}/p2p/{other}", timeout=1.0)
        replaced.append(transport.is_connected(other))

    await run_peers(network, 2, work, plan=FaultPlan([Fault(Disconnect(0, 1), At(5.0))]))
    assert replaced == [True, True]


@pytest.mark.parametrize(
    "what",
    [Throttle(0, bandwidth=1e4, seconds=100.0), Delay(0, (0.2, 0.2), seconds=100.0)],
    ids=["throttle", "delay"],
)
async def test_slow_link_only_delays_a_round(what: Throttle | Delay) -> None:
    config = p2pavg.AveragingConfig(
        run_id="slow", group_size=2, match_timeout=5.0, compression=None, exchange_timeout=100.0
    )

    async def seconds(plan: FaultPlan) -> float:
        took: list[float] = []

        async def work(peer: Peer, index: int) -> None:
            async with peer.averager(config) as averager:
                await trio.sleep(1.0)
                averager.accumulate([torch.ones(20_000)])
                result = await averager.step(wait=None)
                assert isinstance(result, p2pavg.Success), result
                took.append(result.exchange_duration)

        await run_peers(MemoryNetwork(latency=LAN, bandwidth=1e6), 2, work, plan=plan)
        return max(took)

    assert await seconds(FaultPlan([Fault(what, At(0.5))])) > 4 * await seconds(FaultPlan())
