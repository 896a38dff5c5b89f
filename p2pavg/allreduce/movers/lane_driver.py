"""The parts of an attempt over direct lanes: in one thread a lane, or on the event loop if they are few.

In a thread, blocking code moves the parts. They are encoded, decoded and averaged there. So nothing waits for the event
loop, and each thread works on what its core's cache still holds.

Starting a thread and waking it takes longer than a few kilobytes do. So where a whole lane carries no more than that, a
task of the event loop moves its parts. What is ready goes in one write. Nothing blocks there, whatever the other end
does. Between processes on one machine this holds for far more bytes: no link carries them, so no turns are needed
either.

Both move the same bytes in the same order (:mod:`p2pavg.allreduce.movers.moves`), and each end may use another way.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import trio

from p2pavg.allreduce.carry import IncomingPart
from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.messages import FRAME_BYTES, Lane, LaneHeader, Step, part_frame
from p2pavg.allreduce.movers.moves import (
    AwaitReady,
    Move,
    Moves,
    ReceiveIndex,
    ReceivePart,
    RunWork,
    SendPart,
    carry_out,
    sending,
)
from p2pavg.allreduce.signals import Signals
from p2pavg.allreduce.values import AttemptData
from p2pavg.base.errors import StreamBrokenError
from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.group.milestones import Milestone
from p2pavg.group.shares import SharePart
from p2pavg.net.limits.rate import RateLimit
from p2pavg.net.transport import LENGTH_BYTES, Buffer, DirectLane

# The order in which lanes that send at the same time take turns, piece by piece.
#
# Where links are the bottleneck, free competition wastes them: of several connections that share a link some get more
# of it and are done early, and at the end some links carry little while others are still full. If each member sends to
# the others in turn, beginning with the one after it, every member receives from one other at a time, and all links are
# busy until the last byte. That is the schedule of a pairwise exchange; Thakur, Rabenseifner and Gropp, "Optimization
# of Collective Communication Operations in MPICH", 2005, section 4.

Rank: TypeAlias = tuple[int, ...]
"""Order of lanes: contributions before averages, because other members wait for contributions; then the lane that has
sent least; then the member that comes first after this one. No two waiting lanes have the same rank."""


class Turns:
    """Lets one thread send at a time. Safe to use from any thread.

    Args:
        clock: seconds that do not run backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[Rank] = []
        self._holder: object = None
        self._until = 0.0

    @contextmanager
    def turn(self, rank: Rank) -> Iterator[None]:
        """Wait for this thread's turn, and have it for the block, or until others have waited for too long."""
        me = object()
        with self._changed:
            heapq.heappush(self._waiting, rank)
            while self._holder is not None or self._waiting[0] != rank:
                left = self._until - self._clock() if self._holder is not None else None
                if left is not None and left <= 0:
                    self._holder = None
                    self._changed.notify_all()
                    continue
                self._changed.wait(left)
            heapq.heappop(self._waiting)
            # A member that has stopped delays the other lanes no longer than this.
            self._holder, self._until = me, self._clock() + GLANCE_SECONDS
        try:
            yield
        finally:
            with self._changed:
                if self._holder is me:
                    self._holder = None
                if self._waiting:
                    self._changed.notify_all()


# That a lane sends in its turn, 3 ms of a link of 100 Mbit/s, and that the system may hold of it afterwards. With more
# the lanes compete in the system instead, and at the end some links carry little while others are still full.
TURN_BYTES = 32 * 1024
LIMITED_TURN_BYTES = 64 * 1024  # under a limit
UNSENT_IN_TURNS_BYTES = 16 * 1024
UNSENT_BYTES = 128 * 1024
COMING_BYTES = 64 * 1024
"""Of a part that is being received, up to so many bytes may come for nothing if the attempt ends."""
SMALL_ELEMENTS = 4096
"""A lane that carries at most so many values needs no thread, and no turn: as fp32 they are half as long as a turn."""
SMALL_BYTES = 4 * SMALL_ELEMENTS
LOCAL_ELEMENTS = 262_144
"""The same between processes on one machine. As fp32 these are 1 MiB, half of it each way. To encrypt them takes less
than a millisecond."""
LOCAL_SUM = 2_097_152
"""The same for all members together, so that the average of a part takes about a millisecond. With a sparse codec or a
robust rule it would take longer."""


