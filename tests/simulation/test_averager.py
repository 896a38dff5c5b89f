"""One averager: its calls in every order, and its end at any moment."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

import pytest
import torch
import trio

import p2pavg
from p2pavg.base.result import EXCHANGES
from p2pavg.peer.peer import Peer, peer_over
from p2pavg.testing import MemoryNetwork, simulate, simulated_clock, simulated_peer, simulated_peers
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN
from tests.simulation.swarm import config as usual

T = TypeVar("T")

ONES = [torch.ones(1_000)]


def config(**changes: object) -> p2pavg.AveragingConfig:
    fields = {"group_size": 2, "match_timeout": 5.0, "exchange_timeout": 8.0, "compression": "blockwise8"}
    return usual(**(fields | changes))


@asynccontextmanager
async def alone(**changes: object) -> AsyncIterator[p2pavg.DecentralizedAverager]:
    """Open the averager of a peer that has no other."""
    async with (
        simulated_peer(MemoryNetwork(latency=LAN), 0) as peer,
        peer.averager(config(**changes)) as averager,
    ):
        yield averager


async def test_second_averager_of_a_run_is_an_error_that_keeps_contributions() -> None:
    async with simulated_peer(MemoryNetwork(latency=LAN), 0) as peer:
        async with peer.averager(config()) as first, peer.averager(config()) as second:
            first.accumulate(ONES)
            second.accumulate(ONES, weight=3.0)
            await first.step(wait=0)
            with pytest.raises(p2pavg.BusyError, match="already"):
                await second.step(wait=0)
            assert second.weight == 3.0
        async with peer.averager(config()) as third:
            third.accumulate(ONES)
            assert isinstance(await third.step(wait=0), p2pavg.InProgress)


async def test_a_step_that_waits_ends_with_the_averager() -> None:
    async with simulated_peer(MemoryNetwork(latency=LAN), 0) as peer, trio.open_nursery() as nursery:

        async def wait_for_ever(averager: p2pavg.DecentralizedAverager) -> None:
            with pytest.raises(p2pavg.ClosedError), trio.fail_after(60.0):
                await averager.step(wait=None)

        async with peer.averager(config()) as averager:
            averager.accumulate(ONES, weight=2.0)
            nursery.start_soon(wait_for_ever, averager)
            await trio.sleep(1.0)
        assert averager.weight == 2.0, "what the round held counts as accumulated again"


async def test_whole_numbers_are_valid_bandwidths_and_weights() -> None:
    async with alone(bandwidth=100, match_timeout=2) as averager:
        averager.accumulate(ONES, weight=4)
        assert isinstance(await averager.step(wait=None), p2pavg.NoPeers)


async def test_clear_during_a_round_drops_its_contribution() -> None:
    async with alone() as averager:
        averager.accumulate(ONES)
        await averager.step(wait=1.0)
        averager.clear()
        assert isinstance(await averager.step(wait=None), p2pavg.NoPeers)
        assert averager.weight == 0


async def test_records_of_a_closed_averager_are_withdrawn() -> None:
    """Neither its candidate record nor its run entry remains."""
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (peer, other):
        async with peer.averager(config(match_timeout=1.0)) as averager:
            averager.accumulate(ONES * 2)
            await averager.step(wait=None)
        async with other.averager(config(match_timeout=1.0)) as averager:
            averager.accumulate(ONES)
            result = await averager.step(wait=None)
        assert isinstance(result, p2pavg.NoPeers)
        assert "of this run" not in result.reason


class TestCancelMatchmaking:
    async def test_cancelled_search_ends_at_once_and_keeps_contributions(self) -> None:
        async with (
            simulated_peers(MemoryNetwork(latency=LAN), 2) as (peer, other),
            peer.averager(config()) as averager,
            other.averager(config()) as another,
        ):
            assert not await averager.cancel_matchmaking("there is no round")
            averager.accumulate(ONES, weight=3.0)
            assert isinstance(await averager.step(wait=1.0), p2pavg.InProgress)
            assert await averager.cancel_matchmaking("it is of no use")
            assert await averager.step(wait=1.0) == p2pavg.NoPeers(
                reason="it is of no use", code=p2pavg.NoPeersCode.CANCELLED
            )
            assert trio.current_time() < 2.0
            assert averager.weight == 3.0
            assert not await averager.cancel_matchmaking("the round is over")
            another.accumulate(ONES)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(another.step, wait=None))
                assert isinstance(await averager.step(wait=None), p2pavg.Success)

    def test_cancelling_at_any_moment_leaves_or_joins_the_group(self) -> None:
        """The answer is true: either no member has the peer's contribution, or the peer has the group's result."""
        outcomes = Counter[bool]()

        async def main(seed: int) -> None:
            chosen = random.Random(seed)
            network = MemoryNetwork(seed=seed, latency=LAN)
            how = config(group_size=3)
            results: list[p2pavg.RoundResult] = []

            async def live(averager: p2pavg.DecentralizedAverager) -> None:
                results.append(await averager.step(wait=None))

            async with simulated_peers(network, 3) as peers, AsyncExitStack() as stack:
                averagers = [await stack.enter_async_context(peer.averager(how)) for peer in peers]
                for averager in averagers:
                    averager.accumulate(ONES)
                chosen.shuffle(averagers)
                async with trio.open_nursery() as nursery:
                    for averager in averagers[1:]:
                        nursery.start_soon(live, averager)
                        await trio.sleep(chosen.choice((0.0, 0.01)))
                    await averagers[0].step(wait=0)
                    await trio.sleep(chosen.random() * 0.02)
                    stopped = await averagers[0].cancel_matchmaking("enough")
                    result = await averagers[0].step(wait=None)
                outcomes[stopped] += 1
                if stopped:
                    assert result == p2pavg.NoPeers(reason="enough", code=p2pavg.NoPeersCode.CANCELLED)
                    assert averagers[0].weight == 1.0
                else:
                    assert isinstance(result, p2pavg.Success)
                for other in results:
                    assert isinstance(other, p2pavg.Success)
                    assert (averagers[0].peer_id in other.peers) == (not stopped)

        for seed in range(10):
            simulate(partial(main, seed))
        assert min(outcomes.values()) > 2, outcomes


def test_simultaneous_closing_raises_on_no_peer() -> None:
    """A stream that arrives at an attempt that has just ended must start nothing in it."""

    async def main(seed: int) -> None:
        chosen = random.Random(seed)

        async def live(peer: Peer, index: int) -> None:
            await trio.sleep(0.1 * index)
            async with peer.averager(config(group_size=6, min_group_size=6, match_timeout=10.0)) as averager:
                averager.accumulate(ONES)
                with trio.move_on_at(3.0 + 0.001 * chosen.randrange(-3, 4)):
                    await averager.step(wait=None)
                for _ in range(chosen.randrange(6)):
                    await trio.lowlevel.checkpoint()

        network = MemoryNetwork(seed=seed, latency=(0.001, 0.001))
        async with simulated_peers(network, 4) as peers, trio.open_nursery() as nursery:
            for index, peer in enumerate(peers):
                nursery.start_soon(live, peer, index)

    for seed in range(8):
        simulate(partial(main, seed), seed=seed)


async def never(function: Callable[..., T], *args: object) -> T:
    """A worker that never returns: its peer agrees to a group and sends it nothing."""
    await trio.sleep_forever()
    raise AssertionError


async def test_member_that_stalls_repeatedly_is_named_and_excluded() -> None:
    network = MemoryNetwork(latency=LAN)
    how = config(group_size=3)
    results: dict[str, list[p2pavg.RoundResult]] = {}

    async def average(peer: Peer) -> None:
        async with peer.averager(how) as averager:
            for _ in range(3):
                averager.accumulate(ONES)
                results.setdefault(peer.id, []).append(await averager.step(wait=None))

    async def stall(bootstrap: list[str]) -> None:
        async with (
            network.transport(simulated_signer(9)) as transport,
            peer_over(
                transport,
                simulated_signer(9),
                bootstrap=bootstrap,
                wall_clock=simulated_clock,
                run_in_thread=never,
            ) as peer,
            peer.averager(how) as averager,
        ):
            while True:
                if averager.weight == 0:
                    averager.accumulate(ONES)
                await averager.step(wait=None)

    async with simulated_peers(network, 2) as peers, trio.open_nursery() as nursery:
        nursery.start_soon(stall, peers[0].addresses)
        async with trio.open_nursery() as honest:
            for peer in peers:
                honest.start_soon(partial(average, peer))
        nursery.cancel_scope.cancel()
    for rounds in results.values():
        for number, result in enumerate(rounds):
            assert isinstance(result, p2pavg.Success)
            assert set(result.peers) == results.keys()
            assert len(result.lost) == (number < 2)
        assert isinstance(rounds[0], p2pavg.Success)
        assert "no part of its contribution" in rounds[0].lost[simulated_signer(9).peer_id]


@pytest.mark.parametrize("ms", [7.0, 8.0, 9.0])
def test_a_peer_that_closes_in_an_exchange_keeps_nothing_that_the_others_have_used(ms: float) -> None:
    """It had handed everything over, and was about to hear of the commit."""
    how = config(group_size=3, min_group_size=2)
    counted: list[float] = []

    async def other(peer: Peer, first: str) -> None:
        async with peer.averager(how) as averager:
            averager.accumulate(ONES)
            result = await averager.step(wait=None)
            if isinstance(result, p2pavg.Success):
                counted.append(result.weights.get(first, 0.0))
            await trio.sleep(4.0)

    async def main() -> float:
        async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers, trio.open_nursery() as nursery:
            for peer in peers[1:]:
                nursery.start_soon(other, peer, peers[0].id)
            async with peers[0].averager(how) as averager:
                averager.accumulate(ONES, weight=3.0)
                result = await averager.step(wait=0)
                while not (isinstance(result, p2pavg.InProgress) and result.reason == EXCHANGES):
                    await trio.sleep(0.0002)
                    result = await averager.step(wait=0)
                await trio.sleep(ms / 1000)
                await averager.aclose()
                await trio.sleep(8.0)
                return averager.weight

    left = simulate(main)
    assert not (left and any(counted)), f"{left} is kept, and {counted} were used"
