"""Carries out one all-reduce: opens lanes, moves parts, averages its own share, and says so when it cannot.

Butterfly: every contributor sends each reducer the parts of its share; the reducer averages a part as soon as its last
contribution is in, encodes the average once, and sends those bytes to every contributor. What is owed, and what a loss
means, is decided in :mod:`p2pavg.allreduce.reduction`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import trio

from p2pavg.allreduce.lobby import ExpectedGroup, InboundLane
from p2pavg.allreduce.messages import (
    DONE_FRAME,
    FRAME_BYTES,
    PROTOCOL,
    Abort,
    Kind,
    Lane,
    LaneHeader,
    abort_frame,
    encode_header,
    part_frame,
    receive_abort,
    receive_index,
    receive_kind,
)
from p2pavg.allreduce.partition import Part
from p2pavg.allreduce.reduction import BadContributionError, Contribution, Ledger, Verdict, average_part
from p2pavg.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.matchmaking.roster import Candidate, Roster
from p2pavg.net.framing import receive_exactly_into, send_message
from p2pavg.net.transport import Stream, Transport
from p2pavg.workers import RunInThread
from p2pavg_compression import Codec, CodecError

if TYPE_CHECKING:
    # libp2p installs trio-typing, whose stubs mypy prefers to trio's own.
    from trio_typing import TaskStatus

logger = logging.getLogger(__name__)

# After this member has everything, it goes on serving the others in the background for this long at least.
TAIL_SECONDS = 5.0
ABORT_SECONDS = 1.0
# Parts of each contributor that may wait for the slowest one: 8 MiB of fp32.
MAX_WAITING_PARTS = 8
OPEN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an exchange went: ``verdict`` is ``None`` when ``averaged`` is the group's average."""

    verdict: Verdict | None
    averaged: torch.Tensor
    bytes_sent: int
    bytes_received: int


