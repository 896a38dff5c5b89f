"""The bandwidth that a peer signs: the setting, or else its measurement."""

from __future__ import annotations

import pytest
import torch
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.group.candidate import read_candidate
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_peer, simulated_peers

LAN = (0.0005, 0.002)


async def announced(peer: Peer) -> float:
    """Return the bandwidth in the record that other peers find."""
    [key] = peer.registry._matchmakers
    [record] = [record for record in await peer.records.find(key) if record.publisher == peer.id]
    return read_candidate(record).bandwidth


@pytest.mark.parametrize(
    ("how", "first", "later"),
    [
        ({}, 0.0, 40.0),
        ({"bandwidth": 7.5}, 7.5, 7.5),
        ({"max_upload_mbps": 30}, 30.0, 30.0),
        ({"max_download_mbps": 60}, 60.0, 40.0),
        ({"bandwidth": 50, "max_upload_mbps": 30}, 50.0, 50.0),
    ],
)
async def test_bandwidth_of_an_averager(
    autojump_clock: MockClock, how: dict[str, float], first: float, later: float
) -> None:
    config = p2pavg.AveragingConfig(run_id="sim", match_timeout=2.0, **how)  # type: ignore[arg-type]
    async with simulated_peer(MemoryNetwork(latency=LAN), 0) as peer, peer.averager(config) as averager:
        averager.accumulate([torch.ones(100)])
        await averager.step(wait=1.0)
        assert await announced(peer) == first
        assert isinstance(await averager.step(wait=None), p2pavg.NoPeers)
        meter = averager._meter
        assert averager._rounds is not None
        assert averager._rounds.context.meter is meter
        meter.begin(0.0)
        meter.sample(1.0, 5_000_000, 5_000_000)
        meter.end(1.0)
        await averager.step(wait=1.0)
        assert await announced(peer) == later


@pytest.mark.parametrize(("bandwidth", "signed"), [(None, 0.0), (12.5, 12.5)])
async def test_bandwidth_of_an_auxiliary(
    autojump_clock: MockClock, bandwidth: float | None, signed: float
) -> None:
    config = p2pavg.AveragingConfig(run_id="sim", match_timeout=20.0)
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 2) as (peer, helper),
        peer.averager(config) as averager,
        trio.open_nursery() as nursery,
    ):
        averager.accumulate([torch.ones(100)])
        await averager.step(wait=1.0)

        async def help_on() -> None:
            await assist(helper, "sim", bandwidth=bandwidth)

        nursery.start_soon(help_on)
        await trio.sleep(10.0)
        assert await announced(helper) == signed
        nursery.cancel_scope.cancel()
