"""State of one member in the agreement: its phase and its knowledge of the others."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from p2pavg.base.result import FailedCode
from p2pavg.consensus.choice import ballot_leader, is_quorum
from p2pavg.consensus.votes import Accepted, Begin, Complete, Members, Promise, ResultCommit, Signatures


class RoundPhase(enum.Enum):
    """Phase of a member in a round."""

    EXCHANGING = "exchanging"  # sends and receives the parts of its attempt
    HOLDING = "holding"  # holds the whole result, and has told the ballot's leader
    GATHERING = "gathering"  # leads, has prepared a ballot, and waits for promises
    PROMISED = "promised"  # has promised, and waits for the leader to begin the ballot
    ASTRAY = "astray"  # has no quorum, and waits to hear how the round ended
    COMMITTED = "committed"
    FAILED = "failed"


FINAL = frozenset({RoundPhase.COMMITTED, RoundPhase.FAILED})
LIVE = frozenset(RoundPhase) - FINAL


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place in the group; it never changes in a round."""

    me: int
    size: int
    holders: Members
    """Members that want the result; the others only reduce a share."""
    contributors: Members
    """Holders whose vectors are averaged."""
    minimum: int
    """Number of holders below which this member takes part in no attempt."""
    verify: bool = False
    """True if members audit a result before they say that they hold it."""


@dataclass(frozen=True, slots=True)
class Pending:
    """The votes of other members that this one has noted for a later decision."""

    held: tuple[tuple[int, tuple[bytes, ...]], ...] = ()
    """On the ballot's leader: the members that hold its result, with their digests."""
    signatures: Signatures = ()
    """On the ballot's leader: the signatures of these members."""
    commits: tuple[tuple[int, ResultCommit], ...] = ()
    """The last commit that each member told. It counts once its signatures prove it."""
    promises: tuple[tuple[int, Promise], ...] = ()
    begin: Begin | None = None
    """The ballot that the leader has begun, until the other members' promises allow this one to follow."""
    asked: tuple[tuple[int, int], ...] = ()
    """Unanswered ballots, by member. A member answers only the member that it follows."""
    accusations: frozenset[tuple[int, int, bool]] = frozenset()
    """(accuser, accused, hostile) for each trouble that was reported to this member in this round, while it led.

    They are added to the accusers' promises. Otherwise a member could report trouble, promise without it, and repeat
    that for ever. They last for the round, like losses: so each pair of members costs one attempt at most, and a member
    that accuses several others has most troubles itself.
    """


@dataclass(frozen=True, slots=True)
class OwnResult:
    """The whole result that this member holds."""

    digests: tuple[bytes, ...] = ()
    """One digest per share."""
    digest: bytes = b""
    """Digest of the result as a whole."""
    signature: bytes = b""
    """This member's signature that it holds the result."""
    outputs: tuple[bytes, ...] = ()
    """The signature of each share by its reducer; empty bytes for a share without parts."""


