"""Sends the parts of one attempt: over a direct lane where one comes about, else over streams.

A direct lane carries all that one member sends another. Without one, contributions and averages go over a stream each.
If a direct lane breaks, its sender begins again on streams. :mod:`p2pavg.allreduce.movers.moves` says who moves the
parts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import trio

from p2pavg.allreduce.context import DIRECT_SECONDS, AttemptPlan
from p2pavg.allreduce.events import DirectLaneBroke
from p2pavg.allreduce.messages import PROTOCOL, Lane, LaneHeader, Step, outgoing
from p2pavg.allreduce.movers.lane_driver import DirectUse, Turns, is_small
from p2pavg.allreduce.movers.moves import carry_out, sending
from p2pavg.allreduce.movers.reuse import START
from p2pavg.allreduce.movers.stream_driver import Precedence, StreamBytes, StreamUse
from p2pavg.allreduce.signals import Signals
from p2pavg.base.errors import ClosedError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import MAX_TIMEOUT_SECONDS
from p2pavg.base.threads.workers import in_own_thread
from p2pavg.group.candidate import Candidate
from p2pavg.net.transport import Stream, send_message

logger = logging.getLogger(__name__)

# From this bandwidth on, lanes wait for the processor more than for the link, and taking turns only costs.
FAST_MBPS = 500.0
MAX_MEMBERS = 256  # more than a roster has


class Sender:
    """Sends one member's parts of one attempt."""

    def __init__(self, plan: AttemptPlan, signals: Signals) -> None:
        self.streamed: set[str] = set()
        """Members to which parts have gone over streams instead of direct lanes."""
        self._plan = plan
        self._signals = signals
        bandwidth = plan.roster.members[plan.roster.position(plan.me)].assumed_bandwidth
        # On a slow link, lanes that take turns keep the links of all members full until the end.
        self._turns = Turns() if bandwidth < FAST_MBPS else None
        self._uses: list[DirectUse] = []
        self.stream_bytes = StreamBytes()
        self._precedence = Precedence()
        self._nursery: trio.Nursery | None = None

    @property
    def bytes_by_way(self) -> dict[str, int]:
        """Bytes of parts, their frames included, by the way that they have gone.

        See :class:`~p2pavg.telemetry.events.Way`.
        """
        return self.stream_bytes.with_lanes(sum(use.moved for use in self._uses))

    @property
    def bytes_left(self) -> int:
        """Sent, with the parts that are still incomplete and without what direct lanes still hold."""
        return self.stream_bytes.total + sum(use.sent for use in self._uses)

    def start(self, nursery: trio.Nursery) -> None:
        """Begin to send to every other member, in a nursery."""
        self._nursery = nursery
        for member in self._plan.roster.members:
            if member.peer_id != self._plan.me:
                nursery.start_soon(self.send_to, member)

    async def send_to(self, member: Candidate) -> None:
        """Send a member its contributions and averages."""
        plan = self._plan
        # The reducer has said in its promise how far this member's contribution has come.
        begin = plan.values.carry.goes_on_at(member.peer_id) if plan.contributes else START
        contributions, sums_at = plan.contributions_to(member.peer_id)
        contributions, averages = contributions[begin.parts :], plan.averages_to(member.peer_id)
        # Such as between two auxiliaries: no lane is opened for nothing.
        if not contributions and not averages:
            return

        # If the lane breaks, all of it is sent again, and the receiver drops what it has.
        steps = outgoing(contributions, averages, sums_at)
        if await self._over_direct_lane(member, plan.header(Lane.PARTS, begin=begin), steps):
            return
        # A stream each, since averages that wait for other members must not hold up contributions.
        async with trio.open_nursery() as nursery:
            if contributions:
                header = plan.header(Lane.CONTRIBUTIONS, begin=begin)
                nursery.start_soon(self.over_stream, member, header, outgoing(contributions, [], sums_at))
            if averages:
                nursery.start_soon(
                    self.over_stream, member, plan.header(Lane.AVERAGES), outgoing([], averages)
                )

    def pass_on(self, lost: Collection[str], to: Iterable[str]) -> None:
        """Send members the whole shares that lost members would have sent, as the same bytes.

        This member has the whole result.
        """
        members = {member.peer_id: member for member in self._plan.roster.members}
        for peer_id in to:
            for reducer in self._plan.ledger.routes.cut_off(peer_id, lost):
                if self._nursery is not None:
                    self._nursery.start_soon(self._send_share, members[peer_id], reducer)

    async def _send_share(self, member: Candidate, reducer: str) -> None:
        steps = outgoing([], [(reducer, part, None) for part in self._plan.ledger.parts[reducer]])
        header = self._plan.header(Lane.PASSED_ON, self._plan.group.position(reducer))
        if not await self._over_direct_lane(member, header, steps):
            await self.over_stream(member, header, steps)

    async def _over_direct_lane(self, member: Candidate, header: LaneHeader, steps: Sequence[Step]) -> bool:
        """Return whether everything went over a direct lane."""
        plan, transport = self._plan, self._plan.context.transport
        try:
            lane = await transport.open_lane(
                member.peer_id, addresses=member.addresses, timeout=DIRECT_SECONDS
            )
        except UnreachableError as error:
            logger.debug("no direct lane to %s: %s", member.peer_id, error)
            return False
        # Each sender begins with the member that follows it in the roster, so no two of them send to the same one at
        # first.
        place = (plan.group.position(member.peer_id) - plan.group.position(plan.me)) % MAX_MEMBERS
        use = DirectUse(lane, plan.values, plan.context.upload, self._signals, self._turns, place)
        self._uses.append(use)
        parts = [step.part for step in steps]
        may_be_small = header.lane is not Lane.PASSED_ON and plan.values.is_on_cpu
        try:
            if may_be_small and is_small(
                lane, parts, len(plan.roster.members), plan.context, plan.context.upload
            ):
                await use.send_small(header, steps)
            else:
                await in_own_thread(partial(use.send_parts, header, steps), stop=use.stop, name="p2pavg-send")
            # What the kernel took may be lost with the connection: only the receiver knows what has come.
            await lane.acknowledged()
        except StreamBrokenError as error:
            logger.info("the direct lane to %s broke: %s", member.peer_id, error)
            # The member may be dead, and no stream of votes may be open that would tell.
            self._signals.emit(DirectLaneBroke(member.peer_id))
            return False
        finally:
            # Also when the attempt ends before the acknowledgement has come: the transport waits for it then.
            if use.finished:
                transport.keep_lane(lane)
            else:
                lane.abort()
        return True

    async def over_stream(self, member: Candidate, header: LaneHeader, steps: Sequence[Step]) -> None:
        """Open a stream to a member, and send on it what its header announces."""
        self.streamed.add(member.peer_id)
        try:
            stream = await self._plan.context.transport.open_stream(
                member.peer_id,
                PROTOCOL,
                addresses=member.addresses,
                timeout=MAX_TIMEOUT_SECONDS,  # the attempt's: its failure detector gives up a member that is silent
                # A member that cannot be dialled has opened a connection of its own, or is about to.
                wait_inbound=True,
            )
            try:
                await send_message(stream, header.encode())
                await self._send(stream, header, steps)
            finally:
                await stream.aclose()
        except (UnreachableError, StreamBrokenError, ClosedError) as error:
            # A broken stream is the loss of the member; a broken lane was not.
            self._signals.broken(member.peer_id, error)

    async def _send(self, stream: Stream, header: LaneHeader, steps: Sequence[Step]) -> None:
        plan, passes_on = self._plan, header.lane is Lane.PASSED_ON
        # What is passed on does not wait for contributions: the attempt of which it is a part has none left to send.
        precedence = None if passes_on else self._precedence
        use = StreamUse(stream, plan.context, self._signals, self.stream_bytes, precedence)
        moves = sending(plan.values, stream.remote, steps, header.begin, passes_on=passes_on)
        with self._precedence.contributing() if header.lane is Lane.CONTRIBUTIONS else nullcontext():
            await carry_out(moves, use)
