"""One group's all-reduce, from its commit to the outcome: attempts, until the members agree on a result.

:mod:`p2pavg.allreduce.attempt` moves the parts, :mod:`p2pavg.round.control` carries the votes, and
:mod:`p2pavg.round.voting` decides by :mod:`p2pavg.consensus.agreement` what follows from either. This file ties them
together: it begins and ends attempts, watches the time, and builds the outcome.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import trio

from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.averages import EncodedAverage
from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.events import (
    AttemptEvent,
    BytesArrived,
    ContributionOwed,
    DirectLaneBroke,
    LaneFailed,
    ResultComplete,
)
from p2pavg.allreduce.movers.lobby import ExpectedGroup
from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.allreduce.reduction import PartTracker, RoundFault
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.base.result import DrawnContribution, FailedCode
from p2pavg.consensus.certificate import encode_certificate
from p2pavg.consensus.failure_detector import Silences
from p2pavg.consensus.member import RoundPhase, new_member
from p2pavg.consensus.statements import Statement
from p2pavg.consensus.votes import Completed, GivenUp, ReceivedUpTo, ResultCommit, Unknown
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.milestones import Milestone
from p2pavg.group.recheck import drawn_targets
from p2pavg.group.roster import Roster
from p2pavg.group.shares import part_size
from p2pavg.group.topology import Hierarchical, Star
from p2pavg.round.audits import PeerJudge, RoundAudits
from p2pavg.round.control import VoteStreams
from p2pavg.round.quiet import is_short
from p2pavg.round.signing import Signing
from p2pavg.round.slow_members import SlowMembers
from p2pavg.round.voting import Voting

if TYPE_CHECKING:
    # libp2p installs trio-typing, whose stubs mypy prefers to trio's own.
    from trio_typing import TaskStatus


# The bytes that one member moves in an exchange, over all of its attempts.


class Traffic:
    """Bytes that have left this member, and that have come, in all attempts of an exchange."""

    def __init__(self, meter: BandwidthMeter) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes of ended attempts, by :class:`~p2pavg.telemetry.events.Way`."""
        self.received: Counter[str] = Counter()
        self._meter = meter
        self._attempt: Attempt | None = None  # the one that runs

    def follow(self, attempt: Attempt) -> None:
        """Count an attempt that begins; the one before has ended."""
        self.add_up()
        self._attempt = attempt

    async def measure(self) -> None:
        """Measure the link, and note which members have shown a sign of life, until cancelled."""
        self._meter.begin(trio.current_time())
        while True:
            await trio.sleep(GLANCE_SECONDS)
            if self._attempt is not None:
                self._attempt.receiver.note_arrivals()
            self.sample()

    def sample(self) -> None:
        """Tell the meter how much has been moved, the attempt that runs included."""
        sent, received = self.sent.total(), self.received.total()
        if self._attempt is not None:
            sent += self._attempt.sender.bytes_left
            received += self._attempt.receiver.bytes_arrived
        self._meter.sample(trio.current_time(), sent, received)

    def end(self) -> None:
        """End the measurement."""
        self._meter.end(trio.current_time())

    def add_up(self) -> None:
        """Count the bytes of the attempt that has ended, and let go of it."""
        if self._attempt is not None:
            self.sent.update(self._attempt.sender.bytes_by_way)
            self.received.update(self._attempt.receiver.bytes_by_way)
            self._attempt = None


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOutcome:
    """The end of an exchange. ``verdict`` is ``None`` when ``averaged`` is the average of ``roster``'s contributors."""

    verdict: RoundFault | None
    used: bool | None
    """True if the other members' result contains this member's contribution; ``None`` when that is not known yet."""
    averaged: torch.Tensor
    roster: Roster
    """The roster of the attempt that was committed: its members and their shares."""
    lost: tuple[RoundFault, ...]
    """Members that were given up on the way, and why."""
    bytes_sent: int
    bytes_received: int
    group_id: bytes
    """Of the group, whatever attempt was committed."""
    certificate: bytes
    """Proof of the commit; empty if there is a verdict, or if this member needs no result and no member signed."""
    signers: int
    """Number of members whose signatures the certificate has."""
    encoded: EncodedAverage | None
    """The average as all members have it; ``None`` if there is a verdict."""
    streamed: frozenset[str]
    """Members with which parts of the last attempt went over streams instead of direct lanes."""
    relayed: frozenset[str] = frozenset()
    """Those of ``streamed`` whose streams went through a relay."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """``bytes_sent`` by :class:`~p2pavg.telemetry.events.Way`."""
    received: Mapping[str, int] = field(default_factory=dict)
    plain_bytes: int = 0
    """Bytes of values that this member would send and receive without a codec."""
    held_at: float | None = None
    """Trio's clock when this member held the whole result; ``None`` if it never did."""
    drawn: tuple[DrawnContribution, ...] = ()
    """Contributions of others that this member was drawn to compute again."""
    left_out: torch.Tensor | None = None
    """See :attr:`p2pavg.Success.left_out`."""


