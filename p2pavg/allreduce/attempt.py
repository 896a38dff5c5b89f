"""One attempt at an all-reduce: opens lanes, moves parts, averages this member's share.

Butterfly: every contributor sends each reducer the parts of its share; the reducer averages a part as soon as its last
contribution is in, encodes the average once, and sends those bytes to every contributor. What goes wrong is reported;
what it means is decided elsewhere (:mod:`p2pavg.consensus.agreement`), and the lanes of the others go on meanwhile.

Where a direct lane comes about, it carries all that one member sends another (:mod:`p2pavg.allreduce.lane_driver`
moves its parts, in a thread); else contributions and averages go over a stream of the transport each, which are moved
here. A direct lane that breaks is no loss of a member: its sender begins again on streams, and only when one of these
breaks as well something is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
import trio

from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.lane_driver import DirectUse
from p2pavg.allreduce.lobby import InboundLane, Lanes
from p2pavg.allreduce.messages import (
    FRAME_BYTES,
    PROTOCOL,
    Lane,
    LaneHeader,
    encode_header,
    members_digest,
    part_frame,
    receive_index,
)
from p2pavg.allreduce.reduction import BadContributionError, Ledger
from p2pavg.allreduce.turns import Turns
from p2pavg.allreduce.values import MAX_WAITING_PARTS, Values, check_index
from p2pavg.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.group.candidate import Candidate
from p2pavg.group.milestones import Milestone, ignore
from p2pavg.group.roster import Roster
from p2pavg.group.shares import Part
from p2pavg.net.blame import guarded
from p2pavg.net.framing import receive_exactly_into, send_message
from p2pavg.net.transport import Buffer, DirectLane, Stream
from p2pavg.threads.workers import ToLoop, in_own_thread

logger = logging.getLogger(__name__)

OPEN_SECONDS = 10.0
DIRECT_SECONDS = 5.0  # for a direct lane to come about, whoever dials; then the parts go over a stream
FAST_MBPS = (
    500.0  # from there on lanes wait for the processor more than for the link, and taking turns only costs
)
MAX_MEMBERS = 256  # more than a roster has
_STREAMS = (Lane.CONTRIBUTIONS, Lane.AVERAGES)  # what takes the place of a direct lane
_BROKEN = (RemoteProtocolError, StreamBrokenError, ClosedError)
_OURS = (MemoryError, torch.OutOfMemoryError)  # no member's message takes memory that was not agreed
REOPEN_SECONDS = 3.0  # after a direct lane broke, for its sender to begin again on a stream


class Reports(Protocol):
    """Listener of an attempt."""

    def completed(self, attempt: Attempt, digests: tuple[bytes, ...]) -> None:
        """This member has the whole result. There is one digest a share, in the order of the roster."""

    def troubled(self, attempt: Attempt, peer_id: str, reason: str, *, hostile: bool) -> None:
        """A lane to or from a member broke."""

    def lane_broke(self, attempt: Attempt, peer_id: str) -> None:
        """A direct lane to or from a member broke. The lane may be begun again, or the member may be gone."""

    def arrived(self, peer_id: str, count: int) -> None:
        """Bytes of a member came."""

    def owes(self, attempt: Attempt, peer_id: str, yes: bool) -> None:
        """A member's contribution is waited for, or no longer."""

    def reached(self, milestone: Milestone) -> None:
        """This member has reached a milestone."""


