"""The lobby: inbound streams of an exchange wait here for the group and the attempt that they belong to.

A member may hear of a commit, or of a new attempt, later than another one's first lane of it arrives. So a group is
expected from the moment in which this peer accepts its roster, and lanes wait for their attempt. A lane of any other
group is refused at once. How the last rounds ended is told to their members that ask, or open a stream of votes late.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import trio

from p2pavg.allreduce.messages import MAX_HEADER_BYTES, Lane, LaneHeader
from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.base.limits import IDLE_STREAM_SECONDS, REPLY_SECONDS
from p2pavg.consensus.votes import MemberPing, Unknown, Vote
from p2pavg.net.transport import LENGTH_BYTES, DirectLane, PeerId, Stream, receive_message, send_message

# Streams of votes that rest between two rounds, for the next round of the same two members.
#
# To open a stream takes a negotiation, and to close one a frame each way; in a round of a small vector that is a
# third of all work. The side that opened a stream keeps it here. The other side goes on serving it:
# p2pavg.allreduce.movers.lobby.

MAX_RESTING = 64  # streams; beyond that, the one that has rested longest is closed


class RestingStreams:
    """The streams that this peer opened and whose last round has ended on both sides.

    An old one is closed when another is taken or kept. Without a further round, the serving side resets it.
    """

    def __init__(self) -> None:
        self._resting: OrderedDict[PeerId, tuple[Stream, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._resting)

    async def take(self, peer_id: PeerId) -> Stream | None:
        """Return the stream to a peer, which belongs to the caller from now on; ``None`` if none rests."""
        await self._close_old()
        stream, _ = self._resting.pop(peer_id, (None, 0.0))
        return stream

    async def keep(self, stream: Stream) -> None:
        """Take a stream over. One through a relay is closed: the next may be direct."""
        if stream.relayed:
            await stream.aclose()
            return
        before, _ = self._resting.pop(stream.remote, (None, 0.0))
        # Half of the other side's time, so that the other side still serves the stream when it is used.
        # The serving side keeps it twice as long: this side must never write to a stream that is closed there.
        self._resting[stream.remote] = (stream, trio.current_time() + IDLE_STREAM_SECONDS / 2)
        if before is None and len(self._resting) > MAX_RESTING:
            _, (before, _) = self._resting.popitem(last=False)
        if before is not None:
            await before.aclose()
        await self._close_old()

    async def _close_old(self) -> None:
        now = trio.current_time()
        for peer_id in [peer_id for peer_id, (_, until) in self._resting.items() if until <= now]:
            # Another task may have closed it while this one closed an earlier one.
            stream, _ = self._resting.pop(peer_id, (None, 0.0))
            if stream is not None:
                await stream.aclose()


logger = logging.getLogger(__name__)

MAX_WAITING_LANES = 8  # of one peer in one group, that no attempt has taken yet
MAX_REMEMBERED = 256  # rounds that ended
MAX_RESTING_INBOUND = 2
"""Streams of votes of one peer between two rounds; it keeps one, and may just open another."""

HowItEnded = Callable[[str], Vote]
"""Answer to a peer that asks how a round ended."""
ServeAudit = Callable[[Stream, int], Awaitable[None]]
"""Serves a member that audits an attempt."""
ServeTicket = Callable[[DirectLane], Awaitable[bool]]
"""Reads the direct lane for which a ticket was given; returns whether it was read to its end."""


class InboundLane:
    """A stream or a direct lane that another member opened, with its header read."""

    def __init__(self, stream: Stream | DirectLane, header: LaneHeader) -> None:
        self.stream = stream
        self.header = header
        self.finished = trio.Event()
        """Set by the task that took the lane; a stream that is not ``clean`` is reset after it."""
        self.taken = False
        """True once a task has taken the lane for good. That task sets ``finished`` then, however it ends."""
        self.clean = False
        """True if all that was sent for this header was read, so that another header may follow."""

    @property
    def remote(self) -> str:
        """Id of the member that opened it."""
        return self.stream.remote


class Lanes:
    """The inbound lanes of one attempt, or the control streams of one group, as they arrive."""

    def __init__(self) -> None:
        self._waiting: list[InboundLane] = []
        self._arrive, self._arriving = trio.open_memory_channel[InboundLane](math.inf)

    def arrived(self, lane: InboundLane) -> None:
        """Never blocks: how many wait is bounded by the group."""
        self._waiting.append(lane)
        self._arrive.send_nowait(lane)

    def left(self, lane: InboundLane) -> None:
        """It is not used any more."""
        self._waiting.remove(lane)

    async def receive(self) -> InboundLane:
        """The next one."""
        return await self._arriving.receive()

    def close(self) -> None:
        """None is wanted any more; all that wait are let go.

        A lane with :attr:`InboundLane.taken` is let go by its task, which ends soon. Its sender may have read the
        acknowledgement already, and keeps the lane for the next attempt, which would find it broken.
        """
        for lane in self._waiting:
            if not lane.taken:
                lane.finished.set()


class ArrivalListener(Protocol):
    """Matchmaking, which may wait for a proof that a group has committed."""

    def exchange_begun(self, group_id: bytes, peer_id: str) -> None:
        """Note that a peer has opened a stream of the exchange of an expected group."""
        ...


class ExpectedGroup:
    """The streams of one group. Close it, or they wait for ever."""

    def __init__(self, lobby: StreamRouter, group_id: bytes, listener: ArrivalListener | None) -> None:
        self.group_id = group_id
        self.members: frozenset[str] | None = None
        """Peer ids; ``None`` until they are known."""
        self._listener = listener
        self.on_asked: Callable[[str], None] = lambda _: None
        """Is told the id of each peer that asks how the round stands."""
        self.controls = Lanes()
        self._lobby = lobby
        self._attempts: dict[int, Lanes] = {}
        self._newest = 0
        self._lanes_of: Counter[str] = Counter()
        lobby.groups[group_id] = self

    def __enter__(self) -> ExpectedGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def consists_of(self, members: Iterable[str]) -> None:
        """Note the peer ids of the group, once it has committed."""
        self.members = frozenset(members)
        # Before the first lane is opened: members keep their places when strangers fill the limits of connections.
        self._lobby.on_members(self.members)

    def lanes(self, attempt: int) -> Lanes:
        """Return the lanes of an attempt. Those of older ones that wait are let go, and later ones are refused."""
        self._newest = attempt
        for older in [number for number in self._attempts if number < attempt]:
            self._attempts.pop(older).close()
        return self._attempts.setdefault(attempt, Lanes())

    def close(self) -> None:
        """No stream of this group is expected any more; those that wait are let go."""
        self.end()
        self.controls.close()

    def end(self) -> None:
        """As :meth:`close`, but what is still to be said on control streams is said."""
        # The same group may be expected anew, by another object.
        if self._lobby.groups.get(self.group_id) is self:
            del self._lobby.groups[self.group_id]
        for lanes in self._attempts.values():
            lanes.close()

    async def arrived(self, stream: Stream | DirectLane, header: LaneHeader) -> bool:
        """Hand a stream over and keep it for as long as it is used; whether it was read to its end."""
        # Its sender may not have heard of the newer attempt yet, so this is no fault.
        if header.lane is not Lane.CONTROL and header.attempt < self._newest:
            logger.debug("%s opened a lane of an attempt that is over", stream.remote)
            return False
        # Of a group of 32 a member opens two lanes, and passes on the shares of those that were lost.
        # Lanes ahead of time wait with their buffers: without a limit, one member could have any number of them wait.
        if self._lanes_of[stream.remote] >= MAX_WAITING_LANES and header.attempt > self._newest:
            raise RemoteProtocolError("it opened more lanes ahead of time than a member needs")
        if self._lanes_of[stream.remote] >= 128:
            raise RemoteProtocolError("it opened more lanes than a member needs")
        lanes = self.controls
        if header.lane is not Lane.CONTROL:
            lanes = self._attempts.setdefault(header.attempt, Lanes())
        self._lanes_of[stream.remote] += 1
        lane = InboundLane(stream, header)
        try:
            # Before the next line, which may begin the exchange: it looks for lanes that wait.
            lanes.arrived(lane)
            # A lane proves that the group has committed: the leader may have died before it told this member.
            if self._listener is not None:
                self._listener.exchange_begun(self.group_id, stream.remote)
            # The stream lives as long as the task that serves it, so it waits here while the attempt's tasks use it.
            await lane.finished.wait()
        finally:
            lanes.left(lane)
            self._lanes_of[stream.remote] -= 1
        return lane.clean


class StreamRouter:
    """Serves the exchange protocol of one peer."""

    def __init__(self) -> None:
        self.groups: dict[bytes, ExpectedGroup] = {}
        self.resting = RestingStreams()
        """Streams of votes that this peer opened, between two rounds."""
        self._rests: Counter[str] = Counter()  # streams of votes that each peer opened, between two rounds
        self.on_members: Callable[[frozenset[str]], None] = lambda _: None
        """Is told the peer ids of each group that has committed."""
        self.audited: dict[bytes, ServeAudit] = {}
        """By group id: serves the members that audit this peer's share."""
        self.tickets: dict[bytes, tuple[str, ServeTicket]] = {}
        """Tickets of 32 random bytes, each with the peer that may open a direct lane with it."""
        self._ended: OrderedDict[bytes, HowItEnded] = OrderedDict()

    def expect(self, group_id: bytes, listener: ArrivalListener | None = None) -> ExpectedGroup:
        """Let streams of this group in from now on; ``listener`` is told of each."""
        return ExpectedGroup(self, group_id, listener)

    def wants_lane(self, peer_id: str) -> bool:
        """Return whether a direct lane of this peer is expected: it has a ticket, or may be in a group that is."""
        return any(peer_id == holder for holder, _ in self.tickets.values()) or any(
            group.members is None or peer_id in group.members for group in self.groups.values()
        )

    def remember(self, group_id: bytes, how_it_ended: HowItEnded) -> None:
        """Keep the answer for peers that ask about a group. Of many, the oldest answer is forgotten."""
        self._ended[group_id] = how_it_ended
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    async def serve(self, stream: Stream) -> None:
        """One inbound stream of the exchange protocol; one of votes serves a round after another."""
        header = await _header_within(REPLY_SECONDS, stream)
        if header is None:
            return
        # Any peer may ask, also about a group that this one does not know: it may have been restarted.
        if header.lane is Lane.ASK:
            await self._answer(stream, header.group_id)
            return
        if header.lane is Lane.AUDIT:
            if header.group_id in self.audited:
                await self.audited[header.group_id](stream, header.attempt)
            return
        if header.lane is Lane.STATE:
            raise RemoteProtocolError("pieces of states go over a direct lane or a stream of their own")
        may_rest = await self._serve_round(stream, header) and header.lane is Lane.CONTROL
        while may_rest and self._rests[stream.remote] < MAX_RESTING_INBOUND:
            # Counted while it rests only: a stream in use is bounded by its group.
            self._rests[stream.remote] += 1
            try:
                header = await _header_within(IDLE_STREAM_SECONDS, stream)
            finally:
                self._rests -= Counter([stream.remote])  # without those that have none left
            if header is None:
                return
            if header.lane is not Lane.CONTROL:
                raise RemoteProtocolError("a stream of votes goes on with something else")
            may_rest = await self._serve_round(stream, header)

    async def _serve_round(self, stream: Stream, header: LaneHeader) -> bool:
        """Hand a stream to the round that its header names; return whether it was read to the end of its use."""
        if header.lane is Lane.CONTROL and header.group_id in self._ended:
            # It comes late, and its sender may not know the end yet.
            await self._answer(stream, header.group_id)
            return False
        group = self.groups.get(header.group_id)
        if group is None:
            logger.debug("%s opened a lane of a group that is not expected", stream.remote)
            return False
        return await group.arrived(stream, header)

    async def serve_lane(self, lane: DirectLane) -> None:
        """A direct lane on which another use begins."""
        header = await _receive_header(lane)
        if header.lane is Lane.STATE:
            # A ticket that was overheard is of no use: the peer at the other end is authenticated, and must be its
            # holder.
            holder, serve = self.tickets.get(header.group_id, ("", None))
            if serve is None or lane.remote != holder:
                raise StreamBrokenError("a direct lane with a ticket that this peer has not given its sender")
            if not await serve(lane):
                raise StreamBrokenError("the pieces on the direct lane are no longer wanted")
            return
        # Votes always go over libp2p's streams, one for each pair.
        if header.lane not in (Lane.PARTS, Lane.PASSED_ON):
            raise RemoteProtocolError("a direct lane that carries no parts")
        group = self.groups.get(header.group_id)
        # As an error: the lane may hold parts that were not read, and must not be kept for another use.
        if group is None or not await group.arrived(lane, header):
            raise StreamBrokenError("the parts on the direct lane are no longer wanted")

    async def _answer(self, stream: Stream, group_id: bytes) -> None:
        group = self.groups.get(group_id)
        if group_id in self._ended:
            answer = self._ended[group_id](stream.remote)
        else:
            # A round that goes on has no end to tell; the ping says that this member is in it.
            answer = Unknown() if group is None else MemberPing()
        if group is not None:
            # A member that asks waits for the stream of votes that this one is to open.
            group.on_asked(stream.remote)
        with trio.move_on_after(REPLY_SECONDS):
            await send_message(stream, answer.encode())
            await stream.aclose()


async def _header_within(seconds: float, stream: Stream) -> LaneHeader | None:
    """Return the header that comes on a stream; ``None`` if none comes in time, or the stream ends."""
    with trio.move_on_after(seconds) as scope:
        message = await receive_message(stream, max_bytes=MAX_HEADER_BYTES)
    return None if scope.cancelled_caught or message is None else LaneHeader.decode(message)


async def _receive_header(lane: DirectLane) -> LaneHeader:
    """Return the header with which a use of the lane begins. Its first byte is there; the rest has a bounded time."""
    try:
        # A lane may rest for long before a header begins. One that has begun must end soon.
        with trio.fail_after(REPLY_SECONDS):
            count = int.from_bytes(await lane.receive_exactly(LENGTH_BYTES), "big")
            if not 0 < count <= MAX_HEADER_BYTES:
                raise RemoteProtocolError(  # noqa: TRY301 - it costs the lane as any other fault
                    f"a header of {count} bytes on a direct lane"
                )
            return LaneHeader.decode(await lane.receive_exactly(count))
    except trio.TooSlowError:
        lane.abort()
        raise StreamBrokenError(f"{lane.remote} sent no header within {REPLY_SECONDS:.0f} s") from None
    except BaseException:
        lane.abort()
        raise