class Exchange:
    """One member's side of one group's all-reduce.

    Args:
        roster: the group, as it was agreed.
        group: the same group's inbound streams; closed at the end.
        judge: learns what members did, at any time until the exchange has told the others its outcome.
        vector: float32, the length of the roster's shares together, on any device; this member's weighted mean. It is
            not changed. Only contributors have one.
        minimum: members that must hold a result, this one included.
        max_share: elements that this member reduces at most.
        silences: of the members in earlier rounds; those of this one are added.
        found_out: is told, after an outcome that left it open, whether this member's contribution was used.
        timeout: seconds until the group gives up.
    """

    def __init__(
        self,
        context: RunContext,
        roster: Roster,
        group: ExpectedGroup,
        judge: PeerJudge,
        *,
        vector: torch.Tensor | None,
        minimum: int,
        timeout: float,
        max_share: float = math.inf,
        silences: Silences | None = None,
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
        self._positions = {member.peer_id: index for index, member in enumerate(roster.members)}
        member = new_member(
            me=roster.position(context.transport.peer_id),
            size=len(roster.members),
            holders=frozenset(self._positions[member.peer_id] for member in roster.holders),
            contributors=frozenset(self._positions[member.peer_id] for member in roster.contributors),
            # What one member alone holds is no average of a group.
            minimum=max(minimum, 2),
            verify=context.aggregation.audits is not None and context.aggregation.audits.before,
        )
        self._voting = Voting(
            roster, member, self, Signing(context.signer, roster, context.aggregation.text, judge)
        )
        self._voting.control = VoteStreams(
            transport=context.transport,
            roster=roster,
            group=group,
            resting=context.lobby.resting,
            # The bytes on the wire decide: a sparse codec makes a round of a long vector short too.
            short=is_short(context.codec.averages.encoded_nbytes(sum(roster.shares))),
            hears=self._voting,
            part_bytes=context.codec.averages.encoded_nbytes(
                # Of the largest part: the patience with a silent member follows from the time that it takes.
                min(part_size(sum(roster.shares), len(roster.members)), max(roster.shares))
            ),
            max_silence=timeout / 3,  # there has to be time for another attempt
            silences=silences,
            processor_wait=context.processor_wait,
        )
        self.attempt: Attempt | None = None
        """The one that runs."""
        self._ended: ExchangeOutcome | None = None  # until it is taken
        self.held_at = 0.0
        """Trio's clock when this member held the whole result; 0 before."""
        self._ledger: PartTracker | None = None  # of the last attempt
        self._traffic = Traffic(context.meter)
        self._audits = RoundAudits(context, roster, judge, self)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start with ``nursery.start``: it returns when :meth:`take_outcome` may be called.

        From then on, ``vector`` is not read any more, and this call sees to it that the others hear of the outcome.
        """
        try:
            async with trio.open_nursery() as nursery:
                # The votes outlive the attempts: after the outcome, the streams still carry this member's last words.
                nursery.start_soon(self._voting.control.run)
                async with trio.open_nursery() as inner:
                    self._voting.nursery = inner
                    try:
                        await self._until_the_end()
                    finally:
                        # Votes are heard until the streams end, and must start nothing more in this nursery.
                        self._voting.nursery = None
                    inner.cancel_scope.cancel()
                # Not handed over by `started`: trio would keep it, and so the result's memory, until this call has
                # ended. Audits may take half a minute.
                self._ended = self._outcome()
                # `take_outcome` may run as soon as `started` has been called, and clears `_ended`.
                is_open = self._ended.used is None
                # The audits take what they need of the attempt before it is let go.
                self._begin_audits()
                task_status.started()
                self._let_go()
                # Before the end of the group: a member whose stream comes late is told how the round ended.
                self._remember()
                # Lanes of parts are let go; streams of votes go on until their last word is out.
                self._group.end()
                nursery.start_soon(self._audits.run)
                if is_open:
                    nursery.start_soon(self._find_out)
        finally:
            # Also if the round is cancelled: members that ask are answered, and a contribution that is withheld is
            # settled.
            self._remember()
            self._group.close()
            self._audits.close()
            if self._found_out is not None:
                self._found_out(self._is_taken_as_used())

    def _is_taken_as_used(self) -> bool:
        """Return whether this member's contribution is used up, when no more will be heard.

        In doubt it is: it may be lost, but it does not count twice. The others may have gone on with a result that
        counts it, and that this member never held. They can have none without its share.
        """
        used = self._voting.is_used()
        if used is not None or self._ledger is None:
            return bool(used)
        return (
            self._ledger.own_is_averaged if self._ledger.tasks else self._voting.member.accepted is not None
        )

    def take_outcome(self) -> ExchangeOutcome:
        """Return the outcome, once: nothing here refers to it afterwards."""
        assert self._ended is not None
        outcome, self._ended = self._ended, None
        return outcome

    async def _find_out(self) -> None:
        """Find out later whether this member's contribution was used."""
        await self._voting.find_out()
        # The answer for members that ask has changed: until now it said that this member gave up.
        self._remember()
        if self._found_out is not None:
            self._found_out(self._is_taken_as_used())
            self._found_out = None

    async def _until_the_end(self) -> None:
        # Attempt 0 is no ballot: every member begins it with the commit of the roster.
        self.begin_attempt(0, frozenset(range(len(self._roster.members))))
        self.reached(Milestone.FORMED)
        began = trio.current_time()
        with trio.move_on_at(began + self._timeout):
            assert self._voting.nursery is not None
            # A member that would keep the group from ending is dropped while there is time for an attempt without it.
            self._voting.nursery.start_soon(self._slow_members().leave_behind, began)
            self._voting.nursery.start_soon(self._traffic.measure)
            await self._voting.ended.wait()
        # The last piece of the measurement; what follows is waiting, and would make the link look slow.
        self._traffic.sample()
        self._traffic.end()
        if not self._voting.ended.is_set():
            self._voting.happen(GivenUp(self._overdue(), FailedCode.TIMED_OUT))
        # Another member may have committed just now: its word turns an open outcome into a known one.
        await self._voting.settle()
        self._voting.control.end()

    def _slow_members(self) -> SlowMembers:
        return SlowMembers(
            self._voting,
            self,
            self._positions,
            self._timeout,
            is_star=_is_star(self._context),
            has_sites=isinstance(self._context.aggregation.topology, Hierarchical),
        )

    def waits_for(self) -> str:
        """Return a sentence that names the members that this one waits for."""
        if self.attempt is None:
            return ""
        if owing := self.attempt.ledger.waited_for():
            return f"waiting for parts of {owing}"
        return "all parts are here; waiting for the other members to agree on the result"

    def end(self) -> None:
        """Stop telling other members how the round ended, and answering audits. Call it only after the outcome."""
        self._voting.control.scope.cancel()
        self._audits.close()

    def _let_go(self) -> None:
        """Release everything that has the size of a vector."""
        # The audits keep this object alive for another half minute, after the caller has the outcome.
        self._vector = None
        # The outcome has told it; only an open one is told later.
        if self._voting.is_used() is not None:
            self._found_out = None
        if self.attempt is not None:
            self.attempt.values.let_go()
            self.attempt = None

    # ------------------------------------------------------------------ events of the attempts

    def _happened(self, attempt: Attempt, event: AttemptEvent) -> None:
        """Tell the agreement of an event of an attempt."""
        voting = self._voting
        match event:
            case ResultComplete(digests):
                # With audits before the end, this member says that it holds the result only when they have found no
                # lie.
                self._audits.completed(attempt, digests, voting.nursery)
            case BytesArrived(peer_id, count):
                voting.control.arrived(peer_id, count)
            case ContributionOwed(peer_id, owed):
                if attempt is self.attempt:
                    voting.control.owes(peer_id, owed)
            case DirectLaneBroke(peer_id):
                # No other message tells of a member that died before its votes' stream was open: it is asked.
                position = self._positions[peer_id]
                if attempt is self.attempt and position not in voting.member.lost:
                    voting.missing(position)
            case LaneFailed(peer_id, reason, hostile):
                self._lane_failed(attempt, self._positions[peer_id], reason, hostile)

    def lose(self, peer_id: str, reason: str, *, hostile: bool) -> None:
        """See :class:`~p2pavg.round.audits.AuditedExchange`."""
        self._voting.lost(self._positions[peer_id], reason, hostile=hostile, silent=not hostile)

    def _lane_failed(self, attempt: Attempt, position: int, reason: str, hostile: bool) -> None:
        """Note that a lane broke. It is no loss if its other end has gone on to a newer attempt."""
        member = self._voting.member
        # Lanes of an attempt that was left end with errors, which say nothing about their members any more. It is no
        # loss either if this member itself waits for a newer attempt.
        current = attempt is self.attempt and member.promised == member.begun.ballot and not member.trouble
        if hostile and attempt.number and position not in member.lost:
            # Noted first, and not as hostile: the members of a later attempt are one leader's word, and a ban of ten
            # minutes must not follow from what a leader told the two.
            self._voting.losses.note(position, reason)
        if hostile or (current and member.phase is RoundPhase.EXCHANGING):
            # The leader of a later attempt may have told the two members different things.
            self._voting.lost(position, reason, hostile=hostile, reachable=hostile and attempt.number > 0)

    # ------------------------------------------------------------------ the result of an attempt

    def hold(self, attempt: Attempt, digests: Sequence[bytes]) -> None:
        """Tell the agreement that this member holds the result of an attempt."""
        if attempt is not self.attempt:  # a newer one has begun while this one was audited
            return
        self.held_at = trio.current_time()
        # Positions in the group's roster, which stay the same from attempt to attempt: a signature names members by
        # them.
        members = frozenset(self._positions[member.peer_id] for member in attempt.roster.members)
        signature = self._voting.signing.sign(attempt.number, members, digests)
        self._voting.happen(Completed(attempt.number, tuple(digests), signature, attempt.values.outputs()))

    def _begin_audits(self) -> None:
        """Prepare the audits of the result, before anything of it is let go."""
        assert self.attempt is not None
        member = self._voting.member
        committed = member.committed if member.phase is RoundPhase.COMMITTED else None
        # A round that failed has no average to audit.
        digests = () if committed is None else self.attempt.values.averages.digests()
        self._audits.ended(self.attempt, committed, digests)

    # ------------------------------------------------------------------ moves that the agreement decides

    def begin_attempt(self, number: int, members: frozenset[int]) -> None:
        """See :class:`~p2pavg.round.voting.ExchangeActions`."""
        context = self._context
        self._ledger = None
        try:
            # Each member computes the roster of the attempt by itself, so a leader cannot choose the shares.
            roster = self._roster.among(number, members, context.cutter)
        except RemoteProtocolError as error:
            reason = f"the members that are left cannot form a group: {error}"
            self._voting.happen(GivenUp(reason, FailedCode.PEERS_LOST))
            return
        # Fewer members leave larger shares. That of attempt 0 was checked before the roster was accepted.
        if number and roster.shares[roster.position(context.transport.peer_id)] > self._max_share:
            reason = "its share would be larger than the largest that it takes"
            self._voting.happen(GivenUp(reason, FailedCode.PEERS_LOST))
            return
        leftover = None
        # An attempt is never repaired. The next one takes over the contributions that have come, and nothing else.
        if self.attempt is not None:
            # Its lanes may still run: cancelling asks them to end. `_run_attempt` lets it go when they have.
            self.attempt.scope.cancel()
            leftover = self.attempt.values.carry.leave(self._told_by(self.attempt.number))
            logger.info(
                "group %s begins anew with %d members: %s",
                self._roster.group_id.hex()[:8],
                len(members),
                ", ".join(self._voting.losses.reasons()),
            )
        self.attempt = Attempt(
            number=number,
            context=context,
            group=self._roster,
            roster=roster,
            lanes=self._group.lanes(number),
            vector=self._vector,
            on_event=self._happened,
            leftover=leftover,
        )
        self._traffic.follow(self.attempt)
        self._ledger = self.attempt.ledger
        # Elected again for each attempt: the reducer of a star may be one of the members that were lost.
        self._voting.reduces_all = _is_star(context) and bool(self.attempt.plan.own_parts)
        # Before the attempt runs: a fast member's auditor may ask at once.
        self._audits.begun(self.attempt)
        assert self._voting.nursery is not None
        self._voting.nursery.start_soon(self._run_attempt, self.attempt)

    async def _run_attempt(self, attempt: Attempt) -> None:
        await attempt.run()
        # Only now: until its threads have ended, they read and write the memory of the vectors.
        if attempt is not self.attempt:  # a newer one took its place
            attempt.values.let_go()

    def _told_by(self, attempt: int) -> dict[str, ResumeMark]:
        """Return how far this member's contribution has come in an attempt, by the reducers that have told it."""
        return {
            self._roster.members[position].peer_id: ResumeMark(came.parts, came.nbytes)
            for position, came in self._voting.came.items()
            # A word about an older attempt is void: its parts may be other elements, and may not be kept any more.
            if came.attempt == attempt
        }

    def came_from(self, position: int) -> ReceivedUpTo | None:
        """See :class:`~p2pavg.round.voting.ExchangeActions`."""
        if self.attempt is None:
            return None
        mark = self.attempt.values.carry.mark(self._roster.members[position].peer_id)
        return None if mark == START else ReceivedUpTo(self.attempt.number, *mark)

    def pass_on(self, reducers: frozenset[int], to: frozenset[int]) -> None:
        """See :class:`~p2pavg.round.voting.ExchangeActions`."""
        assert self.attempt is not None
        self.attempt.sender.pass_on(_peer_ids(self._roster, reducers), _peer_ids(self._roster, to))

    def take_from(self, source: int, reducers: frozenset[int]) -> None:
        """See :class:`~p2pavg.round.voting.ExchangeActions`."""
        if self.attempt is not None:
            self.attempt.receiver.take_from(
                self._roster.members[source].peer_id, _peer_ids(self._roster, reducers)
            )

    def committed(self) -> None:
        """See :class:`~p2pavg.round.voting.ExchangeActions`."""
        self._remember()

    # ------------------------------------------------------------------ the outcome

    def _overdue(self) -> str:
        """Return why the time was over, and note the member that is to blame."""
        assert self.attempt is not None
        member, losses = self._voting.member, self._voting.losses
        # All parts came, so the agreement was late, and no member owes anything.
        if self.attempt.ledger.complete or member.phase is not RoundPhase.EXCHANGING:
            waits = member.phase in (RoundPhase.HOLDING, RoundPhase.PROMISED)
            # A loss may have held the leader up. So it is blamed only if this member has lost no other one.
            if waits and member.leader != member.me and not losses:
                losses.note_idle_leader(member.leader, self._timeout)
            return f"the group agreed on no result within {self._timeout:g} s"
        # Parts are missing: the verdict names the member that owes them.
        verdict = self.attempt.ledger.overdue(self._timeout)
        losses.note_overdue(verdict)
        return verdict.reason

    def _outcome(self) -> ExchangeOutcome:
        assert self.attempt is not None
        # The attempt is let go right after this, so its bytes are counted now.
        self._traffic.add_up()
        member, losses = self._voting.member, self._voting.losses
        committed = member.committed if member.phase is RoundPhase.COMMITTED else None
        return ExchangeOutcome(
            verdict=None if committed is not None else losses.failure(member.reason, member.code),
            used=self._voting.is_used(),
            averaged=self.attempt.values.averages.values,
            roster=self.attempt.roster,
            lost=losses.all(member.begun.view),
            bytes_sent=self._traffic.sent.total(),
            bytes_received=self._traffic.received.total(),
            sent=dict(self._traffic.sent),
            received=dict(self._traffic.received),
            relayed=frozenset(self.attempt.relayed),
            held_at=self.held_at or None,
            plain_bytes=self.attempt.plain_bytes,
            group_id=self._roster.group_id,
            certificate=_certificate(self._roster, committed),
            signers=0 if committed is None else len(committed.signatures),
            encoded=None if committed is None else self.attempt.values.averages.as_encoded(),
            streamed=frozenset(self.attempt.streamed),
            drawn=self._drawn(self.attempt, committed),
            left_out=self.attempt.values.left_out if self._reduced(self.attempt, committed) else None,
        )

    @staticmethod
    def _reduced(attempt: Attempt, committed: ResultCommit | None) -> bool:
        """Return whether this member has reduced a share of the attempt that was committed."""
        if committed is None or committed.attempt != attempt.number:
            return False
        return bool(attempt.plan.own_parts) and attempt.ledger.own_is_averaged

    def _drawn(self, attempt: Attempt, committed: ResultCommit | None) -> tuple[DrawnContribution, ...]:
        """Copy the contributions that this member was drawn to compute again: what it holds of them goes now."""
        context = self._context
        if not context.recheck or committed is None or not self._reduced(attempt, committed):
            return ()
        me = context.transport.peer_id
        own = attempt.plan.own_parts
        statement = Statement(self._roster.group_id, committed.attempt, committed.members, committed.digest)
        # The signature of its vote again: Ed25519 gives the same bytes for the same message (RFC 8032, section 5.1.6).
        ticket = context.signer.sign(statement.signed_bytes())
        targets = drawn_targets(me, ticket, attempt.roster, context.recheck)
        weights = {member.peer_id: member.weight for member in attempt.roster.contributors}
        came = [(part, attempt.values.inputs(part.index)) for part in own] if targets else []
        return tuple(
            DrawnContribution(
                target,
                weights[target],
                tuple(
                    (part.start, part.stop, bytes(inputs[target]))
                    for part, inputs in came
                    if target in inputs
                ),
            )
            for target in targets
        )

    def _remember(self) -> None:
        """Keep the answer for members that ask later."""
        vote, peers = self._voting.last_word(), set(self._positions)
        # For a peer outside the group, the group does not exist.
        self._context.lobby.remember(
            self._roster.group_id, lambda peer_id: vote if peer_id in peers else Unknown()
        )


def _is_star(context: RunContext) -> bool:
    return isinstance(context.aggregation.topology, Star)


def _peer_ids(roster: Roster, positions: frozenset[int]) -> list[str]:
    return [roster.members[position].peer_id for position in sorted(positions)]


def _certificate(roster: Roster, committed: ResultCommit | None) -> bytes:
    """Return the proof of a commit; empty if none of its signers is known, as an auxiliary may end."""
    if committed is None or not committed.signatures:
        return b""
    return encode_certificate(roster, committed)