@dataclass(slots=True)
class MemberState:
    """One member's state. :func:`advance` changes a copy; the fields' values are immutable."""

    seat: Seat
    begun: Begin
    """The last ballot that this member has begun, and its value; ``lacking`` is left empty."""
    phase: RoundPhase = RoundPhase.EXCHANGING
    promised: int = 0
    """The last ballot that this member has promised to take next."""
    heard: tuple[tuple[int, int, int], ...] = ()
    """(member, ballot, attempt): the last promise that each other member gave, from its own mouth."""
    ready: ResultCommit | None = None
    """A proven commit that this member may not follow yet, because it has promised a newer ballot since."""
    pending: Pending = Pending()
    complete: Complete | None = None
    own: OwnResult = OwnResult()
    """The result of ``complete``."""
    accepted: Accepted | None = None
    lost: Members = frozenset()
    blamed: Members = frozenset()
    """Members that this one can reach, and does not want in the next attempt. They promise like the others.

    Another member's lies can bring this one to blame an honest member. Their votes still arrive, so neither can go on
    without the other one's promise.
    """
    hostile: Members = frozenset()
    dead: Members = frozenset()
    left: tuple[tuple[int, int], ...] = ()
    """Members that gave up the round, with the last ballot that each accepted."""
    trouble: bool = False
    """True if the ballot cannot commit with its view."""
    reason: str = ""
    """Reason of a failure."""
    code: FailedCode = FailedCode.OTHER
    """The same reason, for programs."""
    committed: ResultCommit | None = None
    """The proof of the result that the group committed, if this member has it."""

    @property
    def me(self) -> int:
        """Position of this member."""
        return self.seat.me

    @property
    def size(self) -> int:
        """Number of members of the group."""
        return self.seat.size

    @property
    def outcome(self) -> Complete | None:
        """The result that the group committed, if this member knows it."""
        return None if self.committed is None else Complete(self.committed.attempt, self.committed.members)

    @property
    def undecided(self) -> bool:
        """True after a failure if the others may have committed a result that counts this member's contribution."""
        if self.phase is not RoundPhase.FAILED or self.outcome is not None:
            return False
        others = frozenset(range(self.size)) - {self.me} - self.gone
        if self.accepted is not None:
            return is_quorum(others, self.size, self.gone | {self.me})
        if not self.begun.must:
            # This member was in the view of every ballot that could commit a result with its contribution, and it
            # held no result. So only members that cannot ask the ballot's leader may believe that it committed.
            leader = ballot_leader(self.begun.ballot, self.size)
            if leader == self.me:
                # Together, the members that lost this leader may have taken the result for committed before they heard
                # that it gave up. They count it as gone by now, so fewer of them are a quorum.
                all_others = frozenset(range(self.size)) - {self.me}
                may_have_adopted = is_quorum(all_others, self.size, frozenset())
                return may_have_adopted and is_quorum(others, self.size, self.gone | {self.me})
            others -= {leader}
        return is_quorum(others, self.size, self.gone)

    @property
    def presumed_used(self) -> bool:
        """True after a decided failure if a result with this member's contribution may be in use nevertheless.

        This member held the result and told the ballot's leader. The leader may have committed before it died, and its
        program may have used or saved the result. A contribution counts at most once, so this member does not use it
        again. The exception: if a member of the ballot's view says that it never held the result, the leader cannot
        have committed.
        """
        if self.phase is not RoundPhase.FAILED or self.outcome is not None or self.accepted is None:
            return False
        accepted, left = self.accepted, dict(self.left)
        held_by_all = all(
            left.get(position, accepted.ballot) >= accepted.ballot for position in accepted.view
        )
        leader_died = ballot_leader(accepted.ballot, self.size) in self.dead - left.keys()
        return self.me in accepted.members and leader_died and held_by_all

    @property
    def leader(self) -> int:
        """Position of the member that this one follows: the first in the roster that it has not lost."""
        return next(position for position in range(self.size) if position not in self.lost)

    @property
    def apart(self) -> Members:
        """Members with which this one takes part in no further attempt."""
        return self.lost | self.blamed

    @property
    def gone(self) -> Members:
        """Members that will never decide again."""
        return self.dead | {position for position, _ in self.left}

    def key(self) -> tuple[Any, ...]:
        """Return a hashable key, equal for equal states."""
        return tuple(getattr(self, name) for name in _FIELDS)


_FIELDS = tuple(MemberState.__slots__)


def new_member(
    me: int, size: int, holders: Members, contributors: Members, minimum: int, *, verify: bool = False
) -> MemberState:
    """Return a member's state at the beginning of a round: it has begun ballot 0, with all members."""
    all_members = frozenset(range(size))
    return MemberState(
        Seat(me, size, holders, contributors, minimum, verify),
        Begin(0, 0, all_members, all_members, source=0, lacking=frozenset()),
    )


# Conditions about the proof of a commit: when it counts for a member, and when the member may follow it.
#
# They belong to the agreement's table (p2pavg.consensus.agreement), and are pure functions of a member's state.


def holds_result_of(member: MemberState, commit: ResultCommit) -> bool:
    """Return whether a member holds the same bits as the members that signed a commit."""
    has = member.complete == Complete(commit.attempt, commit.members)
    return has and member.me in commit.members & member.seat.holders and member.own.digest == commit.digest


def proven(member: MemberState) -> ResultCommit | None:
    """Return a commit that this member has been told and that its signatures prove, or ``None``."""
    for _, one in member.pending.commits:
        same = [
            (sender, other)
            for sender, other in member.pending.commits
            if _statement(other) == _statement(one)
        ]
        signatures = {position: signed for _, other in same for position, signed in other.signatures}
        if holds_result_of(member, one):
            signatures[member.me] = member.own.signature
        commit = ResultCommit(one.attempt, one.members, one.digest, tuple(sorted(signatures.items())))
        if _is_proven(member, commit, frozenset(sender for sender, _ in same)):
            return commit
    return None


