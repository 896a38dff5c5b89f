"""The conditions of the agreement's table (:mod:`p2pavg.consensus.agreement`), as pure functions of a member's state.

A condition about an event takes the event as well. It may read only the fields of the row's type of vote.
"""

from __future__ import annotations

from p2pavg.consensus.choice import Answers, Stuck, ballot_leader, choose, disputed, is_quorum, is_too_few
from p2pavg.consensus.events import Completed, Heard
from p2pavg.consensus.member import Member, Phase
from p2pavg.consensus.votes import Begin, Behind, Commit, Complete, Gather, Held, Members, Promise, Trouble

MAX_LEAP = 64  # a leader's ballots that a member may miss in a row; each loss costs one or two


def is_attempt(member: Member, event: Completed) -> bool:
    return event.attempt == member.begun.attempt


def not_outvoted(member: Member, event: Completed) -> bool:
    return event.attempt == member.begun.attempt and member.promised == member.begun.ballot


def leads_ballot(member: Member, event: Heard) -> bool:
    vote = event.vote
    return (
        isinstance(vote, Held)
        and vote.ballot == member.begun.ballot == member.promised
        and ballot_leader(vote.ballot, member.size) == member.me
        and event.sender in member.begun.view
    )


def answers_me(member: Member, event: Heard) -> bool:
    return isinstance(event.vote, Promise) and event.vote.ballot == member.promised


def outpaces(member: Member, event: Heard) -> bool:
    return (
        isinstance(event.vote, Behind)
        and event.vote.promised >= member.promised
        and not leaps(member, event.vote.promised)
    )


def is_due(member: Member, event: Heard) -> bool:
    """Return whether this is the ballot that the member promised to take next."""
    vote = event.vote
    return (
        isinstance(vote, Begin)
        and vote.ballot == member.promised
        and event.sender == ballot_leader(vote.ballot, member.size)
        and member.me in vote.view
    )


def is_impossible(member: Member, event: Heard) -> bool:
    """Return whether a ballot that is due contradicts this member's knowledge of its own attempts."""
    vote = event.vote
    if not is_due(member, event) or not isinstance(vote, Begin):
        return False
    if event.sender not in vote.view:
        return True  # a leader goes on itself
    if vote.attempt == vote.ballot:
        return False
    if contradicts(member, vote.attempt, vote.members) or vote.lacking - member.seat.holders:
        return True
    needs = member.me in vote.members & member.seat.holders
    has = member.complete == Complete(vote.attempt, vote.members)
    if needs and not has and vote.attempt != member.begun.attempt:
        return True  # this member was never in that attempt, or has discarded its parts
    # A member may have completed the attempt since it answered. Then ``lacking`` names it although it has the result.
    lacks, is_served = needs and not has, member.me in vote.lacking
    passes_on = bool(vote.lacking) and vote.source == member.me
    return (lacks and not is_served) or (is_served and not needs) or (passes_on and not has)


def contradicts(member: Member, attempt: int, members: Members) -> bool:
    """Return whether an attempt's members differ from those that this member knows. Attempt 0 has all members."""
    known = frozenset(range(member.size)) if attempt == 0 else member.begun.members
    return attempt in (0, member.begun.attempt) and members != known


def is_false_promise(member: Member, event: Heard) -> bool:
    """Return whether a promise contradicts the leader's knowledge or itself."""
    vote = event.vote
    if not isinstance(vote, Promise) or vote.ballot != member.promised:
        return False
    if {member.me, event.sender} & vote.apart:
        return True  # a member that answers has lost neither the leader nor itself
    accepted, complete = vote.accepted, vote.complete
    if complete is not None and (
        event.sender not in complete.members or contradicts(member, complete.attempt, complete.members)
    ):
        return True
    return accepted is not None and (
        event.sender not in accepted.view
        or contradicts(member, accepted.attempt, accepted.members)
        or (accepted.ballot == 0 and len(accepted.view) != member.size)
        or (accepted.ballot == member.begun.ballot and accepted.view != member.begun.view)
    )


