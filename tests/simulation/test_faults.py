"""The proving ground: plans of faults, what they do, that a run can be repeated, and a first part of what it proves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.peer import Peer
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

LAN = (0.001, 0.002)


def test_hundreds_of_rounds_in_which_things_go_wrong() -> None:
    """``scripts/faults simulate`` has more of them; each that fails prints the command that repeats it."""
    command = [sys.executable, "-m", "scripts.fault_search.simulate", "--rounds", "30", "--processes", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "0"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_leader_that_commits_and_dies_leaves_no_contribution_that_counts_twice() -> None:
    """A follower that was stopped when it was told does not use its contribution again."""
    command = [sys.executable, "-m", "scripts.fault_search.simulate", "--seed", "501981"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_result_is_found_and_its_seed_named(tmp_path: os.PathLike[str]) -> None:
    """A round that gives back what it has used: the run says so, and how to see it again."""
    broken = (
        "import p2pavg.vector.accumulation as a, scripts.fault_search.simulate as s, sys\n"
        "a.Accumulation.release = a.Accumulation.give_back\n"
        "sys.argv[1:] = ['--rounds', '1', '--first', '3', '--processes', '1']\n"
        "sys.exit(s.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "scripts/faults simulate --seed 3 --log" in done.stdout


def test_a_plan_follows_from_its_seed() -> None:
    def plans(seed: int) -> str:
        return repr([FaultPlan.draw(seed + i, peers=5, faults=3) for i in range(5)])

    assert plans(7) == plans(7)
    assert plans(7) != plans(8)
    assert "Fault(what=" in plans(7)


def test_a_run_follows_from_its_seed() -> None:
    """To the last message: the moments at which the peers end are the same."""
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


class Watch:
    """What peers of a network get from each other, moment by moment."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.heard: dict[tuple[int, int], list[float]] = {}

    async def talk(self, peer: Peer, index: int) -> None:
        """Ask all others something twice a second, for twenty seconds."""
        async with trio.open_nursery() as nursery:
            for other in range(3):
                if other != index:
                    nursery.start_soon(self.ask, peer, index, other)
            await trio.sleep(20.0)
            nursery.cancel_scope.cancel()

    async def ask(self, peer: Peer, index: int, other: int) -> None:
        """Note the moments of the answers."""
        signer = simulated_signer(other)
        location = self.network._location(signer.peer_id)
        while True:
            try:
                await peer.around.transport.dial(f"{location}/p2p/{signer.peer_id}", timeout=0.4)
                await peer.around.transport.disconnect(signer.peer_id)
            except p2pavg.errors.UnreachableError:
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
async def test_silence_begins_and_ends_when_the_plan_says(
    autojump_clock: MockClock, what: Cut | Partition | Stop, silent: set[tuple[int, int]]
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


async def test_a_fault_may_wait_for_the_third_part_that_a_reducer_sends(autojump_clock: MockClock) -> None:
    """And for time after it; what a peer does not live to see does not happen."""
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


async def test_a_connection_that_is_lost_can_be_made_again(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=LAN)
    lost: list[bool] = []

    async def work(peer: Peer, index: int) -> None:
        transport = peer.around.transport
        other = simulated_signer(1 - index).peer_id
        await trio.sleep(1.0)
        if index == 1:
            await transport.dial(f"{network._location(other)}/p2p/{other}", timeout=1.0)
        await trio.sleep(4.5)
        lost.append(not transport.is_connected(other))
        await transport.dial(f"{network._location(other)}/p2p/{other}", timeout=1.0)

    await run_peers(network, 2, work, plan=FaultPlan([Fault(Disconnect(0, 1), At(5.0))]))
    assert any(lost)


@pytest.mark.parametrize(
    "what",
    [Throttle(0, bandwidth=1e4, seconds=100.0), Delay(0, (0.2, 0.2), seconds=100.0)],
    ids=["throttle", "delay"],
)
async def test_a_slow_link_makes_a_round_slower_and_no_worse(
    autojump_clock: MockClock, what: Throttle | Delay
) -> None:
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
