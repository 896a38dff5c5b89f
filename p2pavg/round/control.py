"""The streams on which the members of a group vote, and the members that are silent on them for too long.

One stream a pair, opened by the later of the two in the roster. It is kept for the whole round; when it ends, or is
silent for too long, the other member is lost, for good.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

import trio

from p2pavg.allreduce.lobby import ExpectedGroup
from p2pavg.allreduce.messages import PROTOCOL, Lane, LaneHeader, encode_header
from p2pavg.consensus.failure_detector import PING_SECONDS, Pace
from p2pavg.consensus.votes import MAX_VOTE_BYTES, Ping, Vote, decode_vote, encode_vote
from p2pavg.errors import (
    ClosedError,
    RefusedError,
    RemoteProtocolError,
    StreamBrokenError,
    UnreachableError,
)
from p2pavg.group.roster import Roster
from p2pavg.net.framing import receive_message, send_message
from p2pavg.net.transport import Stream, Transport

logger = logging.getLogger(__name__)

OPEN_SECONDS = 10.0
ASK_SECONDS = 2.0  # for an answer to the question how a round ended
FLUSH_SECONDS = 2.0  # for the last votes, after the end
MISSING_SECONDS = 0.5  # then a member that has sent nothing is asked whether it knows the group
MAX_UNSENT = 64  # votes to a member that reads none; an honest round takes a few each


class Hears(Protocol):
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
        """A member has not been heard of at all, and may not know that the group stands."""


class _Line:
    """This member's side of the stream to one other."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.unsent: deque[Vote] = deque()
        self.changed = trio.Event()
        self.ending = False
        self.scope = trio.CancelScope()
        self.done = trio.Event()
        self.taken = False
        self.asked = False

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class Control:
    """This member's streams to all others.

    Args:
        part_bytes: of the largest part.
        max_silence: seconds that a member may be silent at most, however slow its link.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        roster: Roster,
        group: ExpectedGroup,
        hears: Hears,
        part_bytes: int,
        max_silence: float,
    ) -> None:
        self._transport = transport
        self._roster = roster
        self._group = group
        self._hears = hears
        self._positions = {member.peer_id: index for index, member in enumerate(roster.members)}
        self._me = self._positions[transport.peer_id]
        self.scope = trio.CancelScope()
        """Cancel it to say nothing more."""
        now = trio.current_time()
        self._lines: dict[int, _Line] = {}
        for position, member in enumerate(roster.members):
            # A link carries the parts of all other members too.
            prior = part_bytes * 8 * len(roster.members) / (member.assumed_bandwidth * 1e6)
            if position != self._me:
                self._lines[position] = _Line(Pace(now, part_bytes, max_silence, prior))

    async def run(self) -> None:
        """Carry votes until :attr:`scope` is cancelled, or until :meth:`end` has sent the last ones."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._accept, nursery)
                nursery.start_soon(self._watch)
                for position in self._lines:
                    if position < self._me:
                        nursery.start_soon(self._open, position)
                for line in self._lines.values():
                    await line.done.wait()
                nursery.cancel_scope.cancel()

    def tell(self, position: int, vote: Vote) -> None:
        """Have a vote sent. Never blocks."""
        line = self._lines[position]
        if len(line.unsent) >= MAX_UNSENT:
            self._hears.lost(position, "it no longer takes votes")
            return
        line.unsent.append(vote)
        line.wake()

    def drop(self, position: int) -> None:
        """Have nothing more to do with a member."""
        line = self._lines[position]
        line.done.set()
        line.scope.cancel()

    def end(self) -> None:
        """Send what was to be said, and close; bounded in time."""
        for line in self._lines.values():
            line.ending = True
            line.scope.deadline = trio.current_time() + FLUSH_SECONDS
            if not line.taken:
                line.done.set()
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
        self._lose_if_overdue(position, line)

    def _lose_if_overdue(self, position: int, line: _Line) -> bool:
        now = trio.current_time()
        reason = None if line.done.is_set() else line.pace.overdue(now)
        if reason is not None:
            # A member that sends votes and no parts may wait for a leader that lies.
            self._hears.lost(position, reason, silent=True, reachable=not line.pace.is_silent(now))
        return reason is not None

    async def ask(self, position: int) -> Vote | None:
        """Ask a member how the round ended for it. Return ``None`` when it does not answer.

        Raises:
            RefusedError: no process listens any more where it did.
        """
        member = self._roster.members[position]
        with trio.move_on_after(ASK_SECONDS):
            try:
                stream = await self._transport.open_stream(
                    member.peer_id, PROTOCOL, addresses=member.addresses, timeout=ASK_SECONDS
                )
            except RefusedError:
                raise
            except UnreachableError as error:
                logger.debug("%s cannot be asked: %s", member.peer_id, error)
                return None
            try:
                header = LaneHeader(self._group.group_id, Lane.ASK)
                await send_message(stream, encode_header(header))
                answer = await receive_message(stream, max_bytes=MAX_VOTE_BYTES)
                return None if answer is None else decode_vote(answer, len(self._roster.members))
            except (StreamBrokenError, ClosedError, RemoteProtocolError) as error:
                logger.debug("%s gave no answer: %s", member.peer_id, error)
            finally:
                await stream.reset()
        return None

    # ------------------------------------------------------------------ streams

    async def _open(self, position: int) -> None:
        line, member = self._lines[position], self._roster.members[position]
        line.taken = True
        with line.scope:
            try:
                stream = await self._transport.open_stream(
                    member.peer_id,
                    PROTOCOL,
                    addresses=member.addresses,
                    timeout=OPEN_SECONDS,
                    wait_inbound=True,
                )
            except UnreachableError as error:
                self._hears.lost(position, str(error))
                return
            try:
                await send_message(stream, encode_header(LaneHeader(self._group.group_id, Lane.CONTROL)))
            except (StreamBrokenError, ClosedError) as error:
                self._hears.lost(position, str(error))
                return
            await self._talk(position, stream)

    async def _accept(self, nursery: trio.Nursery) -> None:
        while True:
            inbound = await self._group.controls.receive()
            position = self._positions.get(inbound.stream.remote)
            line = None if position is None else self._lines.get(position)
            if line is None or position is None or position < self._me or line.taken or line.done.is_set():
                logger.debug("%s opened a control stream that is not due", inbound.stream.remote)
                inbound.finished.set()
                continue
            line.taken = True
            nursery.start_soon(self._talk_inbound, position, inbound.stream, inbound.finished)

    async def _talk_inbound(self, position: int, stream: Stream, finished: trio.Event) -> None:
        try:
            with self._lines[position].scope:
                await self._talk(position, stream)
        finally:
            finished.set()

    async def _talk(self, position: int, stream: Stream) -> None:
        """Read and write until the line is dropped, or has ended."""
        line = self._lines[position]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, position, stream, nursery.cancel_scope)
                await self._speak(line, stream)
                await stream.aclose()
                nursery.cancel_scope.cancel()
        except* (StreamBrokenError, ClosedError) as errors:
            self._hears.lost(position, str(errors.exceptions[0]))
        except* RemoteProtocolError as errors:
            self._hears.lost(position, f"it broke the protocol: {errors.exceptions[0]}", hostile=True)
        finally:
            line.done.set()
            await stream.reset()

    async def _speak(self, line: _Line, stream: Stream) -> None:
        while True:
            if line.unsent:
                await send_message(stream, encode_vote(line.unsent.popleft()))
                continue
            if line.ending:
                return
            changed = line.changed
            with trio.move_on_after(PING_SECONDS) as scope:
                await changed.wait()
            if scope.cancelled_caught:
                await send_message(stream, encode_vote(Ping()))

    async def _listen(self, position: int, stream: Stream, scope: trio.CancelScope) -> None:
        pace = self._lines[position].pace
        while (message := await receive_message(stream, max_bytes=MAX_VOTE_BYTES)) is not None:
            pace.arrived(trio.current_time(), len(message), data=False)
            vote = decode_vote(message, len(self._roster.members))
            if not isinstance(vote, Ping):
                self._hears.heard(position, vote)
        self._hears.lost(position, "it closed its stream")
        scope.cancel()

    # ------------------------------------------------------------------ silence

    async def _watch(self) -> None:
        """Give up members that are silent for too long."""
        began = trio.current_time()
        while True:
            before = trio.current_time()
            await trio.sleep(PING_SECONDS)
            held_up = trio.current_time() - before - PING_SECONDS
            for position, line in self._lines.items():
                # What came while this process itself stood still is read now.
                line.pace.excuse(max(held_up, 0.0))
                if self._lose_if_overdue(position, line):
                    continue
                if not (line.pace.heard or line.asked) and trio.current_time() >= began + MISSING_SECONDS:
                    line.asked = True
                    self._hears.missing(position)
