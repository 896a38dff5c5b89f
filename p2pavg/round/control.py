"""The streams on which the members of a group vote, and the members that are silent on them for too long.

One stream a pair, opened by the later of the two in the roster. It is kept for the whole round; when it ends, or is
silent for too long, the other member is lost, for good. When both have said their last word, the stream rests until the
next round of the two: :mod:`p2pavg.allreduce.movers.lobby`.

In a round without trouble, the leader of the first ballot hears from all members, and tells all of them its end. The
others have nothing to say to each other. So in a short round (:mod:`p2pavg.round.quiet`), two of them open their stream
only when one of them has, or after :data:`~p2pavg.round.quiet.QUIET_FOLLOWERS_SECONDS`: from then on, its pings show
that a member lives. A member that has something to say, and is not the one that opens, asks the other one how the round
stands. This question makes the other one open it. A commit is not worth a stream: it is passed on where there is one. A
member that does not hear of it, since the leader died or lies, opens its streams and asks, and is answered how the
round ended.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from functools import partial
from typing import Protocol, cast

import trio

from p2pavg.allreduce.messages import PROTOCOL, Lane, LaneHeader
from p2pavg.allreduce.movers.lobby import ExpectedGroup, InboundLane, RestingStreams
from p2pavg.base.errors import (
    ClosedError,
    RefusedError,
    RemoteProtocolError,
    StreamBrokenError,
    UnreachableError,
)
from p2pavg.base.limits import ASK_AGAIN_SECONDS, MAX_TIMEOUT_SECONDS, TAIL_SECONDS
from p2pavg.base.threads.processor import ProcessorWait, ThreadWaits, never_waits
from p2pavg.consensus.failure_detector import FLOOR_SECONDS, MEMBER_PING_SECONDS, ArrivalPace, Silences, lag
from p2pavg.consensus.votes import MAX_VOTE_BYTES, MemberPing, Rest, ResultCommit, Vote, decode_vote
from p2pavg.group.roster import Roster
from p2pavg.net.transport import Stream, Transport, receive_message, send_message, send_messages
from p2pavg.round.quiet import QUIET_FOLLOWERS_SECONDS

logger = logging.getLogger(__name__)

LEADER = 0  # position of the first ballot's leader
ASK_OUTCOME_SECONDS = 2.0  # for an answer to the question how a round ended
MISSING_SECONDS = 0.5  # then a member that has sent nothing is asked whether it knows the group
MAX_UNSENT = 64  # votes to a member that reads none; an honest round takes a few each


class VoteListener(Protocol):
    """Listener of the votes: it is told what the members say, and which of them are lost."""

    def heard(self, position: int, vote: Vote) -> None:
        """A member has voted."""

    def lost(
        self,
        position: int,
        reason: str,
        *,
        hostile: bool = False,
        silent: bool = False,
        reachable: bool = False,
    ) -> None:
        """A member's stream has ended, or it was silent for too long. ``reachable``: its votes still arrive."""

    def missing(self, position: int) -> None:
        """A member is to be asked: it may not know that the group stands, or have ended the round."""


