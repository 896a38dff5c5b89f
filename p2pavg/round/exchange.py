"""One group's all-reduce, from its commit to what came of it: attempts, until the members agree on a result.

What is exchanged is moved by :mod:`p2pavg.allreduce.attempt`, what the members say to each other by
:mod:`p2pavg.round.control`, and what follows from either is decided by :mod:`p2pavg.consensus.agreement`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import trio

from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.lobby import ExpectedGroup
from p2pavg.allreduce.reduction import Verdict
from p2pavg.consensus.agreement import (
    FINAL,
    Action,
    Completed,
    Dead,
    Drop,
    Event,
    GivenUp,
    Heard,
    Lost,
    Member,
    PassOn,
    Phase,
    Run,
    Tell,
    advance,
)
from p2pavg.consensus.choice import ballot_leader
from p2pavg.consensus.votes import Begin, Commit, Gather, Left, Trouble, Unknown, Vote
from p2pavg.errors import RefusedError, RemoteProtocolError
from p2pavg.group.milestones import Milestone
from p2pavg.group.roster import Roster
from p2pavg.group.shares import part_size
from p2pavg.net.blame import guarded
from p2pavg.round.control import Control

if TYPE_CHECKING:
    # libp2p installs trio-typing, whose stubs mypy prefers to trio's own.
    from trio_typing import TaskStatus

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.25  # between two looks at what has been moved
ASK_AGAIN_SECONDS = 1.0
SILENT_SECONDS = 5.0  # that a silent member costs the others, about
LAST_ATTEMPT_SECONDS = (
    5.0  # left for another attempt, however short the first was: finding out takes round trips
)
SETTLE_SECONDS = 0.5  # for the others' last word, when this member has failed
FIND_OUT_SECONDS = 600.0  # how long who was cut off goes on asking how the round ended, less and less often
MAX_ASK_AGAIN_SECONDS = 15.0


def max_votes(size: int) -> int:
    """Votes that a member of a group of so many sends in a round, at most.

    Each of the others may be lost once. That costs at most two ballots, of four votes each, and the leader says why
    each of those that were lost before is left out. A member that goes on voting could keep a round from its end.
    """
    return 64 + size * (size + 8)


_MILESTONES = {
    Phase.HOLDING: Milestone.HOLDING,
    Phase.COMMITTED: Milestone.COMMITTED,
    Phase.FAILED: Milestone.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an exchange went: ``verdict`` is ``None`` when ``averaged`` is the average of ``roster``'s contributors."""

    verdict: Verdict | None
    used: bool | None
    """Whether this member's contribution is in what the others hold; ``None`` when that is not known yet."""
    averaged: torch.Tensor
    roster: Roster
    """Of the attempt that was committed: who is in it, with which shares."""
    lost: tuple[Verdict, ...]
    """Members that were given up on the way, and why."""
    bytes_sent: int
    bytes_received: int
    streamed: frozenset[str]
    """Members with which parts of the last attempt went over streams instead of direct lanes."""


