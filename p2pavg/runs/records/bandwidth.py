"""A small measurement of the bandwidth between two peers, for ``p2pavg doctor``.

The peer that measures asks; the other one sends blocks, and then receives as many. BlockNote come in rounds of 1, 2, 4,
8 and 16, and the receiver confirms each round. The sender begins no further round after SENDING_SECONDS, so a slow link
is not clogged by blocks that wait in buffers. The last round counts.

The serving side has a budget (:mod:`p2pavg.net.limits.rate`). On links that are fast or far, the window of
libp2p's streams is the limit; rounds use direct lanes, which are faster.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import trio

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.base.hosts import prefix_of
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.base.messages import Count, Message
from p2pavg.net.limits.rate import BLOCK_BYTES, MAX_BLOCKS, ROUNDS, BandwidthBudget
from p2pavg.net.transport import Stream, receive_message, send_message

PROTOCOL = "/p2pavg/bandwidth/1"

SENDING_SECONDS = 0.5
"""Time after which one side begins no further round. At 0.1 Mbit/s, the first round takes 1.3 s."""

_MAX_NOTE_BYTES = 64


class BandwidthQuestion(Message, frozen=True, tag=1):
    """The beginning of a measurement."""


class BandwidthAnswer(Message, frozen=True, tag=1):
    """The answer to it."""

    granted: bool


class BlockNote(Message, frozen=True):
    """A note of the blocks of one round that were sent, or have arrived; 0 after the last round."""

    count: Count


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
        with trio.move_on_after(REPLY_SECONDS):
            BandwidthQuestion.decode(await _required(stream))
            if not self._budget.begin(trio.current_time(), stream.remote, prefix_of(stream.remote_host)):
                await send_message(stream, BandwidthAnswer(granted=False).encode())
                await stream.aclose()
                return
            try:
                await send_message(stream, BandwidthAnswer(granted=True).encode())
                await _send_rounds(stream, self._block)
                await _receive_rounds(stream)
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
    await send_message(stream, BandwidthQuestion().encode())
    if not BandwidthAnswer.decode(await _required(stream)).granted:
        raise BusyPeerError("it has measured enough for now")
    trip = trio.current_time() - began
    down = await _receive_rounds(stream)
    up = await _send_rounds(stream, secrets.token_bytes(BLOCK_BYTES))
    return Bandwidth(up_mbps=up.mbps(trip), down_mbps=down.mbps(trip), seconds=trip)


@dataclass(frozen=True, slots=True)
class _Round:
    blocks: int = 0
    seconds: float = 0.0
    """The time that the blocks took, and a round trip."""

    def mbps(self, trip: float) -> float:
        # A busy machine answers late: the first round trip may be longer than a whole round.
        seconds = max(self.seconds - trip, self.seconds / 2, 1e-6)
        return self.blocks * BLOCK_BYTES * 8 / 1e6 / seconds


async def _send_rounds(stream: Stream, block: bytes) -> _Round:
    """Send blocks in rounds, and a note that there are no more. Return the last round."""
    last, began = _Round(), trio.current_time()
    for blocks in ROUNDS:
        start = trio.current_time()
        if last.blocks and start - began > SENDING_SECONDS:
            break
        for _ in range(blocks):
            await send_message(stream, block)
        await send_message(stream, BlockNote(blocks).encode())
        arrived = BlockNote.decode(await _required(stream)).count
        if arrived != blocks:
            raise RemoteProtocolError(f"{arrived} blocks have arrived, it says, and {blocks} were sent")
        last = _Round(blocks, trio.current_time() - start)
    await send_message(stream, BlockNote(0).encode())
    return last


async def _receive_rounds(stream: Stream) -> _Round:
    """Confirm the blocks of each round, until the other side sends no more. Return the last round."""
    last, total = _Round(), 0
    while True:
        start, blocks = trio.current_time(), 0
        while len(message := await _required(stream, BLOCK_BYTES)) == BLOCK_BYTES:
            blocks, total = blocks + 1, total + 1
            if total > MAX_BLOCKS:
                raise RemoteProtocolError(f"more than {MAX_BLOCKS} blocks")
        if len(message) > _MAX_NOTE_BYTES:
            raise RemoteProtocolError(f"a block of {len(message)} bytes")
        told = BlockNote.decode(message).count
        if told != blocks:
            raise RemoteProtocolError(f"{told} blocks were sent, it says, and {blocks} have arrived")
        if not blocks:
            return last
        last = _Round(blocks, trio.current_time() - start)
        await send_message(stream, BlockNote(blocks).encode())


async def _required(stream: Stream, max_bytes: int = _MAX_NOTE_BYTES) -> bytes:
    message = await receive_message(stream, max_bytes=max_bytes)
    if message is None:
        raise StreamBrokenError(f"{stream.remote} closed the stream in a measurement")
    return message
