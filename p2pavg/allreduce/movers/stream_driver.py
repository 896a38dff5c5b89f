"""The parts of an attempt over a stream: a task of the event loop, which leaves work to threads.

Contributions and averages go over a stream each, since averages that wait for other members must not hold up
contributions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio

from p2pavg.allreduce.carry import IncomingPart
from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.events import BytesArrived
from p2pavg.allreduce.messages import FRAME_BYTES, Lane, part_frame
from p2pavg.allreduce.movers.moves import AwaitReady, Move, ReceiveIndex, ReceivePart, RunWork, SendPart
from p2pavg.allreduce.signals import Signals
from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.net.transport import Buffer, Stream, receive_exactly_into
from p2pavg.telemetry.events import Way

PIECE_BYTES = 32 * 1024


class Precedence:
    """The contributions that one member sends over streams, and the averages that wait for them.

    Other members wait for contributions, and an average is worth nothing if a member that it counts is lost. On direct
    lanes, :class:`~p2pavg.allreduce.movers.lane_driver.Turns` sees to it.
    """

    def __init__(self) -> None:
        self._left = 0
        self._moved = 0
        self._stuck = False
        self._ended = trio.Event()

    @contextmanager
    def contributing(self) -> Iterator[None]:
        """Let averages wait for as long as the block runs."""
        self._left += 1
        try:
            yield
        finally:
            self._left -= 1
            self._ended.set()
            self._ended = trio.Event()

    def moved(self) -> None:
        """Note that a piece of a contribution has gone."""
        self._moved += 1

    async def until_free(self) -> None:
        """Wait until no contribution is being sent, or one is stuck."""
        while self._left and not self._stuck:
            before = self._moved
            # If no contribution moves for so long, a receiver does not read. The averages for the others go on then.
            with trio.move_on_after(2 * GLANCE_SECONDS) as scope:
                await self._ended.wait()
            self._stuck = scope.cancelled_caught and self._moved == before


class StreamBytes:
    """Counts bytes by the way of the stream that has carried them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.relayed: set[str] = set()
        """Ids of members whose streams were relayed."""

    @property
    def total(self) -> int:
        """Bytes on all streams."""
        return self._counts.total()

    def with_lanes(self, count: int) -> dict[str, int]:
        """Return all bytes by :class:`~p2pavg.telemetry.events.Way`; ``count`` is that of direct lanes."""
        return {str(Way.LANE): count, **self._counts}

    def add(self, stream: Stream, count: int) -> None:
        """Count bytes that a stream has carried."""
        self._counts[str(Way.RELAYED if stream.relayed else Way.STREAM)] += count
        if stream.relayed:
            self.relayed.add(stream.remote)


class StreamUse:
    """One attempt's use of one stream.

    Args:
        counts: the bytes of all streams that go this way.
        precedence: of contributions to averages, which this member sends on other streams.
    """

    def __init__(
        self,
        stream: Stream,
        context: RunContext,
        signals: Signals,
        counts: StreamBytes,
        precedence: Precedence | None = None,
    ) -> None:
        self._stream = stream
        self._context = context
        self._signals = signals
        self._counts = counts
        self._precedence = precedence

    async def move(self, move: Move) -> Any:
        """Carry out one move; return what came of it.

        Raises:
            StreamBrokenError: the stream broke.
        """
        match move:
            case RunWork(work):
                return await self._context.run_in_thread(work)
            case AwaitReady(index, receives):
                if receives:
                    self._signals.note_owes(self._stream.remote, False)
                await self._signals.until_ready(index)
                if receives:
                    self._signals.note_owes(self._stream.remote, True)
            case SendPart(step, payload, trailer, milestone):
                contributes = step.kind is Lane.CONTRIBUTIONS
                # Averages come after contributions: other members need the latter to make averages of their own.
                if self._precedence is not None and not contributes:
                    await self._precedence.until_free()
                await self._send(step.part.index, payload, contributes=contributes)
                if trailer:
                    await self._stream.send_all(trailer)
                    self._counts.add(self._stream, len(trailer))
                if milestone is not None:
                    self._signals.reached(milestone)
            case ReceiveIndex():
                frame = bytearray(FRAME_BYTES)
                await receive_exactly_into(self._stream, memoryview(frame), self._came)
                return int.from_bytes(frame, "big")
            case ReceivePart(coming, follow, _):
                return await self._receive(coming, bytearray(follow))
        return None

    async def _send(self, index: int, payload: Buffer, *, contributes: bool) -> None:
        await trio.sleep(self._context.upload.delay(len(payload)))
        await self._stream.send_all(part_frame(index))
        self._counts.add(self._stream, FRAME_BYTES)
        view = memoryview(payload)
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            await self._stream.send_all(piece)
            # Piece by piece: parts to many members end together, and would look like a link that is much faster.
            self._counts.add(self._stream, len(piece))
            if self._precedence is not None and contributes:
                self._precedence.moved()

    async def _receive(self, coming: IncomingPart, trailer: bytearray) -> bytes:
        rest = coming.rest
        # Before the read: what is not read holds the sender back, and that is what a download limit can do.
        await trio.sleep(self._context.download.delay(len(rest)))

        def came(count: int) -> None:
            coming.add(count)
            self._came(count)

        await receive_exactly_into(self._stream, rest, came)
        await receive_exactly_into(self._stream, memoryview(trailer), self._came)
        return bytes(trailer)

    def _came(self, count: int) -> None:
        self._counts.add(self._stream, count)
        self._signals.emit(BytesArrived(self._stream.remote, count))
