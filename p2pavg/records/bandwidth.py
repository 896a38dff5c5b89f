"""A small measurement of the bandwidth between two peers, for ``p2pavg doctor``.

The peer that measures asks for blocks, and the other one sends them. Then the first one sends as many, and the other
one says how many have arrived. Both directions are bounded in bytes and in time, and the serving side has a budget
(:mod:`p2pavg.net.limits.bandwidth_budget`). On fast links, the window of libp2p's streams is the limit; rounds use
direct lanes, which are faster.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import trio

from p2pavg.encoding import pack, unpack
from p2pavg.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.net.framing import receive_message, send_message
from p2pavg.net.limits.bandwidth_budget import BLOCK_BYTES, MAX_BLOCKS, BandwidthBudget
from p2pavg.net.limits.sources import prefix_of
from p2pavg.net.transport import Stream

PROTOCOL = "/p2pavg/bandwidth/1"
QUESTION = pack(1)
GRANTED, BUSY = pack(1, True), pack(1, False)

SENDING_SECONDS = 1.5
"""Time for which one side sends at most, however few blocks have left."""
STREAM_SECONDS = 10.0
"""Timeout of the whole conversation. At 0.3 Mbit/s, blocks that are on their way take most of it."""

_MAX_NOTE_BYTES = 64


class BusyPeerError(StreamBrokenError):
    """The other peer has no budget left for a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """The result of a measurement."""

    up_mbps: float
    down_mbps: float
    seconds: float
    """The round trip, with the time in which the other peer begins to answer."""


class BandwidthService:
    """Answers measurements, within its budget."""

    def __init__(self) -> None:
        self._budget = BandwidthBudget()
        self._block = secrets.token_bytes(BLOCK_BYTES)  # random: some links compress

    async def serve(self, stream: Stream) -> None:
        """Serve one measurement.

        Raises:
            RemoteProtocolError: the other peer breaks the protocol.
        """
        with trio.move_on_after(STREAM_SECONDS):
            if await receive_message(stream, max_bytes=_MAX_NOTE_BYTES) != QUESTION:
                raise RemoteProtocolError("a measurement that begins with another question")
            if not self._budget.begin(trio.current_time(), stream.remote, prefix_of(stream.remote_host)):
                await send_message(stream, BUSY)
                await stream.aclose()
                return
            try:
                await send_message(stream, GRANTED)
                await _send_blocks(stream, self._block)
                count, _ = await _receive_blocks(stream)
                await send_message(stream, pack(count))
                await stream.aclose()
            finally:
                self._budget.end()


async def measure(stream: Stream) -> Bandwidth:
    """Measure the bandwidth to the peer at the other end of a new stream. The caller gives it a timeout.

    Raises:
        BusyPeerError: the other peer has no budget left.
        StreamBrokenError: the stream ended.
        RemoteProtocolError: the other peer breaks the protocol.
    """
    began = trio.current_time()
    await send_message(stream, QUESTION)
    _, granted = unpack(await _required(stream), int, bool)
    if not granted:
        raise BusyPeerError("it has measured enough for now")
    answered = trio.current_time()
    trip = answered - began
    down, last = await _receive_blocks(stream)
    sending = trio.current_time()
    sent = await _send_blocks(stream, secrets.token_bytes(BLOCK_BYTES))
    (up,) = unpack(await _required(stream), int)
    if not 0 <= up <= sent:
        raise RemoteProtocolError(f"{up} blocks have arrived, it says, and {sent} were sent")
    return Bandwidth(
        up_mbps=_mbps(up, trio.current_time() - sending - trip),
        down_mbps=_mbps(down, last - answered),
        seconds=trip,
    )


def _mbps(blocks: int, seconds: float) -> float:
    return blocks * BLOCK_BYTES * 8 / 1e6 / max(seconds, 1e-3)


async def _send_blocks(stream: Stream, block: bytes) -> int:
    """Send blocks for SENDING_SECONDS at most, and a shorter message after the last one. Return their number."""
    sent, until = 0, trio.current_time() + SENDING_SECONDS
    while sent < MAX_BLOCKS and trio.current_time() < until:
        await send_message(stream, block)
        sent += 1
    await send_message(stream, pack(sent))
    return sent


async def _receive_blocks(stream: Stream) -> tuple[int, float]:
    """Return the number of blocks until the shorter message, and the time at which the last one was complete."""
    count, last = 0, trio.current_time()
    while len(message := await _required(stream, BLOCK_BYTES)) == BLOCK_BYTES:
        count, last = count + 1, trio.current_time()
        if count > MAX_BLOCKS:
            raise RemoteProtocolError(f"more than {MAX_BLOCKS} blocks")
    if len(message) > _MAX_NOTE_BYTES:
        raise RemoteProtocolError(f"a block of {len(message)} bytes")
    return count, last


async def _required(stream: Stream, max_bytes: int = _MAX_NOTE_BYTES) -> bytes:
    message = await receive_message(stream, max_bytes=max_bytes)
    if message is None:
        raise StreamBrokenError(f"{stream.remote} closed the stream in a measurement")
    return message
