"""An auxiliary that is told to leave finishes its round, and begins no other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import trio

import p2pavg
from p2pavg.peer.auxiliary import HelpedRounds, assist
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_peers
from tests.simulation.swarm import LAN, Swarm, config, values

GIVE_UP_SECONDS = 200.0


class Helper:
    """An auxiliary in a task of its own."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.helping = HelpedRounds(peer.id)
        self.has_ended = trio.Event()

    async def run(self) -> None:
        await assist(self.peer, "sim", helping=self.helping)
        self.has_ended.set()


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(GIVE_UP_SECONDS):
        while not condition():
            await trio.sleep(0.0005)


async def test_an_auxiliary_that_leaves_finishes_the_round_that_runs() -> None:
    how = config(group_size=2)
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 3) as (peer, one, two),
        one.averager(how) as first,
        two.averager(how) as second,
        trio.open_nursery() as nursery,
    ):
        helper = Helper(peer)
        helping = helper.helping
        nursery.start_soon(helper.run)
        for _ in range(40):
            results: list[p2pavg.RoundResult] = []
            async with trio.open_nursery() as steps:
                for averager in (first, second):
                    steps.start_soon(step, averager, results)
                if helping.rounds:
                    await until(lambda: helping.is_exchanging)
                    helping.leave()
                    assert not helper.has_ended.is_set()
            if helping.is_leaving:
                break
            await trio.sleep(1.0)
        with trio.fail_after(GIVE_UP_SECONDS):
            await helper.has_ended.wait()
        for result in results:
            assert isinstance(result, p2pavg.Success), result
            assert result.auxiliaries == (peer.id,)
        assert (helping.rounds, helping.failed_rounds) == (2, 0)
        assert set(helping.round_peers) == helping.run_peers == {one.id, two.id}
        assert min(helping.elements, helping.bytes_sent, helping.bytes_received) > 0


async def test_other_peers_see_the_name_of_an_auxiliary() -> None:
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 2) as (peer, one),
        one.averager(config(group_size=2)) as averager,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(partial(assist, peer, "sim", name="garage, 3090"))

        def is_named() -> bool:
            heard = averager.statuses.others().get(peer.id)
            return heard is not None and heard.status.name == "garage, 3090"

        await until(is_named)
        nursery.cancel_scope.cancel()


async def step(averager: p2pavg.DecentralizedAverager, results: list[p2pavg.RoundResult]) -> None:
    averager.accumulate([values(len(results))])
    results.append(await averager.step(wait=None))


async def test_an_auxiliary_without_a_group_leaves_at_once() -> None:
    swarm = Swarm()
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 2) as (peer, alone),
        trio.open_nursery() as nursery,
    ):
        helper = Helper(peer)
        nursery.start_soon(helper.run)
        nursery.start_soon(swarm.step_once, alone, 1, config(group_size=2, match_timeout=60.0))
        await until(lambda: helper.helping._running)
        began = trio.current_time()
        helper.helping.leave()
        with trio.fail_after(GIVE_UP_SECONDS):
            await helper.has_ended.wait()
        assert trio.current_time() - began < 3.0  # time for telling others, on the virtual clock
        nursery.cancel_scope.cancel()
