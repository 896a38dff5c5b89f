"""Measurements of bandwidth on a simulated network: the numbers are right, and their cost is bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import torch
import trio

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.base.messages import pack
from p2pavg.net.limits.rate import BLOCK_BYTES, MAX_AT_ONCE, MAX_BLOCKS
from p2pavg.net.transport import Stream, Transport, receive_message, send_message
from p2pavg.runs.records.bandwidth import (
    PROTOCOL,
    BandwidthAnswer,
    BandwidthQuestion,
    BandwidthService,
    BusyPeerError,
    measure,
)
from p2pavg.testing import MemoryNetwork
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import config, step_all

MBPS = 1e6 / 8  # bytes per second


@asynccontextmanager
async def stream_to(
    serve: Callable[[Stream], Awaitable[None]], *, up: float | None = None, down: float | None = None
) -> AsyncIterator[Stream]:
    """Open a stream to a peer that serves the protocol in this way. Its link has these Mbit/s, seen from here."""
    network = MemoryNetwork(latency=(0.01, 0.01))
    async with (
        network.transport(simulated_signer(0), bandwidth=None if up is None else up * MBPS) as mine,
        network.transport(simulated_signer(1), bandwidth=None if down is None else down * MBPS) as its,
    ):
        its.serve(PROTOCOL, serve)
        yield await open_to(mine, its)


async def open_to(mine: Transport, its: Transport) -> Stream:
    return await mine.open_stream(its.peer_id, PROTOCOL, addresses=its.addresses, timeout=5.0)


@pytest.mark.parametrize(("up", "down"), [(20.0, 5.0), (2.0, 50.0)])
async def test_both_directions_are_measured(up: float, down: float) -> None:
    async with stream_to(BandwidthService().serve, up=up, down=down) as stream:
        found = await measure(stream)
    assert found.up_mbps == pytest.approx(up, rel=0.25)
    assert found.down_mbps == pytest.approx(down, rel=0.25)
    assert found.seconds == pytest.approx(0.02, abs=0.01)


async def test_a_round_over_streams_measures_the_link() -> None:
    """Parts to seven members end together. Counted as a whole, they would look like a link three times as fast."""
    count, up, down = 8, 20.0, 5.0
    how = config(group_size=count, exchange_timeout=60.0)
    network = MemoryNetwork(latency=(0.01, 0.02), bandwidth=up * MBPS, download=down * MBPS)
    swarm = await step_all(count, how, lambda index: torch.full((200_000,), float(index)), network=network)
    assert len(swarm.successes()) == count
    slower = min(up, down)
    for averager in swarm.averagers.values():
        assert 0.6 * slower < averager._meter.announced_mbps < 1.4 * slower


async def test_a_slow_link_is_measured_with_few_blocks() -> None:
    """Half a MiB would take 42 s at 0.1 Mbit/s."""
    began = trio.current_time()
    async with stream_to(BandwidthService().serve, up=0.1, down=0.1) as stream:
        found = await measure(stream)
    assert found.up_mbps == pytest.approx(0.1, rel=0.25)
    assert found.down_mbps == pytest.approx(0.1, rel=0.25)
    assert trio.current_time() - began < 4.0


async def test_a_peer_that_measures_again_and_again_hears_busy() -> None:
    network = MemoryNetwork()
    service = BandwidthService()
    async with network.transport(simulated_signer(0)) as mine, network.transport(simulated_signer(1)) as its:
        its.serve(PROTOCOL, service.serve)
        for _ in range(2):
            await measure(await open_to(mine, its))
        with pytest.raises(BusyPeerError):
            await measure(await open_to(mine, its))
        await trio.sleep(32.0)
        await measure(await open_to(mine, its))


async def test_a_silent_peer_holds_no_place_for_long() -> None:
    network = MemoryNetwork()
    service = BandwidthService()
    async with (
        network.transport(simulated_signer(0)) as mine,
        network.transport(simulated_signer(1)) as other,
        network.transport(simulated_signer(2)) as its,
    ):
        its.serve(PROTOCOL, service.serve)
        silent = [await open_to(mine, its) for _ in range(MAX_AT_ONCE)]
        for stream in silent:
            await send_message(stream, BandwidthQuestion().encode())
            assert await receive_message(stream) == BandwidthAnswer(granted=True).encode()
        with pytest.raises(BusyPeerError):
            await measure(await open_to(other, its))
        await trio.sleep(REPLY_SECONDS + 1.0)
        await measure(await open_to(other, its))


async def _send_blocks(stream: Stream, count: int) -> None:
    for _ in range(count):
        await send_message(stream, bytes(BLOCK_BYTES))


async def _send_without_end(stream: Stream) -> None:
    await receive_message(stream)
    await send_message(stream, BandwidthAnswer(granted=True).encode())
    await _send_blocks(stream, 100 * MAX_BLOCKS)


async def _send_a_long_note(stream: Stream) -> None:
    await receive_message(stream)
    await send_message(stream, BandwidthAnswer(granted=True).encode())
    await send_message(stream, bytes(BLOCK_BYTES - 1))
    await receive_message(stream)


async def _grant_something_else(stream: Stream) -> None:
    await receive_message(stream)
    await send_message(stream, pack(1, 1))
    await receive_message(stream)


async def _say_that_more_has_arrived(stream: Stream) -> None:
    await receive_message(stream)
    await send_message(stream, BandwidthAnswer(granted=True).encode())
    await send_message(stream, pack(0))
    await receive_message(stream, max_bytes=BLOCK_BYTES)
    await receive_message(stream)
    await send_message(stream, pack(MAX_BLOCKS))
    await receive_message(stream)


async def _say_that_blocks_were_lost(stream: Stream) -> None:
    await receive_message(stream)
    await send_message(stream, BandwidthAnswer(granted=True).encode())
    await send_message(stream, pack(1))
    await receive_message(stream)


@pytest.mark.parametrize(
    "serve",
    [
        _send_without_end,
        _send_a_long_note,
        _grant_something_else,
        _say_that_more_has_arrived,
        _say_that_blocks_were_lost,
    ],
)
async def test_a_hostile_server_is_refused(serve: Callable[[Stream], Awaitable[None]]) -> None:
    async with stream_to(serve) as stream:
        with pytest.raises(RemoteProtocolError):
            await measure(stream)
        await stream.reset()


async def test_a_server_that_hangs_up() -> None:
    async def hang_up(stream: Stream) -> None:
        await receive_message(stream)
        await stream.aclose()

    async with stream_to(hang_up) as stream:
        with pytest.raises(StreamBrokenError):
            await measure(stream)


async def test_an_asker_with_another_question_loses_its_stream() -> None:
    async with stream_to(BandwidthService().serve) as stream:
        await send_message(stream, pack(2))
        with pytest.raises(StreamBrokenError):
            await stream.receive_some(1)


async def test_an_asker_that_sends_without_end_loses_its_stream() -> None:
    async with stream_to(BandwidthService().serve) as stream:
        await send_message(stream, BandwidthQuestion().encode())
        assert await receive_message(stream) == BandwidthAnswer(granted=True).encode()
        while (message := await receive_message(stream, max_bytes=BLOCK_BYTES)) != pack(0):
            if message is not None and len(message) < BLOCK_BYTES:
                await send_message(stream, message)
        with pytest.raises(StreamBrokenError):
            await _send_blocks(stream, 100 * MAX_BLOCKS)
