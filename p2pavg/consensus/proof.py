"""Conditions about the proof of a commit: when it counts for a member, and when the member may follow it.

They belong to the agreement's table (:mod:`p2pavg.consensus.agreement`), and are pure functions of a member's state.
"""

from __future__ import annotations

from p2pavg.consensus.choice import ballot_leader, is_quorum
from p2pavg.consensus.member import MemberState, RoundPhase
from p2pavg.consensus.votes import Complete, Members, ResultCommit


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
