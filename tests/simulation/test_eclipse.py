"""Hostile keepers of records that store nothing do not keep peers apart that have finished a round together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

import p2pavg
from p2pavg.peer.peer import Peer, peer_over
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import run_on_loop, simulated_clock
from p2pavg_dht import Ed25519Signer
from p2pavg_dht.routing import K, key_point, peer_point
from tests.simulation.swarm import LAN, config, values

HONEST = 4
ROUNDS = 3


def nearest_identities(key: bytes, count: int) -> list[Ed25519Signer]:
    """Return the identities nearest to a key, of as many as an attacker can try in a moment."""
    point = key_point(key)
    tried = (Ed25519Signer(number.to_bytes(32, "big")) for number in range(1, 400))
    return sorted(tried, key=lambda signer: peer_point(signer.peer_id) ^ point)[:count]


async def keep_nothing(
    network: MemoryNetwork, signer: Ed25519Signer, to: str, *, task_status: Any = trio.TASK_STATUS_IGNORED
) -> None:
    """Run a peer that says it stores each record, and stores none."""
    async with (
        network.transport(signer) as transport,
        peer_over(
            transport, signer, bootstrap=[to], wall_clock=simulated_clock, run_in_thread=run_on_loop
        ) as peer,
    ):
        peer.records._store.put = lambda *_, **__: None  # type: ignore[method-assign]
        task_status.started()
        await trio.sleep_forever()


async def rounds(
    peers: Sequence[Peer], eclipse: Callable[[bytes], Any], durations: list[list[float]]
) -> None:
    """Average round by round; after the first round, the attacker comes."""
    how = config(run_id="eclipsed", group_size=HONEST, min_group_size=HONEST, match_timeout=5.0)
    async with AsyncExitStack() as stack:
        averagers = [await stack.enter_async_context(peer.averager(how)) for peer in peers]

        async def step(index: int) -> None:
            averager = averagers[index]
            averager.accumulate([values(index)])
            began = trio.current_time()
            result = await averager.step(wait=None)
            taken.append(trio.current_time() - began)
            if not isinstance(result, p2pavg.Success):
                taken.append(float("inf"))

        for number in range(ROUNDS):
            taken: list[float] = []
            async with trio.open_nursery() as nursery:
                for index in range(HONEST):
                    nursery.start_soon(step, index)
            durations.append(taken)
            if number == 0:
                assert averagers[0]._rounds is not None
                await eclipse(averagers[0]._rounds.matchmaker.key)
            await trio.sleep(40.0)  # longer than a record lives


@pytest.mark.long
@pytest.mark.parametrize("acquainted", [True, False], ids=["known to each other", "without direct calls"])
async def test_keepers_that_store_nothing_do_not_delay_peers_that_know_each_other(
    monkeypatch: pytest.MonkeyPatch, acquainted: bool
) -> None:
    if not acquainted:  # as in version 0.1
        monkeypatch.setattr(RunRecords, "met", lambda *_: None)
    network = MemoryNetwork(latency=LAN)
    durations: list[list[float]] = []
    async with simulated_peers(network, HONEST) as peers, trio.open_nursery() as nursery:

        async def eclipse(key: bytes) -> None:
            for signer in nearest_identities(key, K):
                await nursery.start(keep_nothing, network, signer, peers[0].addresses[0])
            await trio.sleep(120.0)  # all peers have heard of the keepers
            point = key_point(key)
            hostile = {signer.peer_id for signer in nearest_identities(key, K)}
            for peer in peers:
                assert {contact.peer_id for contact in peer.records._table.nearest(point)} == hostile

        await rounds(peers, eclipse, durations)
        nursery.cancel_scope.cancel()
    before, after = max(durations[0]), [max(taken) for taken in durations[1:]]
    if acquainted:
        assert max(after) < before + 0.5, after
    else:
        assert max(after) > before + 2.0, after
