"""The memory of a round is freed with it: a vector may have gigabytes, and garbage collection may come late."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import torch
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.allreduce.values import AttemptData
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_peers

ELEMENTS = 10_007  # a length that no table or scratch buffer of a codec has


def held() -> list[AttemptData]:
    """Return the values of all attempts that are in memory."""
    return [found for found in gc.get_objects() if type(found) is AttemptData]


def hold_parts(before: list[AttemptData]) -> bool:
    """Return whether an attempt of this test, not of one before, still holds parts."""
    known = {id(values) for values in before}
    return any((v._averages._encoded or v._inputs._waiting) for v in held() if id(v) not in known)


async def test_no_vector_outlives_its_round(autojump_clock: MockClock) -> None:
    config = p2pavg.AveragingConfig(run_id="memory", group_size=2, match_timeout=5.0)

    async def step(averager: p2pavg.DecentralizedAverager) -> None:
        averager.accumulate([torch.ones(ELEMENTS)])
        result = await averager.step(wait=None)
        assert isinstance(result, p2pavg.Success)

    async def live(peer: Peer) -> None:
        async with peer.averager(config) as averager:
            for _ in range(3):
                await step(averager)
            await trio.sleep(30.0)  # until the exchange has finished its work after the result
            alive = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.numel() == ELEMENTS]
            # Two alternating buffers for each of the two peers in this process.
            assert len(alive) <= 4, [(tensor.shape, tensor.dtype) for tensor in alive]
            assert not hold_parts(before)

    gc.collect()
    before = held()
    gc.disable()
    try:
        async with simulated_peers(MemoryNetwork(), 2) as peers, trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(partial(live, peer))
    finally:
        gc.enable()


async def test_a_result_is_freed_while_its_round_is_audited(autojump_clock: MockClock) -> None:
    config = p2pavg.AveragingConfig(run_id="memory", group_size=2, match_timeout=5.0, audit="after:1")
    freed = []

    async def live(peer: Peer) -> None:
        async with peer.averager(config) as averager:
            averager.accumulate([torch.ones(ELEMENTS)])
            result = await averager.step(wait=None)
            assert isinstance(result, p2pavg.Success)
            assert isinstance(result.averaged, list)
            memory = weakref.ref(result.averaged[0].untyped_storage())
            del result
            await trio.sleep(0.01)  # less than an audit's question is on its way
            assert peer.lobby.audited
            freed.append(memory() is None)
            await trio.sleep(1.0)

    gc.collect()
    gc.disable()
    try:
        network = MemoryNetwork(latency=(0.1, 0.1))
        async with simulated_peers(network, 2) as peers, trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(partial(live, peer))
    finally:
        gc.enable()
    assert freed == [True, True]


async def test_failed_round_keeps_its_vector_once(autojump_clock: MockClock) -> None:
    config = p2pavg.AveragingConfig(run_id="memory", group_size=2, match_timeout=5.0, exchange_timeout=3.0)
    network = MemoryNetwork(bandwidth=20_000.0)
    gc.collect()
    before = held()
    gc.disable()
    try:
        async with simulated_peers(network, 2) as (peer, other):

            async def stop_in_the_exchange() -> None:
                async with other.averager(config) as averager:
                    averager.accumulate([torch.ones(ELEMENTS)])
                    await averager.step(wait=1.0)
                    network.stop(other.id)
                    await trio.sleep(60.0)

            async with trio.open_nursery() as nursery, peer.averager(config) as averager:
                nursery.start_soon(stop_in_the_exchange)
                averager.accumulate([torch.ones(ELEMENTS)])
                assert isinstance(await averager.step(wait=None), p2pavg.Failed)
                await trio.sleep(10.0)
                alive = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.numel() == ELEMENTS]
                assert len(alive) <= 2, "those of this peer and of the stopped one"
                assert not hold_parts(before)
                nursery.cancel_scope.cancel()
    finally:
        gc.enable()