class Exchange:
    """One member's side of one group's all-reduce.

    Args:
        vector: float32, the length of the roster's shares together, on any device; this member's weighted mean. Not
            changed. An auxiliary has none.
        group: the same group's inbound lanes; closed at the end.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        roster: Roster,
        group: ExpectedGroup,
        codec: Codec,
        vector: torch.Tensor | None,
        timeout: float,
        run_in_thread: RunInThread,
    ) -> None:
        self._transport = transport
        self._roster = roster
        self._group = group
        self._codec = codec
        self._vector = vector
        self._timeout = timeout
        self._in_thread = run_in_thread
        self._me = transport.peer_id
        self._ledger = Ledger(roster, self._me, codec.granularity)
        self._own_parts = self._ledger.parts[self._me]
        # An auxiliary holds its own share only; everybody else the whole vector.
        self._offset = 0 if vector is not None else (self._own_parts[0].start if self._own_parts else 0)
        length = sum(roster.shares) if vector is not None else roster.shares[roster.position(self._me)]
        self._averaged = torch.empty(length, dtype=torch.float32)
        self._pending: list[dict[str, bytearray]] = [{} for _ in self._own_parts]
        self._encoded: list[memoryview] = [memoryview(b"")] * len(self._own_parts)
        self._ready = [trio.Event() for _ in self._own_parts]
        self._over = trio.Event()
        self._verdict: Verdict | None = None
        self._bytes_sent = 0
        self._bytes_received = 0
        self._inbound: list[InboundLane] = []
        self._tail: tuple[trio.CancelScope, ...] = ()

    async def run(self, *, task_status: TaskStatus[Outcome] = trio.TASK_STATUS_IGNORED) -> None:
        """Start with ``nursery.start``: returns the outcome, then serves the others until they have theirs too.

        From the outcome on, ``vector`` is not read any more.
        """
        try:
            async with trio.open_nursery() as senders, trio.open_nursery() as receivers:
                receivers.start_soon(self._accept_lanes, receivers)
                for member in self._roster.members:
                    if member.peer_id != self._me:
                        self._start_sending(senders, member)
                self._check_complete()
                deadline = trio.current_time() + self._timeout
                with trio.move_on_at(deadline):
                    await self._over.wait()
                if not self._over.is_set():
                    self._fail(self._ledger.overdue(self._timeout))
                task_status.started(self._outcome())
                self._let_go()
                if self._verdict is not None:
                    receivers.cancel_scope.cancel()
                    senders.start_soon(self._abort_inbound, self._verdict)
                # Others may be slower than this member, and have as long as it had.
                end = max(deadline, trio.current_time() + TAIL_SECONDS)
                if self._verdict is not None:
                    end = trio.current_time() + ABORT_SECONDS
                senders.cancel_scope.deadline = receivers.cancel_scope.deadline = end
                self._tail = (senders.cancel_scope, receivers.cancel_scope)
        finally:
            for lane in self._inbound:
                lane.finished.set()
            self._group.close()
            self._encoded.clear()

    def end(self) -> None:
        """Serve nobody any more; only after the outcome."""
        for scope in self._tail:
            scope.cancel()

    def _let_go(self) -> None:
        """Of everything of a vector's size: serving the others takes this member's encoded share alone."""
        self._vector = None
        self._averaged = torch.empty(0)
        self._pending.clear()

    def _outcome(self) -> Outcome:
        return Outcome(
            verdict=self._verdict,
            averaged=self._averaged,
            # With the average complete, what is still on its way to others counts as sent.
            bytes_sent=self._bytes_sent if self._verdict else self._bytes_to_send(),
            bytes_received=self._bytes_received,
        )

    def _bytes_to_send(self) -> int:
        """All the frames of parts that this member sends in a round that succeeds."""
        total = 0
        for member in self._roster.members:
            if member.peer_id == self._me:
                continue
            parts = self._ledger.parts[member.peer_id] if self._ledger.contributing else ()
            parts += self._own_parts if not member.auxiliary else ()
            total += sum(FRAME_BYTES + self._codec.encoded_nbytes(part.elements) for part in parts)
        return total

    def _check_complete(self) -> None:
        if self._ledger.complete:
            self._over.set()

    def _fail(self, verdict: Verdict) -> None:
        """The first reason counts; after this no value leaves this member any more."""
        if not self._over.is_set():
            logger.info("group %s: %s", self._roster.group_id.hex()[:8], verdict.reason)
            self._verdict = verdict
            self._over.set()
            for ready in self._ready:
                ready.set()

    def _lost(self, peer_id: str, reason: str, *, blames: str | None = None) -> None:
        verdict = self._ledger.lost(peer_id, reason, blames=blames)
        if verdict is not None:
            self._fail(verdict)

    # ------------------------------------------------------------------ out

    def _start_sending(self, nursery: trio.Nursery, member: Candidate) -> None:
        if self._vector is not None and self._ledger.parts[member.peer_id]:
            nursery.start_soon(self._send_lane, member, Lane.CONTRIBUTIONS)
        if self._own_parts and not member.auxiliary:
            nursery.start_soon(self._send_lane, member, Lane.AVERAGES)

    async def _send_lane(self, member: Candidate, lane: Lane) -> None:
        """Send every part of a lane, and hear how the other side fared."""
        try:
            stream = await self._transport.open_stream(
                member.peer_id,
                PROTOCOL,
                addresses=member.addresses,
                timeout=min(self._timeout, OPEN_SECONDS),
                wait_inbound=True,
            )
        except UnreachableError as error:
            self._lost(member.peer_id, str(error))
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hear_back, stream, nursery.cancel_scope)
                await self._write_lane(stream, lane)
        except* (StreamBrokenError, ClosedError) as errors:
            self._lost(member.peer_id, str(errors.exceptions[0]))
        finally:
            await stream.aclose()

    async def _write_lane(self, stream: Stream, lane: Lane) -> None:
        await self._send(stream, encode_header(LaneHeader(self._roster.group_id, lane)), framed=True)
        parts = self._own_parts if lane is Lane.AVERAGES else self._ledger.parts[stream.remote]
        for part in parts:
            payload = memoryview(b"")
            if lane is Lane.AVERAGES:
                await self._ready[part.index].wait()
                payload = self._encoded[part.index]
            elif self._vector is not None:
                payload = await self._in_thread(self._codec.encode, self._vector[part.start : part.stop])
            if (
                self._verdict is not None
            ):  # what was encoded since may be anything: the vector is no longer ours
                await self._send(stream, abort_frame(_abort(self._verdict)))
                return
            if not payload:  # a reducer that has sent its averages already did not wait for this contribution
                return
            await self._send(stream, part_frame(part.index))
            await self._send(stream, payload)

    async def _hear_back(self, stream: Stream, lane_scope: trio.CancelScope) -> None:
        """``DONE``, ``ABORT``, or the end of the stream, whatever comes first."""
        try:
            kind = await receive_kind(stream)
            if kind is Kind.ABORT:
                self._heard_abort(stream.remote, await receive_abort(stream))
            elif kind is Kind.PART:
                self._lost(stream.remote, "a part came back on a lane")
        except (StreamBrokenError, ClosedError, RemoteProtocolError) as error:
            self._lost(stream.remote, str(error))
        lane_scope.cancel()

    async def _send(self, stream: Stream, data: bytes | memoryview, *, framed: bool = False) -> None:
        await (send_message(stream, data) if framed else stream.send_all(data))
        self._bytes_sent += len(data)

    async def _abort_inbound(self, verdict: Verdict) -> None:
        """Tell whoever sends to this member; those it sends to are told on the lanes to them."""
        frame = abort_frame(_abort(verdict))

        async def tell(stream: Stream) -> None:
            try:
                await stream.send_all(frame)
                await stream.aclose()
            except (StreamBrokenError, ClosedError) as error:
                logger.debug("%s was not told that the round is over: %s", stream.remote, error)

        async with trio.open_nursery() as nursery:
            for lane in self._inbound:
                nursery.start_soon(tell, lane.stream)

    # ------------------------------------------------------------------ in

    async def _accept_lanes(self, nursery: trio.Nursery) -> None:
        for _ in range(self._ledger.inbound_lanes):
            lane = await self._next_lane()
            self._inbound.append(lane)
            nursery.start_soon(self._receive_lane, lane, nursery)

    async def _next_lane(self) -> InboundLane:
        while True:
            lane = await self._group.lanes.receive()
            if self._ledger.expects(lane.stream.remote, lane.lane):
                return lane
            logger.info("%s opened a lane that is not due", lane.stream.remote)
            lane.finished.set()

    async def _receive_lane(self, lane: InboundLane, nursery: trio.Nursery) -> None:
        stream, peer_id = lane.stream, lane.stream.remote
        try:
            for _ in range(self._ledger.expects(peer_id, lane.lane)):
                kind = await receive_kind(stream)
                if kind is Kind.ABORT:
                    self._heard_abort(peer_id, await receive_abort(stream))
                    return
                await self._receive_part(lane, kind, nursery)
            await self._send(stream, DONE_FRAME)
            await stream.aclose()
        except RemoteProtocolError as error:
            self._fail(Verdict(f"{peer_id} broke the protocol: {error}", peer_id, hostile=True))
        except (StreamBrokenError, ClosedError) as error:
            self._lost(peer_id, str(error))

    async def _receive_part(self, lane: InboundLane, kind: Kind, nursery: trio.Nursery) -> None:
        if kind is not Kind.PART:
            raise RemoteProtocolError(f"{kind.name} came where a part was due")
        stream, peer_id = lane.stream, lane.stream.remote
        index = await receive_index(stream)
        part = self._ledger.due(peer_id, lane.lane)
        if index != part.index:
            raise RemoteProtocolError(f"part {index} came where part {part.index} was due")
        if lane.lane is Lane.CONTRIBUTIONS and index >= MAX_WAITING_PARTS:
            # What is ahead of the slowest contributor waits with its sender, not in this process.
            await self._ready[index - MAX_WAITING_PARTS].wait()
        payload = bytearray(self._codec.encoded_nbytes(part.elements))
        await receive_exactly_into(stream, memoryview(payload))
        if self._over.is_set():  # given up while it came; the buffers are gone
            return
        self._bytes_received += FRAME_BYTES + len(payload)
        if lane.lane is Lane.AVERAGES:
            out = self._averaged[part.start : part.stop]
            try:
                await self._in_thread(self._codec.decode, payload, part.elements, out)
            except CodecError as error:
                raise RemoteProtocolError(f"an averaged part does not decode: {error}") from None
        else:
            self._pending[index][peer_id] = payload
        if self._ledger.received(peer_id, lane.lane):
            nursery.start_soon(self._average, index)
        self._check_complete()

    async def _average(self, index: int) -> None:
        if self._over.is_set():
            return
        part, pending = self._own_parts[index], self._pending[index]
        contributions = [
            Contribution(member.peer_id, member.weight, self._values(part, pending, member.peer_id))
            for member in self._roster.contributors
        ]
        out = self._averaged[part.start - self._offset : part.stop - self._offset]
        try:
            self._encoded[index] = await self._in_thread(
                average_part, self._codec, contributions, self._roster.total_weight, out
            )
        except BadContributionError as error:
            self._fail(Verdict(str(error), error.peer_id, hostile=True))
            return
        pending.clear()
        self._ledger.averaged_own()
        self._ready[index].set()
        self._check_complete()

    def _values(self, part: Part, pending: dict[str, bytearray], peer_id: str) -> torch.Tensor | bytearray:
        if peer_id != self._me:
            return pending[peer_id]
        assert self._vector is not None
        return self._vector[part.start : part.stop]

    def _heard_abort(self, peer_id: str, abort: Abort) -> None:
        """Whom it blames is in the reason; what this member itself saw counts first."""
        blames = abort.peer_id if abort.peer_id not in ("", self._me) else None
        self._lost(peer_id, f"it gave the round up: {abort.reason}", blames=blames)


def _abort(verdict: Verdict) -> Abort:
    return Abort(verdict.reason, verdict.peer_id or "")