def is_small(
    lane: DirectLane, parts: Iterable[SharePart], members: int, context: RunContext, limit: RateLimit
) -> bool:
    """Return whether the event loop may move these parts of one lane.

    Args:
        members: of the attempt.
        limit: of the direction in which they go.
    """
    quick = not context.codec.is_sparse and context.aggregation.robust is None
    # Of a program's own event loop, torch may use more threads than this. They would compete with its training loop.
    local = lane.is_local and quick and torch.get_num_threads() == 1
    most = max(min(LOCAL_ELEMENTS, LOCAL_SUM // members), SMALL_ELEMENTS) if local else SMALL_ELEMENTS
    return limit.unlimited and sum(part.elements for part in parts) <= most


class DirectUse:
    """One attempt's use of one direct lane: of its methods, either those for a thread or those for a task are used."""

    def __init__(
        self,
        lane: DirectLane,
        values: AttemptData,
        limit: RateLimit,
        signals: Signals,
        turns: Turns | None = None,
        place: int = 0,
    ) -> None:
        self.lane = lane
        self.moved = 0
        """Bytes of parts that have gone over the lane."""
        self._before = (lane.bytes_sent, lane.bytes_received)  # of former uses
        self.noted = lane.bytes_received
        """Of the bytes that the lane has received, those that were reported."""
        self._values = values
        self._limit = limit
        self._signals = signals
        self._turns = turns
        self._place = place
        self._given = 0
        self._stopped = threading.Event()
        # In a task: what goes in the next write, and the milestones that are reached then.
        self._ready = bytearray()
        self._milestones: list[Milestone] = []
        self.finished = False
        """True when everything was sent, or has come: the lane may be used again."""

    @property
    def sent(self) -> int:
        """Bytes that have left over the lane, without what the system still holds."""
        return max(0, self.lane.bytes_sent - self._before[0] - self.lane.unsent())

    @property
    def received(self) -> int:
        """Bytes that have come over the lane."""
        return self.lane.bytes_received - self._before[1]

    def stop(self) -> None:
        """Make it end soon, in the midst of a part too, and then the lane with it. From any thread."""
        self._stopped.set()
        # A lane whose bytes are all there stays whole: the other side may keep it for the next round.
        if not self.finished:
            self.lane.abort()
        # Threads that wait for a part look whether they are to stop only when they are woken.
        with self._values.changed:
            self._values.changed.notify_all()

    # ------------------------------------------------------------------ in a thread

    def send_parts(self, header: LaneHeader, steps: Sequence[Step]) -> None:
        """Send what a header announces: see :func:`~p2pavg.allreduce.movers.moves.sending`.

        Raises:
            StreamBrokenError: the lane broke.
        """
        self.lane.keep_unsent_below(UNSENT_BYTES if self._turns is None else UNSENT_IN_TURNS_BYTES)
        message = header.encode()
        self.lane.send(len(message).to_bytes(LENGTH_BYTES, "big") + message)
        passes_on = header.lane is Lane.PASSED_ON
        moves = sending(
            self._values, self.lane.remote, steps, header.begin, passes_on=passes_on, in_one_room=True
        )
        self.carry_out(moves)
        self.finished = True

    def carry_out(self, moves: Moves) -> None:
        """Carry moves out, one after the other.

        Raises:
            StreamBrokenError: the lane broke.
            RemoteProtocolError: the member sent what none sends.
        """
        result = None
        while True:
            try:
                move = moves.send(result)
            except StopIteration:
                return
            result = self._carry_out(move)

    def _carry_out(self, move: Move) -> Any:
        match move:
            case RunWork(work):
                return work()
            case AwaitReady(index, receives):
                # Silence counts in seconds: the event loop need not hear of less.
                if not self._await_ready(index, GLANCE_SECONDS if receives else None):
                    self._signals.owes(self.lane.remote, False)
                    self._await_ready(index)
                    self._signals.owes(self.lane.remote, True)
            case SendPart(step, payload, trailer, milestone):
                # Contributions of all lanes go before averages: every reducer waits for contributions.
                self._send_part(step.part, payload, trailer, phase=int(step.kind is not Lane.CONTRIBUTIONS))
                if milestone is not None:
                    self._signals.reached(milestone)
            case ReceiveIndex():
                frame = bytearray(FRAME_BYTES)
                self.lane.receive_into(memoryview(frame))
                return int.from_bytes(frame, "big")
            case ReceivePart(coming, follow, ends):
                return self._receive_part(coming, bytearray(follow), ends)
        return None

    def _send_part(self, part: SharePart, payload: Buffer, trailer: bytes, phase: int) -> None:
        turn_bytes = None
        if self._turns is not None:
            turn_bytes = TURN_BYTES if self._limit.unlimited else LIMITED_TURN_BYTES
        self.lane.send(part_frame(part.index))
        for paced in self._paced(memoryview(payload)):
            self._pause(len(paced))
            for piece in _pieces(paced, turn_bytes):
                self._send_piece(piece, phase)
        if trailer:
            self.lane.send(trailer)
        self.moved += FRAME_BYTES + len(payload) + len(trailer)

    def _send_piece(self, piece: memoryview, phase: int) -> None:
        if self._turns is None:
            self.lane.send(piece)
        else:
            self.lane.wait_for_room()  # a slow receiver does not keep other lanes from their turns
            with self._turns.turn((phase, self._given, self._place)):
                self.lane.send(piece)
        self._given += len(piece)

    def _receive_part(self, coming: IncomingPart, trailer: bytearray, ends: bool) -> bytes:
        rest = coming.rest
        for paced in self._paced(rest):
            self._pause(len(paced))
            for piece in _pieces(paced, COMING_BYTES):
                self.lane.receive_into(piece)
                # Noted piece by piece, so that a next attempt goes on in the middle of a part.
                coming.add(len(piece))
        if trailer:
            self.lane.receive_into(memoryview(trailer))
        self.moved += FRAME_BYTES + len(rest) + len(trailer)
        if ends:
            # Before the acknowledgement: from then on the sender may use the lane again, and `stop` must not abort it.
            self.finished = True
            self.lane.acknowledge()
        return bytes(trailer)

    def _paced(self, data: memoryview) -> list[memoryview]:
        """Return the pieces of a part between which this member pauses under a limit."""
        return _pieces(data, None if self._limit.unlimited else self._limit.piece_bytes)

    def _pause(self, count: int) -> None:
        seconds = self._limit.delay(count)
        if seconds and self._stopped.wait(seconds):
            raise StreamBrokenError("the attempt is over")

    def _await_ready(self, index: int, seconds: float | None = None) -> bool:
        """Wait until a part is averaged, for some seconds at most; return whether it is."""
        values = self._values
        with values.changed:
            values.changed.wait_for(lambda: values.is_ready(index) or self._stopped.is_set(), seconds)
            # The part may be ready too. An attempt that is over has no use for it.
            if self._stopped.is_set():
                raise StreamBrokenError("the attempt is over")
            return values.is_ready(index)

    # ------------------------------------------------------------------ in a task, which drops the lane if cancelled
    #
    # :func:`~p2pavg.allreduce.movers.moves.carry_out` receives by :meth:`move`.

    async def send_small(self, header: LaneHeader, steps: Sequence[Step]) -> None:
        """Send what :meth:`send_parts` sends.

        Raises:
            StreamBrokenError: the lane broke.
        """
        message = header.encode()
        self.lane.keep_unsent_below(UNSENT_BYTES)
        self._ready += len(message).to_bytes(LENGTH_BYTES, "big") + message
        await carry_out(sending(self._values, self.lane.remote, steps, header.begin), self)
        await self._write()
        self.finished = True

    async def move(self, move: Move) -> Any:
        """Carry out one move; return what came of it. What is sent goes once another member is waited for."""
        match move:
            case RunWork(work):
                return work()
            case AwaitReady(index, receives) if not self._values.is_ready(index):
                await self._write()
                if receives:
                    self._signals.owes(self.lane.remote, False)
                await self._signals.until_ready(index)
                if receives:
                    self._signals.owes(self.lane.remote, True)
            case SendPart(step, payload, trailer, milestone):
                self._ready += b"".join((part_frame(step.part.index), payload, trailer))
                self.moved += FRAME_BYTES + len(payload) + len(trailer)
                if milestone is not None:
                    self._milestones.append(milestone)
            case ReceiveIndex():
                return int.from_bytes(await self.lane.receive_exactly(FRAME_BYTES), "big")
            case ReceivePart(coming, follow, ends):
                return await self._take_part(coming, follow, ends)
        return None

    async def _write(self) -> None:
        """Send what is ready, in one write. A milestone is reached when its part has left."""
        data, self._ready = self._ready, bytearray()
        if data:
            await self.lane.send_from_loop(data)
        reached, self._milestones = self._milestones, []
        for milestone in reached:
            self._signals.reached(milestone)

    async def _take_part(self, coming: IncomingPart, follow: int, ends: bool) -> bytes:
        rest = coming.rest
        filled = 0
        while filled < len(rest):
            found = await self.lane.receive_some(min(len(rest) - filled, COMING_BYTES))
            rest[filled : filled + len(found)] = found
            filled += len(found)
            coming.add(len(found))
        trailer = await self.lane.receive_exactly(follow)
        self.moved += FRAME_BYTES + len(rest) + follow
        if ends:
            await self.lane.acknowledge_from_loop()
            self.finished = True  # not before: if this is cancelled, the sender waits for the acknowledgement
        if len(coming.payload) > SMALL_BYTES:
            await trio.lowlevel.checkpoint()  # other tasks have their turn
        return trailer


def _pieces(data: memoryview, size: int | None) -> list[memoryview]:
    """Cut ``data`` into pieces of ``size`` bytes, the last of them shorter; not at all if it is ``None``."""
    step = len(data) if size is None else size
    return [data[start : start + step] for start in range(0, len(data), step)] if data else []
