"""The memory of a round is freed with it: a vector may have gigabytes, and garbage collection may come late."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import trio

import p2pavg
from p2pavg.allreduce.values import AttemptData
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, run_peers, simulated_peers
from tests.simulation.swarm import config

ELEMENTS = 10_007  # a length that no table or scratch buffer of a codec has


def held() -> list[AttemptData]:
    """Return the values of all attempts that are in memory."""
    return [found for found in gc.get_objects() if type(found) is AttemptData]


@pytest.fixture(autouse=True)
def before() -> Iterator[list[AttemptData]]:
    """Turn garbage collection off; return the attempts of tests before this one."""
    gc.collect()
    found = held()
    gc.disable()
    yield found
    gc.enable()


def check_few_vectors(most: int, before: list[AttemptData]) -> None:
    """Check how many vectors are in memory, and that no attempt of this test still holds parts."""
    alive = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.numel() == ELEMENTS]
    assert len(alive) <= most, [(tensor.shape, tensor.dtype) for tensor in alive]
    known = {id(values) for values in before}
    assert not any(v.averages._encoded or v._inputs._waiting for v in held() if id(v) not in known)


async def step(averager: p2pavg.DecentralizedAverager) -> p2pavg.Success:
    averager.accumulate([torch.ones(ELEMENTS)])
    result = await averager.step(wait=None)
    assert isinstance(result, p2pavg.Success)
    return result


async def test_no_vector_outlives_its_round(before: list[AttemptData]) -> None:
    async def live(peer: Peer, _index: int) -> None:
        async with peer.averager(config(group_size=2, compression="blockwise8")) as averager:
            for _ in range(3):
                await step(averager)
            await trio.sleep(30.0)  # until the exchange has finished its work after the result
            # Two alternating buffers for each of the two peers in this process.
            check_few_vectors(4, before)

    await run_peers(MemoryNetwork(), 2, live)


async def test_a_result_is_freed_while_its_round_is_audited() -> None:
    freed = []

    async def live(peer: Peer, _index: int) -> None:
        async with peer.averager(config(group_size=2, compression="blockwise8", audit="after:1")) as averager:
            result = await step(averager)
            assert isinstance(result.averaged, list)
            memory = weakref.ref(result.averaged[0].untyped_storage())
            del result
            await trio.sleep(0.01)  # less than an audit's question is on its way
            assert peer.lobby.audited
            freed.append(memory() is None)
            await trio.sleep(1.0)

    await run_peers(MemoryNetwork(latency=(0.1, 0.1)), 2, live)
    assert freed == [True, True]


async def test_failed_round_keeps_its_vector_once(before: list[AttemptData]) -> None:
    network = MemoryNetwork(bandwidth=20_000.0)
    how = config(group_size=2, compression="blockwise8", exchange_timeout=3.0)
    async with simulated_peers(network, 2) as (peer, other):

        async def stop_in_the_exchange() -> None:
            async with other.averager(how) as averager:
                averager.accumulate([torch.ones(ELEMENTS)])
                await averager.step(wait=1.0)
                network.stop(other.id)
                await trio.sleep(60.0)

        async with trio.open_nursery() as nursery, peer.averager(how) as averager:
            nursery.start_soon(stop_in_the_exchange)
            averager.accumulate([torch.ones(ELEMENTS)])
            assert isinstance(await averager.step(wait=None), p2pavg.Failed)
            await trio.sleep(10.0)
            check_few_vectors(2, before)  # those of this peer and of the stopped one
            nursery.cancel_scope.cancel()
