"""Receives the parts of one attempt, on the lanes that other members open, and averages this member's share.

A direct lane is read by :mod:`p2pavg.allreduce.movers.lane_driver`, in a thread; a stream is read here. If a direct
lane breaks, its sender begins again on streams, with the first part: what has come already is read and dropped. Only
when a stream breaks as well, something is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

import torch
import trio

from p2pavg.allreduce.errors import BadContributionError
from p2pavg.allreduce.inputs import IncomingPart
from p2pavg.allreduce.messages import FRAME_BYTES, Lane, receive_index
from p2pavg.allreduce.movers.lane_driver import DirectUse
from p2pavg.allreduce.movers.lobby import InboundLane, Lanes
from p2pavg.allreduce.movers.loop_driver import LoopUse, is_small
from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.allreduce.movers.stream_bytes import StreamBytes
from p2pavg.allreduce.part_schedule import Step, incoming
from p2pavg.allreduce.plan import STREAM_KINDS, AttemptPlan
from p2pavg.allreduce.proofs import trailer_bytes
from p2pavg.allreduce.signals import Listener, Signals
from p2pavg.allreduce.values import check_index
from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError
from p2pavg.base.threads.workers import in_own_thread
from p2pavg.group.shares import SharePart
from p2pavg.net.blame import guarded
from p2pavg.net.framing import receive_exactly_into
from p2pavg.net.transport import Buffer, DirectLane, Stream

logger = logging.getLogger(__name__)

REOPEN_SECONDS = 3.0  # after a direct lane broke, for its sender to begin again on a stream
_BROKEN = (RemoteProtocolError, StreamBrokenError, ClosedError)
_OURS = (MemoryError, torch.OutOfMemoryError)  # no member's message takes memory that was not agreed


class Receiver:
    """Receives one member's parts of one attempt."""

    def __init__(self, plan: AttemptPlan, signals: Signals, lanes: Lanes) -> None:
        self.streamed: set[str] = set()
        """Members from which parts have come over streams instead of direct lanes."""
        self._plan = plan
        self._signals = signals
        self._lanes = lanes
        self._uses: list[DirectUse] = []
        self.stream_bytes = StreamBytes()
        self._sources: dict[str, str] = {}  # of the shares of lost reducers: the member that passes each on
        self._source_named = trio.Event()

    @property
    def bytes_received(self) -> int:
        """Bytes of parts, their frames included."""
        return sum(self.bytes_by_way.values())

    @property
    def bytes_by_way(self) -> dict[str, int]:
        """The same by the way that they have come, a :class:`~p2pavg.telemetry.events.Way`."""
        return self.stream_bytes.with_lanes(sum(use.moved for use in self._uses))

    @property
    def bytes_arrived(self) -> int:
        """Received, with the parts that are still incomplete."""
        return self.stream_bytes.total + sum(use.received for use in self._uses)

    def note_arrivals(self) -> None:
        """Report what has come over direct lanes, as a sign of life. Call it now and then."""
        for use in self._uses:
            self._note_arrivals(use)

    def _note_arrivals(self, use: DirectUse) -> None:
        count = use.lane.bytes_received - use.noted
        if count:
            use.noted += count
            self._signals.listener.arrived(use.lane.remote, count)

    def take_from(self, source: str, lost: Collection[str]) -> None:
        """Take the shares that lost members would have sent from this member from now on.

        Parts that other members pass on are not read.
        """
        reducers = self._plan.ledger.routes.cut_off(self._plan.me, lost)
        self._sources.update(dict.fromkeys(reducers, source))
        self._source_named.set()
        self._source_named = trio.Event()

    # ------------------------------------------------------------------ lanes

    async def run(self, nursery: trio.Nursery) -> None:
        """Accept lanes, and receive each in the nursery, until cancelled."""
        taken: dict[tuple[str, Lane, int], _Taken] = {}
        while True:
            lane = await self._lanes.receive()
            # From here on, this task lets go of the lane, also when the attempt ends in the meantime.
            lane.taken = True
            try:
                with guarded(lane.remote, partial(self._cannot_take, lane), what="a lane's header"):
                    await self._accept(lane, taken, nursery)
            # Between its arrival and its own task, no other code would let go of the lane.
            except trio.Cancelled:
                lane.finished.set()
                raise

    def _cannot_take(self, lane: InboundLane, peer_id: str, error: Exception) -> None:
        lane.finished.set()
        self._signals.cannot_handle(peer_id, error)

    async def _accept(
        self, lane: InboundLane, taken: dict[tuple[str, Lane, int], _Taken], nursery: trio.Nursery
    ) -> None:
        peer_id, kind = lane.remote, lane.header.lane
        if kind is Lane.PARTS and any((peer_id, stream, 0) in taken for stream in STREAM_KINDS):
            lane.finished.set()  # it broke so early that the streams that replace it were faster
            return
        # Not as a breach of the protocol: the sender may be honest, and a leader may have lied to one of the
        # two.
        if lane.header.members != self._plan.members_digest:
            lane.finished.set()
            self._signals.broken(
                peer_id, "it exchanges among other members: a leader told them different ones"
            )
            return
        place = (peer_id, kind, lane.header.reducer)
        # Another ballot may choose that member again as the one that passes a share on.
        if not self._is_due(lane) or (place in taken and kind is not Lane.PASSED_ON):
            lane.finished.set()
            # A member of the group that is not in this attempt cannot be left out of it once more.
            if any(member.peer_id == peer_id for member in self._plan.roster.members):
                self._signals.broken(peer_id, RemoteProtocolError("it opened a lane that is not due"))
            return
        if kind in (Lane.PARTS, Lane.CONTRIBUTIONS):
            try:
                # A contributor must not skip what has not come: the average would have a gap where its part
                # should be.
                self._plan.values.carry.check_begin(peer_id, lane.header.begin)
            except RemoteProtocolError as error:
                lane.finished.set()
                self._signals.broken(peer_id, error)
                return
        # The task of the former lane ends before the new one begins, so that two never write to the same
        # part. This also ends its wait for a stream that takes its place.
        replaced = [place, (peer_id, Lane.PARTS, 0)] if kind in STREAM_KINDS else [place]
        for before in replaced:
            if before in taken:
                await taken[before].end()
        now = taken[place] = _Taken()
        nursery.start_soon(self._receive, lane, now)

    def _is_due(self, lane: InboundLane) -> bool:
        plan, peer_id, header = self._plan, lane.remote, lane.header
        # Only contributions go over from one attempt to the next. Averages are always sent anew.
        if header.lane not in (Lane.PARTS, Lane.CONTRIBUTIONS) and header.begin != START:
            return False
        if header.lane is Lane.PASSED_ON:
            reducers = {plan.position(member.peer_id) for member in plan.roster.members}
            return peer_id in plan.ledger.holders and header.reducer in reducers and plan.ledger.holding
        direct = isinstance(lane.stream, DirectLane)
        kinds = STREAM_KINDS if header.lane is Lane.PARTS else (header.lane,)
        expected = any(plan.ledger.expects(peer_id, kind) for kind in kinds)
        return header.reducer == 0 and expected and direct == (header.lane is Lane.PARTS)

    async def _receive(self, lane: InboundLane, taken: _Taken) -> None:
        cannot_handle = self._signals.cannot_handle
        try:
            with (
                taken.scope,
                # Any other exception costs the sender its place, and not this peer the round.
                guarded(lane.remote, cannot_handle, what="parts", expected=(*_BROKEN, *_OURS)),
            ):
                if isinstance(lane.stream, DirectLane):
                    await self._over_direct_lane(lane, lane.stream)
                else:
                    self.streamed.add(lane.remote)
                    await self._over_stream(lane, _Noted(lane.stream, self._signals.listener))
        except _BROKEN as error:
            self._signals.broken(lane.remote, error)
        finally:
            lane.finished.set()
            taken.ended.set()

    # ------------------------------------------------------------------ parts

    async def _over_direct_lane(self, lane: InboundLane, direct: DirectLane) -> None:
        plan = self._plan
        use = LoopUse(direct, plan.values, plan.context.download, self._signals)
        self._uses.append(use)
        small: Callable[[], Awaitable[None]] | None = None
        if lane.header.lane is Lane.PASSED_ON:
            reducer = await self._reducer_to_take(lane)
            work = partial(use.receive_share, reducer, plan.ledger.parts[reducer])
        else:
            begin = lane.header.begin
            steps = incoming(*self._parts_of(lane.remote), begin.parts)
            work = partial(use.receive_parts, steps, begin)
            parts = [step.part for step in steps]
            # A few values are not worth a thread: its start and its wake-ups take longer than the work.
            if plan.values.is_on_cpu and is_small(
                direct, parts, len(plan.roster.members), plan.context, plan.context.download
            ):
                small = partial(use.receive_small, steps, begin)
        try:
            if small is not None:
                await small()
            else:
                await in_own_thread(work, stop=use.stop, name="p2pavg-receive")
        except StreamBrokenError as error:
            logger.info("the direct lane of %s broke: %s", direct.remote, error)
            self._signals.listener.lane_broke(direct.remote)
            await trio.sleep(REOPEN_SECONDS)  # the stream that takes its place cancels this
            raise
        finally:
            # A lane whose use did not end has bytes of it on the way, and cannot serve the next round.
            lane.clean = use.finished
            self._note_arrivals(use)

    def _parts_of(self, peer_id: str) -> tuple[Sequence[SharePart], list[tuple[str, SharePart]]]:
        """Return the contributions and the averages that a member sends to this one."""
        return self._plan.ledger.contributions_of(peer_id), self._plan.averages_from(peer_id)

    async def _over_stream(self, lane: InboundLane, stream: Stream) -> None:
        kind, values = lane.header.lane, self._plan.values
        if kind is Lane.PASSED_ON:
            await self._receive_share(lane, stream)
            return
        begin = lane.header.begin
        contributions, averages = self._parts_of(stream.remote)
        for step in (
            incoming(contributions, [], begin.parts) if kind is Lane.CONTRIBUTIONS else incoming([], averages)
        ):
            # Both sides know the order of the parts. The index only shows that they mean the same one.
            check_index(await receive_index(stream), step.part)
            if kind is Lane.CONTRIBUTIONS:
                await self._receive_contribution(stream, step, begin)
                self._signals.check_complete()
                continue
            payload, trailer = await self._receive_part(stream, step, self._memory_of(step.part))
            if not values.has(step.reducer, kind, step.part.index):  # it came over a direct lane that broke
                await self._plan.context.run_in_thread(
                    values.receive_average, step.reducer, step.part, payload, trailer
                )
            self._signals.check_complete()

    async def _receive_contribution(self, stream: Stream, step: Step, begin: ResumeMark) -> None:
        peer_id, values = stream.remote, self._plan.values
        if values.has(
            peer_id, step.kind, step.part.index
        ):  # in an earlier attempt, or over a lane that broke
            await self._receive_part(stream, step, values.carry.receive(peer_id, step.part, begin))
            return
        # Back-pressure: a contributor that is ahead waits, and does not owe a part during this wait.
        if step.after is not None:
            self._signals.note_owes(peer_id, False)
            await self._signals.until_ready(step.after)
            self._signals.note_owes(peer_id, True)
        coming = values.carry.receive(peer_id, step.part, begin)
        payload, trailer = await self._receive_part(stream, step, coming)
        complete = await self._plan.context.run_in_thread(
            values.contributed, peer_id, step.part.index, payload, trailer
        )
        self._signals.note_owes(peer_id, not step.last)
        if complete:
            try:
                await self._plan.context.run_in_thread(values.average, step.part.index)
            # It names the contributor whose values cannot be averaged, which need not be the sender of this
            # last part.
            except BadContributionError as error:
                self._signals.broken(error.peer_id, error)

    async def _receive_part(self, stream: Stream, step: Step, coming: IncomingPart) -> tuple[Buffer, bytes]:
        """Return a part, and the bytes that follow it if it is the last one of its kind."""
        payload = await self._receive_payload(stream, coming)
        return payload, await self._receive_trailer(stream, step.kind) if step.last else b""

    async def _receive_trailer(self, stream: Stream, kind: Lane) -> bytes:
        trailer = bytearray(trailer_bytes(self._plan.values.proofs, kind))
        await receive_exactly_into(stream, memoryview(trailer))
        self.stream_bytes.add(stream, len(trailer))
        return bytes(trailer)

    def _memory_of(self, part: SharePart) -> IncomingPart:
        return IncomingPart(part.index, self._plan.values.buffer(part))

    async def _receive_payload(self, stream: Stream, coming: IncomingPart) -> Buffer:
        rest = coming.rest
        # Before the read: what is not read holds the sender back, and that is what a download limit can do.
        await trio.sleep(self._plan.context.download.delay(len(rest)))

        def came(count: int) -> None:
            coming.add(count)
            self.stream_bytes.add(stream, count)

        self.stream_bytes.add(stream, FRAME_BYTES)
        await receive_exactly_into(stream, rest, came)
        return coming.payload

    async def _reducer_to_take(self, lane: InboundLane) -> str:
        """Return the lost reducer whose averages come on this lane, once they are to be taken from its sender."""
        plan = self._plan
        reducer = next(
            m.peer_id for m in plan.roster.members if plan.position(m.peer_id) == lane.header.reducer
        )
        while self._sources.get(reducer) != lane.remote:
            await self._source_named.wait()  # the source may hear of it first; any other member may wait
        return reducer

    async def _receive_share(self, lane: InboundLane, stream: Stream) -> None:
        reducer = await self._reducer_to_take(lane)
        payloads = []
        for part in self._plan.ledger.parts[reducer]:
            check_index(await receive_index(stream), part)
            payloads.append(await self._receive_payload(stream, self._memory_of(part)))
        trailer = await self._receive_trailer(stream, Lane.AVERAGES)
        await self._plan.context.run_in_thread(self._plan.values.receive_share, reducer, payloads, trailer)
        self._signals.check_complete()


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

    def __init__(self, stream: Stream, listener: Listener) -> None:
        self.remote = stream.remote
        self.relayed = stream.relayed
        self._stream = stream
        self._listener = listener

    async def send_all(self, data: Buffer) -> None:
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        chunk = await self._stream.receive_some(max_bytes)
        self._listener.arrived(self.remote, len(chunk))
        return chunk

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def reset(self) -> None:
        await self._stream.reset()