def is_false_held(member: Member, event: Heard) -> bool:
    """Return whether a member that needs the result names none, or one that needs none names one."""
    vote = event.vote
    if not isinstance(vote, Held) or not leads_ballot(member, event):
        return False
    needs = event.sender in member.begun.members & member.seat.holders
    return needs != bool(vote.digests) or needs != bool(vote.signature)


def is_false_commit(member: Member, event: Heard) -> bool:
    """Return whether a commit cannot be, whatever happened to other members."""
    vote = event.vote
    return isinstance(vote, Commit) and (
        contradicts(member, vote.attempt, vote.members)
        or bool(vote.signers - member.seat.holders)
        or is_too_few(vote.members, member.seat.holders, member.seat.contributors, 2)
    )


def too_few(member: Member, event: Heard) -> bool:
    vote = event.vote
    return (
        is_due(member, event)
        and isinstance(vote, Begin)
        and vote.attempt == vote.ballot
        and is_too_few(vote.members, member.seat.holders, member.seat.contributors, member.seat.minimum)
    )


def is_new(member: Member, event: Heard) -> bool:
    vote = event.vote
    return is_due(member, event) and isinstance(vote, Begin) and vote.attempt == vote.ballot


def is_held(member: Member, event: Heard) -> bool:
    vote = event.vote
    return is_due(member, event) and isinstance(vote, Begin) and holds(member, vote)


def holds(member: Member, vote: Begin) -> bool:
    if member.me not in vote.members & member.seat.holders:
        return True  # it needs no result, and only witnesses the adopted one
    return member.complete == Complete(vote.attempt, vote.members)


def concerns_me(member: Member, event: Heard) -> bool:
    vote = event.vote
    return (
        isinstance(vote, Trouble)
        and member.leader == member.me
        and event.sender in member.begun.view
        and vote.peer in member.begun.view
        and event.sender != vote.peer
        and not has_accused(member, event.sender, vote.peer)
    )


def is_of_another(member: Member, event: Heard) -> bool:
    vote = event.vote
    return isinstance(vote, Trouble) and vote.peer not in (event.sender, member.me)


def has_accused(member: Member, accuser: int, accused: int) -> bool:
    return any(entry[:2] == (accuser, accused) for entry in member.pending.accusations)


def is_ahead(member: Member, event: Heard) -> bool:
    """Return whether a member asks under a ballot of its own that is not too far ahead."""
    return (
        isinstance(event.vote, Gather)
        and ballot_leader(event.vote.ballot, member.size) == event.sender
        and not leaps(member, event.vote.ballot)
    )


def leaps(member: Member, ballot: int) -> bool:
    """Return whether a ballot is further ahead than honest members can be. A liar could use up all ballot numbers."""
    return ballot > member.promised + MAX_LEAP * member.size


def is_unknown(member: Member, event: Heard) -> bool:
    return member.committed is None and not is_false_commit(member, event)


# Proof of a commit.


def holds_result_of(member: Member, commit: Commit) -> bool:
    """Return whether a member holds the same bits as the members that signed a commit."""
    has = member.complete == Complete(commit.attempt, commit.members)
    return has and member.me in commit.members & member.seat.holders and member.own.digest == commit.digest


def proven(member: Member) -> Commit | None:
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
        commit = Commit(one.attempt, one.members, one.digest, tuple(sorted(signatures.items())))
        if _is_proven(member, commit, frozenset(sender for sender, _ in same)):
            return commit
    return None


def _statement(commit: Commit) -> tuple[int, Members, bytes]:
    return commit.attempt, commit.members, commit.digest


def _is_proven(member: Member, commit: Commit, told: Members) -> bool:
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
        # It held the result, and a leader moved it on to another attempt. That leader is not believed: it said that
        # the result had not been committed.
        return bool(told - {ballot_leader(member.begun.ballot, member.size)})
    if member.complete == Complete(commit.attempt, commit.members):
        return False  # it holds another result of the same attempt, so one of those that signed lies
    return (
        bool(commit.signers) and told >= commit.signers - member.gone and _may_be_passed_over(member, commit)
    )


