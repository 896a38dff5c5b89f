"""Receives the parts of one attempt, on the lanes that other members open, and averages this member's share.

If a direct lane breaks, its sender begins again on streams, with the first part: what has come already is read and
dropped. Only when a stream breaks as well, something is wrong. :mod:`p2pavg.allreduce.movers.moves` says who moves the
parts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial

import torch
import trio

from p2pavg.allreduce.context import DIRECT_SECONDS, STREAM_KINDS, AttemptPlan
from p2pavg.allreduce.events import BytesArrived, DirectLaneBroke
from p2pavg.allreduce.messages import Lane, Step, incoming
from p2pavg.allreduce.movers.lane_driver import DirectUse, is_small
from p2pavg.allreduce.movers.lobby import InboundLane, Lanes
from p2pavg.allreduce.movers.moves import Moves, carry_out, receiving, receiving_share
from p2pavg.allreduce.movers.reuse import START
from p2pavg.allreduce.movers.stream_driver import StreamBytes, StreamUse
from p2pavg.allreduce.signals import Signals
from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError
from p2pavg.base.threads.workers import in_own_thread
from p2pavg.net.blame import guarded
from p2pavg.net.transport import DirectLane

logger = logging.getLogger(__name__)

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
    def bytes_by_way(self) -> dict[str, int]:
        """Bytes of parts, their frames included, by the way that they have come.

        See :class:`~p2pavg.telemetry.events.Way`.
        """
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
            self._signals.emit(BytesArrived(use.lane.remote, count))

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
            reducers = {plan.group.position(member.peer_id) for member in plan.roster.members}
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
                    use = StreamUse(lane.stream, self._plan.context, self._signals, self.stream_bytes)
                    _, moves = await self._moves_of(lane)
                    await carry_out(moves, use)
        except _BROKEN as error:
            self._signals.broken(lane.remote, error)
        finally:
            lane.finished.set()
            taken.ended.set()

    # ------------------------------------------------------------------ parts

    async def _over_direct_lane(self, lane: InboundLane, direct: DirectLane) -> None:
        plan = self._plan
        use = DirectUse(direct, plan.values, plan.context.download, self._signals)
        self._uses.append(use)
        steps, moves = await self._moves_of(lane)
        parts = [step.part for step in steps]
        # A few values are not worth a thread: its start and its wake-ups take longer than the work.
        small = lane.header.lane is not Lane.PASSED_ON and plan.values.is_on_cpu
        try:
            if small and is_small(
                direct, parts, len(plan.roster.members), plan.context, plan.context.download
            ):
                await carry_out(moves, use)
            else:
                await in_own_thread(partial(use.carry_out, moves), stop=use.stop, name="p2pavg-receive")
        except StreamBrokenError as error:
            logger.info("the direct lane of %s broke: %s", direct.remote, error)
            self._signals.emit(DirectLaneBroke(direct.remote))
            await trio.sleep(DIRECT_SECONDS)  # the stream that takes its place cancels this
            raise
        finally:
            # A lane whose use did not end has bytes of it on the way, and cannot serve the next round.
            lane.clean = use.finished
            self._note_arrivals(use)

    async def _moves_of(self, lane: InboundLane) -> tuple[Sequence[Step], Moves]:
        """Return the parts that come on a lane, and the moves that receive them."""
        plan, kind, begin = self._plan, lane.header.lane, lane.header.begin
        if kind is Lane.PASSED_ON:
            reducer = await self._reducer_to_take(lane)
            steps = incoming([], [(reducer, part) for part in plan.ledger.parts[reducer]])
            return steps, receiving_share(plan.values, reducer, steps, self._signals)
        # A direct lane carries both kinds.
        steps = incoming(
            () if kind is Lane.AVERAGES else plan.ledger.contributions_of(lane.remote),
            () if kind is Lane.CONTRIBUTIONS else plan.averages_from(lane.remote),
            begin.parts,
        )
        return steps, receiving(plan.values, lane.remote, steps, begin, self._signals)

    async def _reducer_to_take(self, lane: InboundLane) -> str:
        """Return the lost reducer whose averages come on this lane, once they are to be taken from its sender."""
        plan = self._plan
        reducer = next(
            m.peer_id for m in plan.roster.members if plan.group.position(m.peer_id) == lane.header.reducer
        )
        while self._sources.get(reducer) != lane.remote:
            await self._source_named.wait()  # the source may hear of it first; any other member may wait
        return reducer


class _Taken:
    """A lane that is being received."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    async def end(self) -> None:
        """End it, because another lane takes its place."""
        self.scope.cancel()
        await self.ended.wait()
