"""The parts of an attempt over direct lanes: blocking code, one thread a lane.

What :mod:`p2pavg.allreduce.sender` and :mod:`p2pavg.allreduce.receiver` do with a stream on the event loop is done
here with a :class:`DirectLane`: the same parts in the same order, encoded, decoded and averaged in the thread that
moves them. So nothing waits for the event loop, and each thread works on what its core's cache still holds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from p2pavg.allreduce.errors import BadContributionError
from p2pavg.allreduce.inputs import IncomingPart
from p2pavg.allreduce.messages import FRAME_BYTES, Lane, LaneHeader, part_frame
from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.allreduce.part_schedule import Step
from p2pavg.allreduce.proofs import trailer_bytes
from p2pavg.allreduce.turns import Turns
from p2pavg.allreduce.values import AttemptData, check_index
from p2pavg.base.errors import StreamBrokenError
from p2pavg.group.milestones import Milestone
from p2pavg.group.shares import SharePart
from p2pavg.net.framing import LENGTH_BYTES
from p2pavg.net.limits.rate import RateLimit
from p2pavg.net.transport import Buffer, DirectLane

# That a lane sends in its turn, 3 ms of a link of 100 Mbit/s, and that the system may hold of it afterwards. With more
# the lanes compete in the system instead, and at the end some links carry little while others are still full.
TURN_BYTES = 32 * 1024
LIMITED_TURN_BYTES = 64 * 1024  # under a limit
UNSENT_IN_TURNS_BYTES = 16 * 1024
UNSENT_BYTES = 128 * 1024
COMING_BYTES = 64 * 1024
"""Of a part that is being received, up to so many bytes may come for nothing if the attempt ends."""
NEXT_PART_SECONDS = 0.2


class LaneListener(Protocol):
    """Listener of a lane. Its methods are called in the lane's thread."""

    def owes(self, peer_id: str, yes: bool) -> None:
        """A member's contribution is waited for, or no longer."""

    def reached(self, milestone: Milestone) -> None:
        """A part has been sent."""

    def progressed(self) -> None:
        """A part has come."""

    def blame(self, peer_id: str, error: Exception) -> None:
        """A part that a member sent cannot be averaged."""