def _may_be_passed_over(member: Member, commit: Commit) -> bool:
    """Return whether the others can have committed a result that this member needs and does not hold.

    They are a quorum without this member, and they took over the result because the leader of its attempt did not
    answer, or because that leader is this member.
    """
    gone = member.gone | ({member.me} if member.phase is Phase.FAILED else frozenset())
    others = frozenset(range(member.size)) - {member.me} - gone
    leader = ballot_leader(commit.attempt, member.size)
    missing = commit.members & member.seat.holders - commit.signers
    taken_over = leader not in commit.signers and missing != {member.me}
    return is_quorum(others, member.size, gone) and (leader == member.me or taken_over)


def asks_further(member: Member, other: int) -> bool:
    """Return whether it is worth asking a lost member how the round ended for it."""
    # A commit without the signature of a member that gave up counts only when that member is dead.
    return other not in (member.dead if member.pending.commits else member.gone)


def has_it(member: Member) -> bool:
    """Return whether a proven commit is one of this member's own result, or of one that it need not hold."""
    commit = proven(member)
    if commit is None or member.me not in commit.members:
        return False
    return member.me not in member.seat.holders or holds_result_of(member, commit)


def lacks_it(member: Member) -> bool:
    commit = proven(member)
    return commit is not None and member.me in commit.members & member.seat.holders


def is_left_out(member: Member) -> bool:
    return proven(member) is not None


# Conditions of transitions without an event.


def must_lead(member: Member) -> bool:
    return member.trouble and member.leader == member.me


def leader_asks(member: Member) -> bool:
    return any(sender == member.leader for sender, _ in member.pending.asked)


def leader_asks_anew(member: Member) -> bool:
    return any(
        sender == member.leader and ballot > member.promised for sender, ballot in member.pending.asked
    )


def all_answered(member: Member) -> bool:
    answered = {position for position, _ in member.pending.promises}
    return answered >= frozenset(range(member.size)) - member.lost


def decide(member: Member) -> Begin | Stuck:
    return choose(
        Answers(
            me=member.me,
            size=member.size,
            holders=member.seat.holders,
            contributors=member.seat.contributors,
            minimum=member.seat.minimum,
            ballot=member.promised,
            promises=dict(member.pending.promises),
            dead=member.dead,
            left=dict(member.left),
        )
    )


def begins_anew(member: Member) -> bool:
    decision = decide(member) if all_answered(member) else None
    return isinstance(decision, Begin) and decision.attempt == decision.ballot


def begins_held(member: Member) -> bool:
    decision = decide(member) if all_answered(member) else None
    return isinstance(decision, Begin) and decision.attempt != decision.ballot and holds(member, decision)


def begins_lacking(member: Member) -> bool:
    decision = decide(member) if all_answered(member) else None
    return isinstance(decision, Begin) and decision.attempt != decision.ballot


def stuck_for_good(member: Member) -> bool:
    decision = decide(member) if all_answered(member) else None
    return isinstance(decision, Stuck) and decision.final


def stuck(member: Member) -> bool:
    return all_answered(member) and isinstance(decide(member), Stuck)


def may_go_on(member: Member) -> bool:
    """Return whether the members that are not lost have become a quorum."""
    here = frozenset(range(member.size)) - member.lost
    return member.trouble and is_quorum(here, member.size, member.gone)


def all_hold(member: Member) -> bool:
    return (
        member.promised == member.begun.ballot
        and ballot_leader(member.begun.ballot, member.size) == member.me
        and {position for position, _ in member.pending.held} >= member.begun.view
    )


def dispute(member: Member) -> Members:
    if not all_hold(member):
        return frozenset()
    source = None if member.begun.source == member.me else member.begun.source
    return disputed(dict(member.pending.held), sorted(member.begun.members), source)


def at_odds(member: Member) -> bool:
    return bool(dispute(member))


def own_fault(member: Member) -> bool:
    return member.me in dispute(member)


def in_result(member: Member) -> bool:
    return all_hold(member) and member.me in member.begun.members
