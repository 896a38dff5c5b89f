"""The conditions of the agreement's table (:mod:`p2pavg.consensus.agreement`), as pure functions of a member's state.

A condition about an event takes the event as well. It may read only the fields of the row's type of vote.
"""

from __future__ import annotations

from p2pavg.consensus.choice import Answers, Stuck, ballot_leader, choose, disputed, is_quorum, is_too_few
from p2pavg.consensus.events import Completed, Heard
from p2pavg.consensus.member import Member
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


def is_near(member: Member, event: Heard) -> bool:
    """Return whether a promise is about a ballot that is not too far ahead."""
    return isinstance(event.vote, Promise) and not leaps(member, event.vote.ballot)


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
    if contradicts(member, event.sender, vote.attempt, vote.members) or vote.lacking - member.seat.holders:
        return True
    needs = member.me in vote.members & member.seat.holders
    has = member.complete == Complete(vote.attempt, vote.members)
    if needs and not has and vote.attempt != member.begun.attempt:
        return True  # this member was never in that attempt, or has discarded its parts
    # A member may have completed the attempt since it answered. Then ``lacking`` names it although it has the result.
    lacks, is_served = needs and not has, member.me in vote.lacking
    passes_on = bool(vote.lacking) and vote.source == member.me
    return (lacks and not is_served) or (is_served and not needs) or (passes_on and not has)


def contradicts(member: Member, sender: int, attempt: int, members: Members) -> bool:
    """Return whether a member names other members of an attempt than it has to know. Attempt 0 has all members.

    A later attempt's leader may have named different members to the sender and to this member.
    """
    if attempt == 0:
        return members != frozenset(range(member.size))
    began_it = ballot_leader(attempt, member.size) in (sender, member.me)
    return began_it and attempt == member.begun.attempt and members != member.begun.members


def is_false_promise(member: Member, event: Heard) -> bool:
    """Return whether a promise contradicts the leader's knowledge or itself."""
    vote = event.vote
    if not isinstance(vote, Promise) or vote.ballot != member.promised:
        return False
    if {member.me, event.sender} & vote.apart:
        return True  # a member that answers has lost neither the leader nor itself
    accepted, complete = vote.accepted, vote.complete
    if complete is not None and (
        event.sender not in complete.members
        or contradicts(member, event.sender, complete.attempt, complete.members)
    ):
        return True
    return accepted is not None and (
        event.sender not in accepted.view
        or contradicts(member, event.sender, accepted.attempt, accepted.members)
        or (accepted.ballot == 0 and len(accepted.view) != member.size)
        or (
            accepted.ballot == member.begun.ballot
            and ballot_leader(accepted.ballot, member.size) in (event.sender, member.me)
            and accepted.view != member.begun.view
        )
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
        contradicts(member, event.sender, vote.attempt, vote.members)
        or bool(vote.signers - member.seat.holders)
        or is_too_few(vote.members, member.seat.holders, member.seat.contributors, 2)
    )


def allowed(member: Member) -> Begin | None:
    """Return the ballot that the leader has begun, if the other members' promises allow this member to follow."""
    begin = member.pending.begin
    return begin if begin is not None and is_released(member, begin) else None


def is_released(member: Member, begin: Begin) -> bool:
    """Return whether this member may take part in a ballot: no other member may still end the round otherwise.

    Every other holder that this member has not lost itself has to have promised the ballot, or a newer one, from its
    own mouth. So the leader cannot move one member on and show another one the signatures of the attempt before. If
    the ballot is about an older attempt, no such member may have left that attempt. The leader's word is the ballot.
    """
    if member.ready is not None and member.ready.attempt != begin.attempt:
        return False  # the others may have followed the commit that this member has told them
    if begin.attempt == member.begun.attempt and begin.members != member.begun.members:
        return False  # that attempt's leader named different members to different members
    if member.me not in member.seat.holders:
        return True  # it signs nothing and commits no result
    heard = {position: (ballot, attempt) for position, ballot, attempt in member.heard}
    leader = ballot_leader(begin.ballot, member.size)
    for other in member.seat.holders - member.lost - {member.me, leader}:
        ballot, attempt = heard.get(other, (-1, -1))
        left = begin.attempt != begin.ballot and other in begin.members and attempt != begin.attempt
        if ballot < begin.ballot or left:
            return False
    return True


def too_few(member: Member) -> bool:
    begin = allowed(member)
    return (
        begin is not None
        and begin.attempt == begin.ballot
        and is_too_few(begin.members, member.seat.holders, member.seat.contributors, member.seat.minimum)
    )


def is_new(member: Member) -> bool:
    begin = allowed(member)
    return begin is not None and begin.attempt == begin.ballot


def is_held(member: Member) -> bool:
    begin = allowed(member)
    return begin is not None and holds(member, begin)


def is_lacking(member: Member) -> bool:
    return allowed(member) is not None


def newest_of_lost(member: Member) -> int:
    """Return the newest ballot that another member has promised to a leader that this member has lost; -1 if none."""
    return max(
        (
            ballot
            for position, ballot, _ in member.heard
            if position not in member.lost and ballot_leader(ballot, member.size) < member.leader
        ),
        default=-1,
    )


def is_overtaken(member: Member) -> bool:
    """Return whether another member follows a leader that this member has lost, and needs its promise."""
    return newest_of_lost(member) > member.promised


def leads_overtaken(member: Member) -> bool:
    return member.leader == member.me and is_overtaken(member)


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
    decision = _choose(member)
    if isinstance(decision, Begin) and not is_released(member, decision):
        return Stuck("another member may have ended the round otherwise", False)
    return decision


def _choose(member: Member) -> Begin | Stuck:
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
    return isinstance(decision, Stuck) and decision.final and member.ready is None


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
    needs = member.begun.members & member.seat.holders
    signed = {position for position, _ in member.pending.signatures}
    return all_hold(member) and member.me in member.begun.members and needs <= signed | member.lost
