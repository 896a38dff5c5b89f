"""Large runs: readiness, statuses and run entries are spread over places, and peers meet whatever size they see."""

from __future__ import annotations

from collections import Counter

import pytest
import trio

import p2pavg
from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.group.places import levels
from p2pavg.peer.peer import Peer
from p2pavg.runs.records import spread_records
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg_dht import Record
from p2pavg_dht.routing import RoutingTable
from p2pavg_dht.storage import RecordStore, Refusal
from tests.simulation.swarm import LAN, config, step_each, values


def believe(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]) -> None:
    """Let each peer believe in a network of some size."""
    monkeypatch.setattr(RoutingTable, "network_size", lambda table: sizes[table._own_id])


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([10, 10, 500, 500, 5_000, 10**7], id="all sizes"),
        pytest.param([10**7] * 6, id="all are deceived"),
    ],
)
async def test_peers_that_see_runs_of_other_sizes_meet(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 6) as peers:
        believe(monkeypatch, {peer.id: size for peer, size in zip(peers, sizes, strict=True)})
        swarm = await step_each(
            peers, config(group_size=6, match_timeout=60.0), [0.1 * index for index in range(6)]
        )
    assert {len(result.peers) for result in swarm.successes()} == {6}
    assert len(swarm.successes()) == 6
    # A level takes a quarter of a second, and there are eight. The deadline is a minute away.
    assert max(swarm.ended.values()) - max(swarm.began.values()) < 15.0


async def test_second_round_begins_where_the_first_has_met(monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[list[float]] = [[], []]

    async def twice(peer: Peer, index: int) -> None:
        async with peer.averager(config(group_size=3)) as averager:
            for durations in took:
                averager.accumulate([values(index)])
                result = await averager.step(wait=None)
                assert isinstance(result, p2pavg.Success)
                assert len(result.peers) == 3
                durations.append(result.duration)

    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        believe(monkeypatch, {peer.id: 100 for peer in peers})  # one level above the common place
        async with trio.open_nursery() as nursery:
            for index, peer in enumerate(peers):
                nursery.start_soon(twice, peer, index)
    assert max(took[0]) > GLANCE_SECONDS
    assert max(took[1]) < GLANCE_SECONDS


async def test_records_of_a_large_run_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "LEAST", 4)  # four peers in a place make a large run
    monkeypatch.setattr(spread_records, "ENOUGH", 2)
    most: Counter[bytes] = Counter()

    def counted(store: RecordStore, record: Record, *, sender: str, now: float) -> str | None:
        refusal = put(store, record, sender=sender, now=now)
        most[record.key] = max(most[record.key], store._by_key[record.key].records)
        return refusal

    put = RecordStore.put
    monkeypatch.setattr(RecordStore, "put", counted)
    async with simulated_peers(MemoryNetwork(latency=LAN), 16) as peers:
        believe(monkeypatch, {peer.id: 16 for peer in peers})
        await trio.sleep(2.0)
        swarm = await step_each(peers, config(group_size=2, match_timeout=30.0))
    assert {len(result.peers) for result in swarm.successes()} == {2}
    assert len(swarm.successes()) == 16
    # Readiness, run entries and statuses in four places each, but for the few that see too few others there.
    assert len(most) >= 12
    assert max(most.values()) <= 10


async def test_flooded_place_keeps_no_peers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    flooded: set[bytes] = set()

    def without_room(store: RecordStore, record: Record, *, sender: str, now: float) -> str | None:
        if record.key in flooded and not record.withdrawn:
            return Refusal.KEY_FULL
        return put(store, record, sender=sender, now=now)

    put, place = RecordStore.put, levels.place_key

    def on_a_level(key: bytes, slot: int, level: int, cell: int) -> bytes:
        found = place(key, slot, level, cell)
        if level == 1:
            flooded.add(found)
        return found

    monkeypatch.setattr(RecordStore, "put", without_room)
    monkeypatch.setattr(levels, "place_key", on_a_level)
    async with simulated_peers(MemoryNetwork(latency=LAN), 4) as peers:
        believe(monkeypatch, {peer.id: 100 for peer in peers})
        swarm = await step_each(peers, config(group_size=4, match_timeout=60.0))
    assert len(flooded) > 0
    assert [len(result.peers) for result in swarm.successes()] == [4] * 4
    # The keepers' refusal sends each of them on before it would look for more peers in that place.
    assert max(swarm.ended.values()) - max(swarm.began.values()) < GLANCE_SECONDS