class Attempt:
    """One member's side of one attempt.

    Args:
        roster: the members that take part, with the shares that they have in this attempt.
        group_id: of the whole group, in the header of every lane.
        vector: float32, the length of the shares together, on any device; this member's weighted mean. Not changed,
            and not read any more once :meth:`run` has returned. Only contributors have one.
        position: of a member, in the roster of the whole group.
    """

    def __init__(
        self,
        *,
        number: int,
        context: RunContext,
        group_id: bytes,
        roster: Roster,
        lanes: Lanes,
        vector: torch.Tensor | None,
        reports: Reports,
        position: Callable[[str], int],
    ) -> None:
        self.number = number
        self.roster = roster
        self.ledger = Ledger(roster, context.transport.peer_id, context.codec.granularity)
        self.scope = trio.CancelScope()
        """Cancel it to end the attempt."""
        self.streamed: set[str] = set()
        """Members to or from which parts have gone over streams instead of direct lanes."""
        self._context = context
        self._transport = context.transport
        self._group_id = group_id
        self._members = members_digest(number, (member.peer_id for member in roster.members))
        self._lanes = lanes
        self._contributes = vector is not None
        self._in_thread = context.run_in_thread
        self._reports = reports
        self._position = position
        self._me = context.transport.peer_id
        self._own_parts = self.ledger.parts[self._me]
        self.values = Values(
            ledger=self.ledger,
            codec=context.codec,
            vector=vector,
            buffers=context.buffers,
            on_ready=self._averaged,
        )
        self._sent = self._received = 0
        bandwidth = roster.members[roster.position(self._me)].bandwidth
        self._turns = Turns() if bandwidth < FAST_MBPS else None
        self._outbound: list[DirectUse] = []
        self._inbound: list[DirectUse] = []
        self._ready = [trio.Event() for _ in self._own_parts]
        self._awaited = False  # whether anybody on the event loop waits for them
        self._complete = False
        self._to_loop: ToLoop | None = None
        self._passing: trio.Nursery | None = None
        self._sources: dict[str, str] = {}  # of the shares of reducers that are gone: who passes each on
        self._source_named = trio.Event()

    @property
    def averaged(self) -> torch.Tensor:
        """float32: the result, once it is complete; of the whole vector, or an auxiliary's share."""
        return self.values.averaged

    @property
    def bytes_sent(self) -> int:
        """Bytes of parts, their frames included."""
        return self._sent + sum(use.moved for use in self._outbound)

    @property
    def bytes_received(self) -> int:
        """Bytes of parts, their frames included."""
        return self._received + sum(use.moved for use in self._inbound)

    @property
    def bytes_left(self) -> int:
        """Sent, with the parts that are still incomplete and without what direct lanes still hold."""
        return self._sent + sum(use.sent for use in self._outbound)

    @property
    def bytes_arrived(self) -> int:
        """Received, with the parts that are still incomplete."""
        return self._received + sum(use.received for use in self._inbound)

    async def run(self) -> None:
        """Move parts until cancelled: what others still need is sent even when this member has everything."""
        self._to_loop = ToLoop()
        with self.scope:
            async with trio.open_nursery() as nursery:
                self._passing = nursery
                nursery.start_soon(self._accept_lanes, nursery)
                for member in self.roster.members:
                    if member.peer_id != self._me:
                        nursery.start_soon(self._send_to, member)
                    self._owes(member.peer_id, self.ledger.expects(member.peer_id, Lane.CONTRIBUTIONS) > 0)
                if not self.ledger.contributors:
                    await self._average_alone()
                self._check_complete()
                await trio.sleep_forever()

    async def _average_alone(self) -> None:
        """Average this member's share when no other member contributes."""
        for part in self._own_parts:
            await self._in_thread(self.values.average, part.index)

    def let_go(self) -> None:
        """Release everything that has the size of a vector. Call it only when the attempt has ended."""
        self.values.let_go()

    def _check_complete(self) -> None:
        if not self._complete and not self.scope.cancel_called and self.values.complete:
            self._complete = True
            self._reports.completed(self, self.values.digests())

    def _owes(self, peer_id: str, yes: bool) -> None:
        if peer_id != self._me:
            self._reports.owes(self, peer_id, yes)

    def _broken(self, peer_id: str, error: Exception | str) -> None:
        hostile = isinstance(error, RemoteProtocolError)
        reason = f"it broke the protocol: {error}" if hostile else str(error)
        self._reports.troubled(self, peer_id, reason, hostile=hostile)

    # ------------------------------------------------------------------ from the lanes' threads

    def _averaged(self, index: int) -> None:
        if self._awaited:
            self._soon(self._ready[index].set)
        self.progressed()

    def owes(self, peer_id: str, yes: bool) -> None:
        """A member's contribution is waited for, or no longer."""
        self._soon(self._owes, peer_id, yes)

    def reached(self, milestone: Milestone) -> None:
        """A part has been sent."""
        if self._reports.reached is not ignore:
            self._soon(self._reports.reached, milestone)

    def progressed(self) -> None:
        """A part has come."""
        if self.values.complete:
            self._soon(self._check_complete)

    def blame(self, peer_id: str, error: Exception) -> None:
        """A part that a member sent does not decode."""
        self._soon(self._broken, peer_id, error)

    async def _until_ready(self, index: int) -> None:
        """Wait until a part of this member's share has been averaged."""
        with self.values.changed:  # a thread has said that it is ready, or will see that somebody waits
            self._awaited = True
            if self.values.is_ready(index):
                self._ready[index].set()
        await self._ready[index].wait()

    def _soon(self, function: Callable[..., object], *args: object) -> None:
        assert self._to_loop is not None
        self._to_loop(function, *args)

    def note_arrivals(self) -> None:
        """Report what has come over direct lanes, as a sign of life. Call it now and then."""
        for use in self._inbound:
            self._note_arrivals(use)

    def _note_arrivals(self, use: DirectUse) -> None:
        count = use.lane.bytes_received - use.noted
        if count:
            use.noted += count
            self._reports.arrived(use.lane.remote, count)

    # ------------------------------------------------------------------ out

    async def _send_to(self, member: Candidate) -> None:
        """Send a member its contributions and averages."""
        contributions = self.ledger.parts[member.peer_id] if self._contributes else []
        averages = [] if member.auxiliary else self._own_parts
        if not contributions and not averages:
            return

        def send(use: DirectUse, header: LaneHeader) -> None:
            use.send_parts(header, self._me, contributions, averages)

        if await self._send_over_direct_lane(member, self._header(Lane.PARTS), send):
            return
        async with trio.open_nursery() as nursery:
            for lane, parts, send_on in (
                (Lane.CONTRIBUTIONS, contributions, self._send_contributions),
                (Lane.AVERAGES, averages, self._send_averages),
            ):
                if parts:
                    header = self._header(lane)
                    nursery.start_soon(self._send_over_stream, member, header, send_on)

    def _header(self, lane: Lane, reducer: int = 0) -> LaneHeader:
        return LaneHeader(self._group_id, lane, self.number, reducer, self._members)

    def pass_on(self, reducers: Iterable[str], to: Iterable[str]) -> None:
        """Send members the whole shares of reducers, as the same bytes. This member has the whole result."""
        members = {member.peer_id: member for member in self.roster.members}
        for reducer in reducers:
            for peer_id in to:
                if self._passing is not None and self.ledger.parts[reducer]:
                    self._passing.start_soon(self._send_share, members[peer_id], reducer)

    def take_from(self, source: str, reducers: Iterable[str]) -> None:
        """Take the shares of reducers from this member from now on; what others pass on is not read."""
        self._sources.update(dict.fromkeys(reducers, source))
        self._source_named.set()
        self._source_named = trio.Event()

    async def _send_share(self, member: Candidate, reducer: str) -> None:
        parts = self.ledger.parts[reducer]

        async def send(stream: Stream) -> None:
            for part in parts:
                await self._send_part(stream, part, self.values.encoded(reducer, part.index))

        header = self._header(Lane.PASSED_ON, self._position(reducer))
        if not await self._send_over_direct_lane(
            member, header, lambda use, header: use.send_share(header, reducer, parts)
        ):
            await self._send_over_stream(member, header, send)

    async def _send_over_stream(
        self, member: Candidate, header: LaneHeader, send: Callable[[Stream], Awaitable[None]]
    ) -> None:
        self.streamed.add(member.peer_id)
        try:
            stream = await self._transport.open_stream(
                member.peer_id,
                PROTOCOL,
                addresses=member.addresses,
                timeout=OPEN_SECONDS,
                wait_inbound=True,
            )
            try:
                await send_message(stream, encode_header(header))
                await send(stream)
            finally:
                await stream.aclose()
        except (UnreachableError, StreamBrokenError, ClosedError) as error:
            self._broken(member.peer_id, error)

    async def _send_over_direct_lane(
        self, member: Candidate, header: LaneHeader, send: Callable[[DirectUse, LaneHeader], None]
    ) -> bool:
        """Return whether everything went over a direct lane."""
        try:
            lane = await self._transport.open_lane(
                member.peer_id, addresses=member.addresses, timeout=DIRECT_SECONDS
            )
        except UnreachableError as error:
            logger.debug("no direct lane to %s: %s", member.peer_id, error)
            return False
        place = (self._position(member.peer_id) - self._position(self._me)) % MAX_MEMBERS
        use = DirectUse(lane, self.values, self._context.upload, self, self._turns, place)
        self._outbound.append(use)
        try:
            await in_own_thread(partial(send, use, header), stop=use.stop, name="p2pavg-send")
            await lane.acknowledged()
        except StreamBrokenError as error:
            logger.info("the direct lane to %s broke: %s", member.peer_id, error)
            self._reports.lane_broke(self, member.peer_id)
            return False
        finally:
            # Also when the attempt ends before the acknowledgement has come: the transport waits for it then.
            if use.finished:
                self._transport.keep_lane(lane)
            else:
                lane.abort()
        return True

    async def _send_contributions(self, stream: Stream) -> None:
        for part in self.ledger.parts[stream.remote]:
            payload = await self._in_thread(self.values.contribution, part)
            await self._send_part(stream, part, payload)
            self._reports.reached(Milestone.CONTRIBUTION_SENT)

    async def _send_averages(self, stream: Stream) -> None:
        for part in self._own_parts:
            await self._until_ready(part.index)
            await self._send_part(stream, part, self.values.encoded(self._me, part.index))
            self._reports.reached(Milestone.AVERAGE_SENT)

    async def _send_part(self, stream: Stream, part: Part, payload: Buffer) -> None:
        await trio.sleep(self._context.upload.delay(len(payload)))
        await stream.send_all(part_frame(part.index))
        await stream.send_all(payload)
        self._sent += FRAME_BYTES + len(payload)

    # ------------------------------------------------------------------ in

    async def _accept_lanes(self, nursery: trio.Nursery) -> None:
        taken: dict[tuple[str, Lane, int], _Taken] = {}
        while True:
            lane = await self._lanes.receive()
            with guarded(lane.remote, partial(self._cannot_take, lane), what="a lane's header"):
                await self._accept_lane(lane, taken, nursery)

    def _cannot_take(self, lane: InboundLane, peer_id: str, error: Exception) -> None:
        lane.finished.set()
        self._cannot_handle(peer_id, error)

    def _cannot_handle(self, peer_id: str, error: Exception) -> None:
        self._broken(peer_id, RemoteProtocolError(f"what it sent cannot be handled: {error!r}"))

    async def _accept_lane(
        self, lane: InboundLane, taken: dict[tuple[str, Lane, int], _Taken], nursery: trio.Nursery
    ) -> None:
        peer_id, kind = lane.remote, lane.header.lane
        if kind is Lane.PARTS and any((peer_id, stream, 0) in taken for stream in _STREAMS):
            lane.finished.set()  # it broke so early that what takes its place was faster
            return
        if lane.header.members != self._members:
            lane.finished.set()
            self._broken(peer_id, "it exchanges among other members: a leader told them different ones")
            return
        place = (peer_id, kind, lane.header.reducer)
        # Another ballot may choose that member again as the one that passes a share on.
        if not self._is_due(lane) or (place in taken and kind is not Lane.PASSED_ON):
            lane.finished.set()
            if any(member.peer_id == peer_id for member in self.roster.members):
                self._broken(peer_id, RemoteProtocolError("it opened a lane that is not due"))
            return
        replaced = [place, (peer_id, Lane.PARTS, 0)] if kind in _STREAMS else [place]
        for before in replaced:
            if before in taken:
                await taken[before].end()
        now = taken[place] = _Taken()
        nursery.start_soon(self._receive_lane, lane, now)

    def _is_due(self, lane: InboundLane) -> bool:
        peer_id, header = lane.remote, lane.header
        if header.lane is Lane.PASSED_ON:
            reducers = {self._position(member.peer_id) for member in self.roster.members}
            return peer_id in self.ledger.holders and header.reducer in reducers and self.ledger.holding
        direct = isinstance(lane.stream, DirectLane)
        kinds = _STREAMS if header.lane is Lane.PARTS else (header.lane,)
        expected = any(self.ledger.expects(peer_id, kind) for kind in kinds)
        return header.reducer == 0 and expected and direct == (header.lane is Lane.PARTS)

    async def _receive_lane(self, lane: InboundLane, taken: _Taken) -> None:
        try:
            with (
                taken.scope,
                guarded(lane.remote, self._cannot_handle, what="parts", expected=(*_BROKEN, *_OURS)),
            ):
                if isinstance(lane.stream, DirectLane):
                    await self._receive_over_direct_lane(lane, lane.stream)
                else:
                    self.streamed.add(lane.remote)
                    await self._receive_over_stream(lane, _Noted(lane.stream, self._reports))
        except _BROKEN as error:
            self._broken(lane.remote, error)
        finally:
            lane.finished.set()
            taken.ended.set()

    async def _receive_over_direct_lane(self, lane: InboundLane, direct: DirectLane) -> None:
        use = DirectUse(direct, self.values, self._context.download, self)
        self._inbound.append(use)
        kind = lane.header.lane
        if kind is Lane.PASSED_ON:
            reducer = await self._reducer_to_take(lane)
            work = partial(use.receive_share, reducer, self.ledger.parts[reducer])
        else:
            expected = [
                self._parts_of(lane.remote, kind) if self.ledger.expects(lane.remote, kind) else []
                for kind in _STREAMS
            ]
            work = partial(use.receive_parts, *expected)
        try:
            await in_own_thread(work, stop=use.stop, name="p2pavg-receive")
        except StreamBrokenError as error:
            logger.info("the direct lane of %s broke: %s", direct.remote, error)
            self._reports.lane_broke(self, direct.remote)
            await trio.sleep(REOPEN_SECONDS)  # the stream that takes its place cancels this
            raise
        finally:
            lane.clean = use.finished
            self._note_arrivals(use)

    def _parts_of(self, peer_id: str, lane: Lane) -> Sequence[Part]:
        return self.ledger.parts[peer_id if lane is Lane.AVERAGES else self._me]

    async def _receive_over_stream(self, lane: InboundLane, stream: Stream) -> None:
        kind = lane.header.lane
        if kind is Lane.PASSED_ON:
            await self._receive_share(lane, stream)
            return
        for part in self._parts_of(stream.remote, kind):
            check_index(await receive_index(stream), part)
            if self.values.has(stream.remote, kind, part.index):  # it came over a direct lane that broke
                await self._receive_payload(stream, part)
            elif kind is Lane.CONTRIBUTIONS:
                await self._receive_contribution(stream, part)
            else:
                payload = await self._receive_payload(stream, part)
                await self._in_thread(self.values.receive_average, stream.remote, part, payload)
            self._check_complete()

    async def _receive_contribution(self, stream: Stream, part: Part) -> None:
        peer_id = stream.remote
        if part.index >= MAX_WAITING_PARTS:
            # What is ahead of the slowest contributor waits with its sender, not in this process.
            self._owes(peer_id, False)
            await self._until_ready(part.index - MAX_WAITING_PARTS)
            self._owes(peer_id, True)
        payload = await self._receive_payload(stream, part)
        complete = self.values.contributed(peer_id, part.index, payload)
        self._owes(peer_id, part is not self._own_parts[-1])
        if complete:
            try:
                await self._in_thread(self.values.average, part.index)
            except BadContributionError as error:
                self._broken(error.peer_id, error)

    async def _receive_payload(self, stream: Stream, part: Part) -> Buffer:
        payload = self.values.buffer(part)
        await trio.sleep(self._context.download.delay(len(payload)))
        await receive_exactly_into(stream, payload)
        self._received += FRAME_BYTES + len(payload)
        return payload

    async def _reducer_to_take(self, lane: InboundLane) -> str:
        """Return the lost reducer whose averages come on this lane, once they are to be taken from its sender."""
        reducer = next(
            m.peer_id for m in self.roster.members if self._position(m.peer_id) == lane.header.reducer
        )
        while self._sources.get(reducer) != lane.remote:
            await self._source_named.wait()  # the source may hear of it first; anybody else may wait
        return reducer

    async def _receive_share(self, lane: InboundLane, stream: Stream) -> None:
        reducer = await self._reducer_to_take(lane)
        payloads = []
        for part in self.ledger.parts[reducer]:
            check_index(await receive_index(stream), part)
            payloads.append(await self._receive_payload(stream, part))
        await self._in_thread(self.values.receive_share, reducer, payloads)
        self._check_complete()


class _Taken:
    """A lane that is being received."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    async def end(self) -> None:
        """End it, because another lane takes its place."""
        self.scope.cancel()
        await self.ended.wait()


class _Noted(Stream):
    """A stream that reports every arrival as a sign of life."""

    def __init__(self, stream: Stream, reports: Reports) -> None:
        self.remote = stream.remote
        self._stream = stream
        self._reports = reports

    async def send_all(self, data: Buffer) -> None:
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        chunk = await self._stream.receive_some(max_bytes)
        self._reports.arrived(self.remote, len(chunk))
        return chunk

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def reset(self) -> None:
        await self._stream.reset()