class _PeerStream:
    """This member's side of the stream to one other."""

    def __init__(self, pace: ArrivalPace) -> None:
        self.pace = pace
        self.unsent: deque[Vote] = deque()
        self.unanswered: list[Vote] = []
        """Sent on a stream on which nothing of this round has come yet."""
        self.heard = False
        """True if something of this round has come on the present stream, or it is new."""
        self.rested = False
        """True if the other side has said its last word."""
        self.changed = trio.Event()
        self.ending = False
        self.scope = trio.CancelScope()
        self.is_done = False
        self.taken = False
        self.asked = -math.inf  # when the member was asked last

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class VoteStreams:
    """This member's streams to all others.

    Args:
        resting: streams of earlier rounds that may be used again.
        short: whether followers open their streams to each other only when they need them.
        part_bytes: of the largest part.
        max_silence: seconds that a member may be silent at most, however slow its link.
        silences: of the members in earlier rounds; those of this one are added.
        processor_wait: of the event loop's thread.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        roster: Roster,
        group: ExpectedGroup,
        resting: RestingStreams,
        short: bool,
        hears: VoteListener,
        part_bytes: int,
        max_silence: float,
        silences: Silences | None = None,
        processor_wait: ProcessorWait = never_waits,
    ) -> None:
        self._transport = transport
        self._resting = resting
        self._quiet_seconds = QUIET_FOLLOWERS_SECONDS if short else 0.0
        self._roster = roster
        self._group = group
        self._hears = hears
        self._processor_wait = processor_wait
        self._max_silence = max_silence
        self._silences = Silences() if silences is None else silences
        self._positions = {member.peer_id: index for index, member in enumerate(roster.members)}
        self._me = self._positions[transport.peer_id]
        self.scope = trio.CancelScope()
        """Cancel it to say nothing more."""
        self._all_done = trio.Event()
        group.on_asked = self.asked
        self._nursery: trio.Nursery | None = None
        now = trio.current_time()
        self._lines: dict[int, _PeerStream] = {}
        for position, member in enumerate(roster.members):
            # A link carries the parts of all other members too.
            prior = part_bytes * 8 * len(roster.members) / (member.assumed_bandwidth * 1e6)
            if position != self._me:
                patience = self._silences.patience(member.peer_id, now)
                self._lines[position] = _PeerStream(
                    ArrivalPace(now, part_bytes, max_silence, prior, patience)
                )

    async def run(self) -> None:
        """Carry votes until :attr:`scope` is cancelled, or until :meth:`end` has sent the last ones."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    nursery.start_soon(self._accept, nursery)
                    nursery.start_soon(self._watch)
                    for position, line in self._lines.items():
                        if not self._quiet_seconds or LEADER in (position, self._me):
                            self._have_opened(position)
                        # A vote may have been told before this task ran: `tell` had no nursery then, and
                        # opened nothing.
                        elif _is_needed(line):
                            self._need(position)
                    await self._all_done.wait()
                finally:
                    self._nursery = None
                nursery.cancel_scope.cancel()

    def tell(self, position: int, vote: Vote) -> None:
        """Have a vote sent. Never blocks."""
        line = self._lines[position]
        # A member that reads nothing would otherwise make this one hold votes without end.
        if len(line.unsent) >= MAX_UNSENT:
            self._hears.lost(position, "it no longer takes votes")
            return
        line.unsent.append(vote)
        # In a short round, this vote may be the first one that is worth a stream.
        if self._nursery is not None and _is_needed(line):
            self._need(position)
        line.wake()

    def _need(self, position: int) -> None:
        """Have the stream to a member opened before its time: by this side, or by the other one, which is asked."""
        if position < self._me:
            self._have_opened(position)
        # Only one side of a pair opens, so that the two never have two streams. If it is the other side, the
        # question makes it open. In a long round it opens at the begin, and needs no question.
        elif self._quiet_seconds and not self._lines[position].taken:
            self._ask(position)

    def asked(self, peer_id: str) -> None:
        """Open the stream to a member that has asked how the round stands: it waits for it."""
        if peer_id in self._positions:
            self._have_opened(self._positions[peer_id])

    def _have_opened(self, position: int) -> None:
        """Open the stream to a member, unless the member is to open it."""
        # Later members open their own. Without a nursery, the round has not begun to vote, or has ended.
        if position >= self._me or self._nursery is None:
            return
        line = self._lines[position]
        # The watch, a question and a vote can all want the stream. Only the first of them opens it.
        if not (line.taken or line.is_done):
            line.taken = True
            self._nursery.start_soon(self._open, position)

    def _ask(self, position: int, *, again_after: float = math.inf) -> None:
        """Have a member asked how the round stands for it, once, or again after a while; it opens its stream then."""
        line, now = self._lines[position], trio.current_time()
        # `asked` begins at minus infinity: an infinite pause lets the first question pass, and no second one.
        if now - line.asked >= again_after and not line.is_done:
            line.asked = now
            self._hears.missing(position)

    def drop(self, position: int) -> None:
        """Have nothing more to do with a member."""
        line = self._lines[position]
        self._finish(line)
        line.scope.cancel()

    def _finish(self, line: _PeerStream) -> None:
        line.is_done = True
        if all(each.is_done for each in self._lines.values()):
            self._all_done.set()

    def end(self) -> None:
        """Send what was to be said, and close; bounded in time, from the first call on."""
        for position, line in self._lines.items():
            # A second call must not put off the deadline: a member that goes on voting would delay the end of
            # this one.
            if line.ending:
                continue
            line.ending = True
            # A member that was silent and came back gets more patience in the next rounds.
            self._note_silence(position, line.pace.longest)
            # The last votes may still be on their way.
            line.scope.deadline = trio.current_time() + TAIL_SECONDS
            # There is no stream to empty. A member that has not heard of the end asks for it.
            if not line.taken:
                self._finish(line)
            line.wake()

    def arrived(self, peer_id: str, count: int) -> None:
        """Bytes of a part came from a member."""
        self._lines[self._positions[peer_id]].pace.arrived(trio.current_time(), count, data=True)

    def owes(self, peer_id: str, yes: bool) -> None:
        """A member's next part is waited for, or no longer."""
        self._lines[self._positions[peer_id]].pace.owes(trio.current_time(), yes)

    def doubt(self, position: int) -> None:
        """Another member has given this one up. Each has waited for it since another moment."""
        line = self._lines[position]
        line.pace.doubt()
        # At once: for the shorter timeout, the silence so far may already be too long.
        self._lose_if_overdue(position, line)

    def _lose_if_overdue(self, position: int, line: _PeerStream) -> bool:
        if line.is_done:
            return False
        now = trio.current_time()
        late = lag([each.pace.contact for each in self._lines.values() if each.pace.contact is not None])
        answers = self._transport.answers(self._roster.members[position].peer_id, FLOOR_SECONDS)
        reason = line.pace.overdue(now, late, answers=answers)
        if reason is not None:
            # A member that sends votes and no parts may wait for a leader that lies.
            is_silent = line.pace.is_silent(now, late, answers=answers)
            if is_silent:
                self._note_silence(position, line.pace.silence_of_lost(now))
            self._hears.lost(position, reason, silent=True, reachable=not is_silent)
        return reason is not None

    def _note_silence(self, position: int, seconds: float) -> None:
        self._silences.note(self._roster.members[position].peer_id, trio.current_time(), seconds)

    async def ask(self, position: int) -> Vote | None:
        """Ask a member how the round ended for it. Return ``None`` when it does not answer.

        Raises:
            RefusedError: no process listens any more where it did.
        """
        member = self._roster.members[position]
        with trio.move_on_after(ASK_OUTCOME_SECONDS):
            try:
                stream = await self._transport.open_stream(
                    member.peer_id, PROTOCOL, addresses=member.addresses, timeout=ASK_OUTCOME_SECONDS
                )
            # A refusal says that the process has ended, which lets the agreement count the member as gone. It
            # is a kind of unreachable, so it is caught first.
            except RefusedError:
                raise
            except UnreachableError as error:
                logger.debug("%s cannot be asked: %s", member.peer_id, error)
                return None
            try:
                header = LaneHeader(self._group.group_id, Lane.ASK)
                await send_message(stream, header.encode())
                answer = await receive_message(stream, max_bytes=MAX_VOTE_BYTES)
                vote = None if answer is None else decode_vote(answer, len(self._roster.members))
                return None if isinstance(vote, Rest) else vote  # which is no answer
            except (StreamBrokenError, ClosedError, RemoteProtocolError) as error:
                logger.debug("%s gave no answer: %s", member.peer_id, error)
            finally:
                await stream.reset()
        return None

    # ------------------------------------------------------------------ streams

    async def _open(self, position: int) -> None:
        line = self._lines[position]
        try:
            with line.scope:
                await self._open_and_talk(position)
        finally:
            self._finish(line)  # also if it was cancelled before there was a stream

    async def _open_and_talk(self, position: int) -> None:
        member = self._roster.members[position]
        # A stream of an earlier round saves the negotiation. The other side may have closed it meanwhile.
        rested = await self._resting.take(member.peer_id)
        if rested is not None and await self._used_again(position, rested):
            return
        try:
            stream = await self._new_stream(
                position, dials_first=bool(self._quiet_seconds) or rested is not None
            )
        except UnreachableError as error:
            self._hears.lost(position, str(error))
            return
        try:
            await self._begin(position, stream)
        except (StreamBrokenError, ClosedError) as error:
            self._hears.lost(position, str(error))

    async def _new_stream(self, position: int, *, dials_first: bool) -> Stream:
        """Open a stream, or wait until the member has connected, if it cannot be dialled.

        Args:
            dials_first: do not wait for a member whose process is gone.

        Raises:
            UnreachableError: neither happened.
        """
        member = self._roster.members[position]
        open_stream = partial(
            self._transport.open_stream,
            member.peer_id,
            PROTOCOL,
            addresses=member.addresses,
            timeout=MAX_TIMEOUT_SECONDS,  # the round's: its failure detector knows how late all members are
        )
        # In a short round, and for a member whose stream was there a moment ago, this peer dials first without waiting:
        # a refusal then loses a dead member at once. Any other failure may mean that the member is behind a router, and
        # has to connect itself.
        if dials_first:
            try:
                return await open_stream()
            except RefusedError:
                raise
            except UnreachableError as error:
                logger.debug("%s cannot be dialled: %s", member.peer_id, error)
        return await open_stream(wait_inbound=True)

    async def _used_again(self, position: int, stream: Stream) -> bool:
        """Vote on a stream that has rested; return False if the other side had closed it, so that it takes another.

        It had closed it if the stream ends before it has said anything. What was sent until then is sent again.
        """
        line = self._lines[position]
        try:
            await self._begin(position, stream, is_new=False)
        except (StreamBrokenError, ClosedError) as error:
            logger.debug("a resting stream to %s has ended: %s", stream.remote, error)
            # In front of what was told since. The order of one member's votes matters: what it shows comes
            # before its promise.
            line.unsent.extendleft(reversed(line.unanswered))
            return False
        return True

    async def _begin(self, position: int, stream: Stream, *, is_new: bool = True) -> None:
        """Name the group on a stream, vote on it, and let it rest."""
        try:
            await send_message(stream, LaneHeader(self._group.group_id, Lane.CONTROL).encode())
        # The other side would keep a stream without a header until its timeout.
        except BaseException:
            await stream.reset()
            raise
        if await self._talk(position, stream, is_new=is_new):
            await self._resting.keep(stream)

    async def _accept(self, nursery: trio.Nursery) -> None:
        while True:
            inbound = await self._group.controls.receive()
            position = self._positions.get(inbound.stream.remote)
            line = None if position is None else self._lines.get(position)
            if line is None or position is None or position < self._me or line.taken or line.is_done:
                logger.debug("%s opened a control stream that is not due", inbound.stream.remote)
                inbound.finished.set()
                continue
            line.taken = True
            nursery.start_soon(self._talk_inbound, position, inbound)

    async def _talk_inbound(self, position: int, inbound: InboundLane) -> None:
        try:
            # The scope ends the stream of a member that is lost, and bounds the time for the last votes.
            with self._lines[position].scope:
                stream = cast(Stream, inbound.stream)  # direct lanes carry no votes
                inbound.clean = await self._talk(position, stream)
        finally:
            inbound.finished.set()

    async def _talk(self, position: int, stream: Stream, *, is_new: bool = True) -> bool:
        """Read and write until the line is dropped, or both sides have said their last word; return whether they have.

        Unless they have, the stream is closed.

        Raises:
            StreamBrokenError: a stream that is not new has ended before anything came on it.
        """
        line = self._lines[position]
        line.heard = is_new
        has_spoken = may_rest = False
        broken = ""
        try:
            async with trio.open_nursery() as nursery:
                # The directions end apart: after its own last word, this member reads on until the other
                # side's last word.
                nursery.start_soon(self._listen, position, stream, nursery.cancel_scope)
                await self._speak(line, stream)
                has_spoken = True
            may_rest = has_spoken and line.rested
        except* (StreamBrokenError, ClosedError) as errors:
            broken = str(errors.exceptions[0])
        # Unlike a broken stream, impossible votes are their sender's doing: this loss is hostile.
        except* RemoteProtocolError as errors:
            self._hears.lost(position, f"it broke the protocol: {errors.exceptions[0]}", hostile=True)
        finally:
            # On a resting stream, an end before the first vote says only that the other side had closed it.
            # The line goes on with a new stream, so it is not finished here.
            has_ended = bool(broken) and not line.heard
            if not has_ended:
                self._finish(line)
            if not may_rest:
                # Closed, what was sent still arrives; the other side may be slower than the last word may take.
                await (stream.aclose() if has_spoken else stream.reset())
        if has_ended:
            raise StreamBrokenError(broken)
        if broken:
            self._hears.lost(position, broken)
        return may_rest

    async def _speak(self, line: _PeerStream, stream: Stream) -> None:
        while True:
            if line.unsent or line.ending:
                # Read before the write waits: votes that are told meanwhile take another turn, and the last
                # word comes after them.
                has_ended = line.ending
                await send_messages(stream, [*_taken(line), *([Rest().encode()] if has_ended else [])])
                if has_ended:
                    return
                continue
            changed = line.changed
            with trio.move_on_after(MEMBER_PING_SECONDS) as scope:
                await changed.wait()
            if scope.cancelled_caught:
                await send_message(stream, MemberPing().encode())

    async def _listen(self, position: int, stream: Stream, scope: trio.CancelScope) -> None:
        line = self._lines[position]
        while (message := await receive_message(stream, max_bytes=MAX_VOTE_BYTES)) is not None:
            line.pace.arrived(trio.current_time(), len(message), data=False)
            line.heard = True
            vote = decode_vote(message, len(self._roster.members))
            if isinstance(vote, Rest):
                line.rested = True
                self._hears.lost(position, "it has ended the round")  # which matters only if this one has not
                return
            # The agreement bounds the votes of a member, and pings come as long as the round lasts.
            if not isinstance(vote, MemberPing):
                self._hears.heard(position, vote)
        # A resting stream that the other side had closed is no reason to lose the member.
        if not line.heard:
            raise StreamBrokenError("it had closed the stream")
        self._hears.lost(position, "it closed its stream")
        # Without this, the other task would go on sending pings to a member that has ended.
        scope.cancel()

    # ------------------------------------------------------------------ silence

    async def _watch(self) -> None:
        """Give up members that are silent for too long, and open the streams that were not needed before."""
        began = trio.current_time()
        waits = ThreadWaits(self._processor_wait, began)
        may_wait = self._max_silence  # in all; there has to be time for another attempt
        while True:
            before = trio.current_time()
            await trio.sleep(MEMBER_PING_SECONDS)
            now = trio.current_time()
            # On a busy machine, the loop is often a little late with everything, and the other members may share it.
            waited = min(waits.since_last_look(now), may_wait)
            may_wait -= waited
            held_up = max(now - before - MEMBER_PING_SECONDS, waited, 0.0)
            # The first questions are put off too: this member could not read what came meanwhile.
            began += held_up
            for position, line in self._lines.items():
                # What came while this process itself stood still is read now.
                line.pace.excuse(held_up)
                if self._lose_if_overdue(position, line):
                    continue
                seconds = trio.current_time() - began
                # From here on, pings show that each follower lives, as in a long round.
                if seconds >= self._quiet_seconds:
                    self._have_opened(position)
                # The leader may have died before it told that member that the group stands, and the answer
                # says so.
                if line.pace.contact is None and seconds >= MISSING_SECONDS:
                    self._ask(position)
                # By now a living member has opened its stream, unless it has ended the round, or began later.
                if (
                    self._quiet_seconds
                    and seconds >= self._quiet_seconds + MEMBER_PING_SECONDS
                    and not line.taken
                ):
                    # Whose stream is missing, and who may have begun the round later than this member.
                    self._ask(position, again_after=ASK_AGAIN_SECONDS)


def _is_needed(line: _PeerStream) -> bool:
    """Return whether something is to be said that is worth a stream."""
    return any(not isinstance(vote, ResultCommit) for vote in line.unsent)


def _taken(line: _PeerStream) -> list[bytes]:
    """Take the votes that are to be sent, encoded."""
    votes = list(line.unsent)
    line.unsent.clear()
    # On a resting stream, the other side may have closed it: then these votes are sent again.
    if not line.heard:
        line.unanswered += votes
    return [vote.encode() for vote in votes]
