"""States are fetched from several donors over a simulated network, whatever the donors do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio
from trio.testing import MockClock

from p2pavg.peer import Peer
from p2pavg.state.fetching import Fetch
from p2pavg.state.service import stored_key
from p2pavg.state.sessions import Sessions, open_sessions
from p2pavg.state.sink import MemorySink
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN
from tests.unit.state.blobs import Blob, Held

RUN = "sim"
FAST_ETHERNET = 100e6 / 8


def name(index: int) -> str:
    return simulated_signer(index).peer_id


@asynccontextmanager
async def company(
    donors: int, *blobs: Blob, bandwidth: float | None = None
) -> AsyncIterator[tuple[MemoryNetwork, list[Peer], list[Held], Sessions]]:
    """Open a joiner, which is the first peer, and donors that hold some blobs."""
    network = MemoryNetwork(latency=LAN, bandwidth=bandwidth)
    async with simulated_peers(network, donors + 1) as peers:
        held = [Held(*blobs) for _ in range(donors)]
        for peer, holdings in zip(peers[1:], held, strict=True):
            peer.state.join(RUN, None, holdings)
        async with open_sessions(peers[0].context, peers[0].lobby, key=stored_key(RUN, None)) as sessions:
            yield network, peers, held, sessions


def fetch_of(sessions: Sessions, blob: Blob, peers: Sequence[Peer], **options: object) -> Fetch:
    fetch = Fetch(sessions, blob.wanted, lambda manifest: MemorySink(manifest.sizes), **options)  # type: ignore[arg-type]
    fetch.set_donors({peer.id: peer.addresses for peer in peers})
    return fetch


async def check_fetch(fetch: Fetch, blob: Blob) -> float:
    """Run a fetch; return the seconds that it took."""
    began = trio.current_time()
    sink = await fetch.run()
    assert bytes(sink.take()) == blob.data
    return trio.current_time() - began


async def test_a_blob_comes_from_one_donor(autojump_clock: MockClock) -> None:
    blob = Blob(0, 20, 100_000, 17)
    async with company(1, blob) as (_network, peers, held, sessions):
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        assert sorted(held[0].sent) == list(range(20))


async def test_three_donors_are_at_least_two_and_a_half_times_as_fast_as_one(
    autojump_clock: MockClock,
) -> None:
    blob = Blob(0, 60, 1 << 20)
    seconds = {}
    for count in (1, 3):
        async with company(count, blob, bandwidth=FAST_ETHERNET) as (_network, peers, held, sessions):
            fetch = fetch_of(sessions, blob, peers[1:])
            seconds[count] = await check_fetch(fetch, blob)
            assert sum(len(each.sent) for each in held) <= 1.05 * len(blob.pieces)
    assert seconds[1] < 1.1 * len(blob.data) / FAST_ETHERNET
    assert seconds[1] >= 2.5 * seconds[3], seconds