class Exchange:
    """One member's side of one group's all-reduce.

    Args:
        roster: the group, as it was agreed.
        group: the same group's inbound streams; closed at the end.
        vector: float32, the length of the roster's shares together, on any device; this member's weighted mean. Not
            changed. Only contributors have one.
        minimum: members that are to hold a result at least, this one included.
        max_share: elements that this member reduces at most.
        found_out: is told, after an outcome that left it open, whether this member's contribution was used.
        timeout: seconds until the group gives up.
    """

    def __init__(
        self,
        context: RunContext,
        roster: Roster,
        group: ExpectedGroup,
        *,
        vector: torch.Tensor | None,
        minimum: int,
        timeout: float,
        max_share: float = math.inf,
        found_out: Callable[[bool], None] | None = None,
    ) -> None:
        self.reached = context.on_milestone
        self._found_out = found_out
        self._context = context
        self._roster = roster
        self._group = group
        self._vector = vector
        self._timeout = timeout
        self._max_share = max_share
        self._me = context.transport.peer_id
        self._positions = {member.peer_id: index for index, member in enumerate(roster.members)}
        self._member = Member(
            me=roster.position(self._me),
            size=len(roster.members),
            holders=frozenset(self._positions[member.peer_id] for member in roster.holders),
            contributors=frozenset(self._positions[member.peer_id] for member in roster.contributors),
            minimum=max(minimum, 2),
        )
        self._control = Control(
            transport=context.transport,
            roster=roster,
            group=group,
            hears=self,
            part_bytes=context.codec.encoded_nbytes(
                min(part_size(sum(roster.shares), len(roster.members)), max(roster.shares))
            ),
            max_silence=timeout / 3,  # there has to be time for another attempt
        )
        self._attempt: Attempt | None = None
        self._held_at = 0.0
        self._ended = trio.Event()
        self._heard = trio.Event()  # something, after the end
        self._verdicts: dict[int, Verdict] = {}
        self._told: dict[int, Trouble] = {}  # what others say of members that they have lost
        self._votes: Counter[int] = Counter()  # that each member has sent
        self._bytes_sent = 0
        self._bytes_received = 0
        self._nursery: trio.Nursery | None = None
        self._control_scope = trio.CancelScope()

    async def run(self, *, task_status: TaskStatus[Outcome] = trio.TASK_STATUS_IGNORED) -> None:
        """Start with ``nursery.start``: returns the outcome, then sees to it that the others hear of it.

        From the outcome on, ``vector`` is not read any more.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run_control)
                async with trio.open_nursery() as inner:
                    self._nursery = inner
                    try:
                        await self._until_the_end()
                    finally:
                        self._nursery = None
                    inner.cancel_scope.cancel()
                outcome = self._outcome()
                task_status.started(outcome)
                self._let_go()
                self._remember()
                self._group.end()
                if outcome.used is None:
                    nursery.start_soon(self._find_out)
        finally:
            self._remember()
            self._group.close()
            if self._found_out is not None:
                self._found_out(self._is_taken_as_used())

    async def _find_out(self) -> None:
        """Ask those that may know how the round ended, until one of them answers or there is nobody left to ask."""
        pause = ASK_AGAIN_SECONDS
        with trio.move_on_after(FIND_OUT_SECONDS):
            while self._is_used() is None:
                await trio.sleep(pause)
                pause = min(1.5 * pause, MAX_ASK_AGAIN_SECONDS)
                for position in sorted(set(range(self._member.size)) - {self._member.me} - self._member.gone):
                    try:
                        answer = await self._control.ask(position)
                    except RefusedError:
                        answer = Unknown()
                    if isinstance(answer, Commit | Left | Unknown):
                        self._hear(position, answer)
            self._remember()
            if self._found_out is not None:
                self._found_out(self._is_taken_as_used())
                self._found_out = None

    def _is_used(self) -> bool | None:
        """Whether this member's contribution is in the result; ``None`` when others may know."""
        member = self._member
        if member.outcome is not None:
            return member.me in member.outcome.members
        return None if member.undecided else member.presumed_used

    def _is_taken_as_used(self) -> bool:
        """Return whether this member's contribution is used up, when no more will be heard.

        A member that said that it holds the result has most likely been counted in it; one that never said so may be
        counted only if others went on with a result that it did not hold, which takes two more losses.
        """
        used = self._is_used()
        return self._member.accepted is not None if used is None else used

    async def _until_the_end(self) -> None:
        self._begin_attempt(0, frozenset(range(len(self._roster.members))))
        self.reached(Milestone.FORMED)
        began = trio.current_time()
        with trio.move_on_at(began + self._timeout):
            assert self._nursery is not None
            self._nursery.start_soon(self._leave_the_slowest_behind, began)
            self._nursery.start_soon(self._measure)
            await self._ended.wait()
        self._context.meter.sample(trio.current_time(), *self._traffic())
        self._context.meter.end(trio.current_time())
        if not self._ended.is_set():
            self._happen(GivenUp(self._overdue()))
        with trio.move_on_after(SETTLE_SECONDS):
            while self._member.undecided:
                await self._heard.wait()
        self._control.end()

    async def _measure(self) -> None:
        """What this member's link carries, and who has shown a sign of life."""
        self._context.meter.begin(trio.current_time())
        while True:
            await trio.sleep(SAMPLE_SECONDS)
            if self._attempt is not None:
                self._attempt.note_arrivals()
            self._context.meter.sample(trio.current_time(), *self._traffic())

    def _traffic(self) -> tuple[int, int]:
        """Bytes that have left this member, and that have come, in all attempts."""
        sent, received = self._bytes_sent, self._bytes_received
        if self._attempt is not None:
            sent, received = sent + self._attempt.bytes_left, received + self._attempt.bytes_arrived
        return sent, received

    async def _leave_the_slowest_behind(self, began: float) -> None:
        """As long as there is time for another attempt: a leader gives up who would keep everybody from ending in time.

        With half of the time gone, a member of whose parts more than half are still to come; and when the leader has
        the whole result, those that have not, as late as another attempt allows.
        """
        await trio.sleep_until(began + self._timeout / 2)
        late = "it is too slow for the others to end in time"
        if self._leads(Phase.EXCHANGING):
            assert self._attempt is not None
            slowest = self._attempt.ledger.slowest()
            if slowest is not None:
                self.lost(self._positions[slowest], late)
            return
        if self._leads(Phase.HOLDING):
            spare = max(1.5 * (self._held_at - began), min(LAST_ATTEMPT_SECONDS, self._timeout / 4))
            await trio.sleep_until(began + self._timeout - spare)
        if self._leads(Phase.HOLDING) and self._held_at - began < self._timeout / 2:
            held = {position for position, _ in self._member.held}
            for position in sorted(self._member.view - held):
                self.lost(
                    position, late, silent=True
                )  # a member that never says so costs each round its time

    def _leads(self, phase: Phase) -> bool:
        return (
            self._member.phase is phase
            and ballot_leader(self._member.ballot, self._member.size) == self._member.me
        )

    async def _run_control(self) -> None:
        with self._control_scope:
            await self._control.run()

    def end(self) -> None:
        """Tell nobody anything any more; only after the outcome."""
        self._control_scope.cancel()

    def _let_go(self) -> None:
        """Of everything of a vector's size."""
        self._vector = None
        if self._is_used() is not None:
            self._found_out = None
        if self._attempt is not None:
            self._attempt.let_go()
            self._attempt = None

    # ------------------------------------------------------------------ what happens

    def completed(self, attempt: Attempt, digests: tuple[bytes, ...]) -> None:
        """The whole result of an attempt is here."""
        self._held_at = trio.current_time()
        self._happen(Completed(attempt.number, digests))

    def troubled(self, attempt: Attempt, peer_id: str, reason: str, *, hostile: bool) -> None:
        """A lane broke. Where its other end has gone on to a newer attempt, that is no loss."""
        current = attempt is self._attempt and self._member.promised == self._member.ballot
        # Nor where this one waits for a newer attempt itself.
        current = current and not self._member.trouble
        position = self._positions[peer_id]
        if hostile and attempt.number and position not in self._member.lost:
            # Noted first, and not as hostile: the members of a later attempt are one leader's word, and a ban of ten
            # minutes must not follow from what a leader told the two.
            self._note(position, reason)
        if hostile or (current and self._member.phase is Phase.EXCHANGING):
            self.lost(position, reason, hostile=hostile)

    def lane_broke(self, attempt: Attempt, peer_id: str) -> None:
        """A member that has died before its votes' stream was open is heard of nowhere else."""
        position = self._positions[peer_id]
        if attempt is self._attempt and position not in self._member.lost and self._nursery is not None:
            self._nursery.start_soon(self._ask_first, position)

    def arrived(self, peer_id: str, count: int) -> None:
        """Bytes of a member came."""
        self._control.arrived(peer_id, count)

    def owes(self, attempt: Attempt, peer_id: str, yes: bool) -> None:
        """A member's contribution is waited for, or no longer."""
        if attempt is self._attempt:
            self._control.owes(peer_id, yes)

    def heard(self, position: int, vote: Vote) -> None:
        """A member has voted."""
        self._votes[position] += 1
        if self._votes[position] > max_votes(self._member.size):
            self.lost(position, "it sends more votes than a round takes", hostile=True)
            return
        self._hear(position, vote)

    def _hear(self, position: int, vote: Vote) -> None:
        """Take a member's word. An exception on the way costs that member, not the averager."""
        with guarded(self._roster.members[position].peer_id, self._fault, what="a vote"):
            if position not in self._member.lost:
                self._take_hint(position, vote)
            self._happen(Heard(position, vote))

    def _fault(self, peer_id: str, error: Exception) -> None:
        self.lost(self._positions[peer_id], f"what it sent cannot be handled: {error!r}", hostile=True)

    def _take_hint(self, position: int, vote: Vote) -> None:
        """Whom a member has lost: those that go on with it and those that do not must not drift apart."""
        doubted: set[int] = set()
        if isinstance(vote, Trouble):
            self._told.setdefault(vote.peer, vote)
            doubted = {vote.peer}
        elif isinstance(vote, Gather):
            doubted = set(range(position))  # it leads only when it has lost all that come before it
        for peer in sorted(doubted - self._member.lost - {self._member.me}):
            self._control.doubt(peer)

    def lost(self, position: int, reason: str, *, hostile: bool = False, silent: bool = False) -> None:
        """A member can take part no longer."""
        if position not in self._member.lost and self._member.phase not in FINAL:
            self._note(position, reason, hostile=hostile, silent=silent)
            self._happen(Lost(position, hostile, reason))

    def missing(self, position: int) -> None:
        """A member was not heard of yet."""
        if self._nursery is not None:
            self._nursery.start_soon(self._ask_first, position)

    async def _ask_first(self, position: int) -> None:
        """A member whose leader died before it heard of the commit has left the group, and says so."""
        try:
            answer = await self._control.ask(position)
            if answer is None:  # over a connection that was just going, perhaps
                answer = await self._control.ask(position)
        except RefusedError as error:
            self.lost(position, str(error))
            return
        if isinstance(answer, Unknown) and position not in self._member.lost:
            self._note(position, "it knows nothing of this round")
            self._hear(position, answer)

    def _note(self, position: int, reason: str, *, hostile: bool = False, silent: bool = False) -> None:
        peer_id = self._roster.members[position].peer_id
        logger.info("group %s lost %s: %s", self._roster.group_id.hex()[:8], peer_id, reason)
        verdict = Verdict(
            f"{peer_id} was lost: {reason}",
            peer_id,
            hostile=hostile,
            seconds=SILENT_SECONDS if silent else 0.0,
        )
        self._verdicts.setdefault(position, verdict)

    def _happen(self, event: Event) -> None:
        if self._member.phase in FINAL and not isinstance(event, Heard):
            return
        if self._member.phase not in FINAL and self._nursery is None:
            return  # cancelled
        before = self._member
        self._member, actions = advance(before, event)
        for action in actions:
            if isinstance(action, Drop):
                # Not as hostile: a ban of ten minutes must not follow from what other members say.
                self._note(action.peer, action.reason)
        if self._member.ballot != before.ballot:
            self._look_for_source(event, actions)
        for position in sorted(self._member.lost - before.lost):
            if position not in self._verdicts:
                left = isinstance(event, Heard) and isinstance(event.vote, Left) and event.vote.reason
                self._note(position, f"it gave the round up: {left}" if left else "it gave the round up")
        for action in actions:
            match action:
                case Tell(position, vote):
                    if isinstance(vote, Begin):
                        self._explain(position, vote)
                    self._control.tell(position, vote)
                case Run(number, members):
                    self._begin_attempt(number, members)
                case PassOn(_, reducers, to):
                    assert self._attempt is not None
                    self._attempt.pass_on(self._peer_ids(reducers), self._peer_ids(to))
        for position in sorted(self._member.lost - before.lost):
            self._control.drop(position)
            if self._nursery is not None and self._member.phase not in FINAL:
                self._nursery.start_soon(self._ask, position)
        if self._member.phase is not before.phase and self._member.phase in _MILESTONES:
            self.reached(_MILESTONES[self._member.phase])
        if self._member.phase in FINAL:
            self._ended.set()
            self._heard.set()
            self._heard = trio.Event()

    def _look_for_source(self, event: Event, actions: Sequence[Action]) -> None:
        """Of what this member lacks of an older attempt's result, if the ballot that was taken up is about one."""
        votes = [event.vote if isinstance(event, Heard) else None]
        votes += [action.vote for action in actions if isinstance(action, Tell)]
        for vote in votes:
            if isinstance(vote, Begin) and self._member.me in vote.lacking and self._attempt is not None:
                source = self._roster.members[vote.source].peer_id
                self._attempt.take_from(source, self._peer_ids(vote.members - vote.view))

    def _explain(self, position: int, begin: Begin) -> None:
        """To a member, why others are left out: it may have seen nothing of it. It changes nothing for it."""
        for verdict in (*self._verdicts.values(), *self._left_out()):
            peer = self._positions[verdict.peer_id or ""]
            if peer not in begin.view:
                reason = self._with_hearsay(verdict).reason.removeprefix(f"{verdict.peer_id} was lost: ")
                self._control.tell(position, Trouble(peer, verdict.hostile, reason))

    async def _ask(self, position: int) -> None:
        """Whether a lost member is dead, or how the round ended for it, again and again."""
        while position not in self._member.gone:
            try:
                answer = await self._control.ask(position)
            except RefusedError:
                self._happen(Dead(position))
                return
            if isinstance(answer, Commit | Left | Unknown):
                self._hear(position, answer)
            await trio.sleep(ASK_AGAIN_SECONDS)

    # ------------------------------------------------------------------ what is done

    def _begin_attempt(self, number: int, members: frozenset[int]) -> None:
        chosen = tuple(self._roster.members[position] for position in sorted(members))
        shares = self._roster.shares if number == 0 else self._context.cut_shares(chosen)
        try:
            roster = self._roster.only(chosen, shares)
        except RemoteProtocolError as error:
            self._happen(GivenUp(f"the members that are left can form no group: {error}"))
            return
        if number and roster.shares[roster.position(self._me)] > self._max_share:
            self._happen(GivenUp("its share would be larger than it takes"))
            return
        if self._attempt is not None:
            self._count(self._attempt)
            self._attempt.scope.cancel()
            names = ", ".join(verdict.reason for verdict in self._verdicts.values())
            logger.info(
                "group %s begins anew with %d members: %s",
                self._roster.group_id.hex()[:8],
                len(members),
                names,
            )
        self._attempt = Attempt(
            number=number,
            context=self._context,
            group_id=self._roster.group_id,
            roster=roster,
            lanes=self._group.lanes(number),
            vector=self._vector,
            reports=self,
            position=self._positions.__getitem__,
        )
        assert self._nursery is not None
        self._nursery.start_soon(self._run_attempt, self._attempt)

    async def _run_attempt(self, attempt: Attempt) -> None:
        await attempt.run()
        if attempt is not self._attempt:  # a newer one took its place
            attempt.let_go()

    def _peer_ids(self, positions: frozenset[int]) -> list[str]:
        return [self._roster.members[position].peer_id for position in sorted(positions)]

    def _count(self, attempt: Attempt) -> None:
        self._bytes_sent += attempt.bytes_sent
        self._bytes_received += attempt.bytes_received

    # ------------------------------------------------------------------ what came of it

    def _overdue(self) -> str:
        assert self._attempt is not None
        if self._attempt.ledger.complete or self._member.phase is not Phase.EXCHANGING:
            self._note_idle_leader()
            return f"the group agreed on no result within {self._timeout:g} s"
        verdict = self._attempt.ledger.overdue(self._timeout)
        if verdict.peer_id is not None:
            self._verdicts.setdefault(self._positions[verdict.peer_id], verdict)
        return verdict.reason

    def _note_idle_leader(self) -> None:
        """A leader for which this member waited to the end, and which neither committed nor went on without others."""
        leader = self._member.leader
        waits = self._member.phase in (Phase.HOLDING, Phase.PROMISED)
        if waits and leader != self._member.me and not self._verdicts:
            peer_id = self._roster.members[leader].peer_id
            reason = f"{peer_id} led the round to no end within {self._timeout:g} s"
            # Once may be another member's doing, which held the leader up; a second time is a strike.
            self._verdicts[leader] = Verdict(reason, peer_id, seconds=SILENT_SECONDS)

    def _outcome(self) -> Outcome:
        assert self._attempt is not None
        self._count(self._attempt)
        member = self._member
        return Outcome(
            verdict=None if member.phase is Phase.COMMITTED else self._failure(),
            used=self._is_used(),
            averaged=self._attempt.averaged,
            roster=self._attempt.roster,
            lost=tuple(map(self._with_hearsay, (*self._verdicts.values(), *self._left_out()))),
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            streamed=frozenset(self._attempt.streamed),
        )

    def _left_out(self) -> list[Verdict]:
        """Members that this one has not lost, and that the others go on without."""
        absent = set(range(self._member.size)) - self._member.view - self._verdicts.keys()
        left_out = [self._roster.members[position].peer_id for position in sorted(absent)]
        return [Verdict(f"{peer_id} was given up by others", peer_id) for peer_id in left_out]

    def _with_hearsay(self, verdict: Verdict) -> Verdict:
        """A member that was lost after others had given it up: what it had done is what they say."""
        told = None if verdict.peer_id is None else self._told.get(self._positions[verdict.peer_id])
        if verdict.hostile or told is None or told.reason in verdict.reason:
            return verdict
        return replace(verdict, reason=f"{verdict.reason} ({told.reason})")

    def _failure(self) -> Verdict:
        reason = self._member.reason
        first = next(iter(self._verdicts.values()), None)
        if first is not None and first.reason not in reason:
            reason += f" ({'; '.join(verdict.reason for verdict in self._verdicts.values())})"
        return Verdict(reason, first.peer_id if first is not None else None)

    def _remember(self) -> None:
        """What to say to members that ask later."""
        member, peers = self._member, set(self._positions)
        if member.phase not in FINAL:  # cancelled
            member, _ = advance(member, GivenUp("it was stopped"))
        if member.outcome is not None:
            vote: Vote = Commit(member.outcome.attempt, member.outcome.members)
        else:
            vote = Left(-1 if member.accepted is None else member.accepted.ballot, member.reason)
        self._context.lobby.remember(
            self._roster.group_id, lambda peer_id: vote if peer_id in peers else Unknown()
        )