class DirectUse:
    """One attempt's use of one direct lane. Its methods block; each runs in a thread of its own."""

    def __init__(
        self,
        lane: DirectLane,
        values: AttemptData,
        limit: RateLimit,
        hears: LaneListener,
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
        self._hears = hears
        self._turns = turns
        self._place = place
        self._phase = 0
        self._given = 0
        self._stopped = threading.Event()
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

    # ------------------------------------------------------------------ out

    def send_parts(self, header: LaneHeader, steps: Sequence[Step]) -> None:
        """Send contributions to a member's tasks, then averages, each as soon as it is ready.

        Args:
            steps: as :func:`~p2pavg.allreduce.part_schedule.outgoing` returns them.

        Raises:
            StreamBrokenError: the lane broke.
        """
        self._begin(header)
        values, room = self._values, None
        for step in steps:
            if step.kind is Lane.CONTRIBUTIONS:
                if step.after is not None:  # the mean of a site
                    self._await_ready(step.after)
                    payload = values.sum_of_site(step.after)
                else:
                    room = room or values.room(step.part)
                    payload = values.contribution(self.lane.remote, step.part, room)
                self._send_part(step.part, header.begin.of(step.part, payload))
                if step.last:
                    self._send_trailer(values.trailer(step.kind, self.lane.remote))
                self._hears.reached(Milestone.CONTRIBUTION_SENT)
            else:
                # Contributions of all lanes have priority over averages: every reducer waits for
                # contributions.
                self._phase = 1
                if step.after is not None:
                    self._await_ready(step.after)
                self._send_part(step.part, values.encoded(step.reducer, step.part.index))
                if step.last:
                    self._send_trailer(values.trailer(step.kind, step.reducer))
                self._hears.reached(Milestone.AVERAGE_SENT)
        self.finished = True

    def send_share(self, header: LaneHeader, reducer: str, parts: Sequence[SharePart]) -> None:
        """Send another reducer's share as it came. Raises StreamBrokenError."""
        self._phase = 1
        self._begin(header)
        for part in parts:
            self._send_part(part, self._values.encoded(reducer, part.index))
        self._send_trailer(self._values.trailer(Lane.AVERAGES, reducer))
        self.finished = True

    def _begin(self, header: LaneHeader) -> None:
        self.lane.keep_unsent_below(UNSENT_BYTES if self._turns is None else UNSENT_IN_TURNS_BYTES)
        message = header.encode()
        self.lane.send(len(message).to_bytes(LENGTH_BYTES, "big") + message)

    def _send_part(self, part: SharePart, payload: Buffer) -> None:
        self.lane.send(part_frame(part.index))
        for paced in self._paced(memoryview(payload)):
            self._pause(len(paced))
            for piece in _pieces(paced, self._turn_bytes):
                self._send_piece(piece)
        self.moved += FRAME_BYTES + len(payload)

    def _send_trailer(self, trailer: bytes) -> None:
        if trailer:
            self.lane.send(trailer)
            self.moved += len(trailer)

    def _send_piece(self, piece: memoryview) -> None:
        if self._turns is None:
            self.lane.send(piece)
        else:
            self.lane.wait_for_room()  # a slow receiver does not keep other lanes from their turns
            with self._turns.turn((self._phase, self._given, self._place)):
                self.lane.send(piece)
        self._given += len(piece)

    # ------------------------------------------------------------------ in

    def receive_parts(self, steps: Sequence[Step], begin: ResumeMark = START) -> None:
        """Receive what :meth:`send_parts` of the other end sends.

        Args:
            steps: as :func:`~p2pavg.allreduce.part_schedule.incoming` returns them.
            begin: where the contributions go on, if some of them came in an earlier attempt.

        Raises:
            StreamBrokenError: the lane broke.
            RemoteProtocolError: the member sent what none sends.
        """
        for step in steps:
            check_index(self._receive_index(), step.part)
            if step.kind is Lane.CONTRIBUTIONS:
                self._receive_contribution(step, begin)
            else:
                payload, trailer = self._receive_part(step, self._memory_of(step.part))
                self._values.receive_average(step.reducer, step.part, payload, trailer)
            self._hears.progressed()

    def receive_share(self, reducer: str, parts: Sequence[SharePart]) -> None:
        """Receive the share of a reducer that is gone. Raises what :meth:`receive_parts` raises."""
        payloads: list[Buffer] = []
        for part in parts:
            check_index(self._receive_index(), part)
            payloads.append(self._receive_payload(self._memory_of(part)))
        trailer = self._receive_trailer(Lane.AVERAGES)
        self._acknowledge()
        self._values.receive_share(reducer, payloads, trailer)
        self._hears.progressed()

    def _receive_contribution(self, step: Step, begin: ResumeMark) -> None:
        remote, values = self.lane.remote, self._values
        # Silence counts in seconds: the event loop need not hear of less.
        if step.after is not None and not self._await_ready(step.after, NEXT_PART_SECONDS):
            self._hears.owes(remote, False)
            self._await_ready(step.after)
            self._hears.owes(remote, True)
        # It came in an earlier attempt, to the end. What comes again is read, and does not count twice.
        comes_again = values.has(remote, step.kind, step.part.index)
        payload, trailer = self._receive_part(step, values.carry.receive(remote, step.part, begin))
        complete = not comes_again and values.contributed(remote, step.part.index, payload, trailer)
        if step.last:
            self._hears.owes(remote, False)
        if complete:
            try:
                values.average(step.part.index)
            except BadContributionError as error:
                self._hears.blame(error.peer_id, error)

    def _receive_index(self) -> int:
        index = bytearray(FRAME_BYTES)
        self.lane.receive_into(memoryview(index))
        return int.from_bytes(index, "big")

    def _receive_part(self, step: Step, coming: IncomingPart) -> tuple[Buffer, bytes]:
        """Return a part, and the bytes that follow it if it is the last one of its kind."""
        payload = self._receive_payload(coming)
        trailer = self._receive_trailer(step.kind) if step.last else b""
        if step.ends:
            self._acknowledge()
        return payload, trailer

    def _receive_trailer(self, kind: Lane) -> bytes:
        trailer = bytearray(trailer_bytes(self._values.proofs, kind))
        if trailer:
            self.lane.receive_into(memoryview(trailer))
            self.moved += len(trailer)
        return bytes(trailer)

    def _acknowledge(self) -> None:
        # Before the acknowledgement: from then on the sender may use the lane again, and `stop` must not
        # abort it.
        self.finished = True
        self.lane.acknowledge()

    def _memory_of(self, part: SharePart) -> IncomingPart:
        return IncomingPart(part.index, self._values.buffer(part))

    def _receive_payload(self, coming: IncomingPart) -> Buffer:
        rest = coming.rest
        for paced in self._paced(rest):
            self._pause(len(paced))
            for piece in _pieces(paced, COMING_BYTES):
                self.lane.receive_into(piece)
                # Noted piece by piece, so that a next attempt goes on in the middle of a part.
                coming.add(len(piece))
        self.moved += FRAME_BYTES + len(rest)
        return coming.payload

    # ------------------------------------------------------------------ both

    def _paced(self, data: memoryview) -> list[memoryview]:
        """Return the pieces of a part between which this member pauses under a limit."""
        return _pieces(data, None if self._limit.unlimited else self._limit.piece_bytes)

    @property
    def _turn_bytes(self) -> int | None:
        """Bytes that go in one turn, if there are turns."""
        if self._turns is None:
            return None
        return TURN_BYTES if self._limit.unlimited else LIMITED_TURN_BYTES

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


def _pieces(data: memoryview, size: int | None) -> list[memoryview]:
    """Cut ``data`` into pieces of ``size`` bytes, the last of them shorter; not at all if it is ``None``."""
    step = len(data) if size is None else size
    return [data[start : start + step] for start in range(0, len(data), step)] if data else []