def _statement(commit: ResultCommit) -> tuple[int, Members, bytes]:
    return commit.attempt, commit.members, commit.digest


def _is_proven(member: MemberState, commit: ResultCommit, told: Members) -> bool:
    """Return whether the signatures of a commit suffice for this member.

    Every member that needs the result has to have signed, except those that this member itself has lost. A member that
    gave up before it held the result keeps its contribution, so the result may count it only once it is dead.
    """
    needs, me = commit.members & member.seat.holders, member.me
    keeps = {position for position, accepted in member.left if accepted < commit.attempt} - member.dead
    if needs - commit.signers - {me} - (member.lost - keeps):
        return False
    if me not in needs or holds_result_of(member, commit):
        return True
    if me in commit.signers:
        # It held the result, and has gone on to another attempt with the promises of the others. So only all of the
        # others together are believed.
        return told >= commit.signers - {me} - member.dead
    if member.complete == Complete(commit.attempt, commit.members):
        return False  # it holds another result of the same attempt, so one of those that signed lies
    return (
        bool(commit.signers) and told >= commit.signers - member.dead and _may_be_passed_over(member, commit)
    )


def _may_be_passed_over(member: MemberState, commit: ResultCommit) -> bool:
    """Return whether the others can have committed a result that this member needs and does not hold.

    They are a quorum without this member, and they took over the result because the leader of its attempt did not
    answer, or because that leader is this member.
    """
    gone = member.gone | ({member.me} if member.phase is RoundPhase.FAILED else frozenset())
    others = frozenset(range(member.size)) - {member.me} - gone
    leader = ballot_leader(commit.attempt, member.size)
    missing = commit.members & member.seat.holders - commit.signers
    taken_over = leader not in commit.signers and missing != {member.me}
    return is_quorum(others, member.size, gone) and (leader == member.me or taken_over)


def asks_further(member: MemberState, other: int) -> bool:
    """Return whether it is worth asking a lost member how the round ended for it."""
    # A commit without the signature of a member that gave up counts only when that member is dead.
    return other not in (member.dead if member.pending.commits else member.gone)


def has_it(member: MemberState) -> bool:
    """Return whether a proven commit is one of this member's own result, or of one that it need not hold."""
    commit = proven(member)
    if commit is None or member.me not in commit.members:
        return False
    return member.me not in member.seat.holders or (
        holds_result_of(member, commit) and (is_free(member, commit) or is_confirmed(member, commit))
    )


def is_free(member: MemberState, commit: ResultCommit) -> bool:
    """Return whether no other member can have left the commit's attempt because of this member's word.

    A promise, or a question for an own ballot, lets the others leave each attempt before that ballot. It does so also
    when the ballot is about the older attempt here: a leader that lies may have begun it as a new one elsewhere.
    """
    return member.promised <= commit.attempt


def is_confirmed(member: MemberState, commit: ResultCommit) -> bool:
    """Return whether no other member that needs the result can end the round otherwise.

    Each of them follows this commit, or has given up with its result, and has said so itself; or this member has lost
    it. One that gave up with another result, or none, keeps its contribution, unless its process is dead.
    """
    if member.me not in commit.members & member.seat.holders:
        return True
    told = {sender for sender, one in member.pending.commits if _statement(one) == _statement(commit)}
    left = dict(member.left)
    about_it = {commit.attempt}
    # Another member says only which ballot it accepted. Of a later one, this member knows the attempt if it did so too.
    if member.accepted is not None and member.accepted.attempt == commit.attempt:
        about_it.add(member.accepted.ballot)
    with_it = {position for position, ballot in left.items() if ballot in about_it}
    lost = member.lost - (left.keys() - member.dead)
    return commit.members & member.seat.holders <= told | {member.me} | with_it | lost


def is_bound(member: MemberState) -> bool:
    """Return whether a commit is proven of the result that this member holds, and it cannot follow it yet."""
    commit = proven(member)
    return (
        member.ready is None and commit is not None and holds_result_of(member, commit) and not has_it(member)
    )


def lacks_it(member: MemberState) -> bool:
    commit = proven(member)
    return (
        commit is not None
        and member.me in commit.members & member.seat.holders
        and not holds_result_of(member, commit)
    )


def is_left_out(member: MemberState) -> bool:
    commit = proven(member)
    return commit is not None and member.me not in commit.members
