"""The conditions of the agreement's table (:mod:`p2pavg.consensus.agreement`), as pure functions of a member's state.

A condition about an event takes the event as well. It may read only the fields of the row's type of vote.
"""

from __future__ import annotations

from p2pavg.consensus.choice import (
    MemberAnswers,
    Stuck,
    ballot_leader,
    choose,
    is_quorum,
    is_too_few,
    usual_digests,
)
from p2pavg.consensus.member import MemberState
from p2pavg.consensus.votes import (
    Begin,
    Complete,
    Completed,
    Gather,
    Members,
    Promise,
    ResultCommit,
    ResultHeld,
    SignedOutput,
    StaleBallot,
    Trouble,
    VoteHeard,
)

MAX_LEAP = 64  # a leader's ballots that a member may miss in a row; each loss costs one or two


def is_attempt(member: MemberState, event: Completed) -> bool:
    # A result of an older attempt is of no use: its parts have been discarded.
    return event.attempt == member.begun.attempt


def not_outvoted(member: MemberState, event: Completed) -> bool:
    # A member that has promised a newer ballot may no longer accept this one. Its promises tell the result.
    return event.attempt == member.begun.attempt and member.promised == member.begun.ballot


def leads_ballot(member: MemberState, event: VoteHeard) -> bool:
    vote = event.vote
    return (
        isinstance(vote, ResultHeld)
        # Votes for a ballot that this leader has left behind must not complete the present one.
        and vote.ballot == member.begun.ballot == member.promised
        and ballot_leader(vote.ballot, member.size) == member.me
        and event.sender in member.begun.view
        # A member says once what it holds. One that goes on changing its mind could keep the ballot from its end.
        and all(position != event.sender for position, _ in member.pending.held)
    )


def contradicts_own(member: MemberState, event: VoteHeard) -> bool:
    """Return whether a reducer has signed another digest of its share than the one that this member has from it.

    Both signatures are verified: this member's own when the share came, the other one when it was heard
    (:mod:`p2pavg.round.signing`). So the two prove that the reducer lied.
    """
    vote = event.vote
    # Its own share came from no other member, so it proves nothing about one.
    if not isinstance(vote, SignedOutput) or vote.reducer == member.me:
        return False
    own = own_output(member, vote)
    # A share without parts has no signature, so there is nothing that two members could hold differently.
    return own is not None and bool(own.output) and own.digest != vote.digest


def own_output(member: MemberState, vote: SignedOutput) -> SignedOutput | None:
    """Return what this member itself holds of the share that a vote is about; ``None`` if it does not hold it."""
    complete = member.complete
    # Two averages of different attempts count different members, and honest reducers sign both.
    if complete is None or complete.attempt != vote.attempt or vote.reducer not in complete.members:
        return None
    # Shares are in the order of the attempt's members, and not of the whole roster.
    share = sorted(complete.members).index(vote.reducer)
    if len(member.own.digests) <= share or len(member.own.outputs) <= share:
        return None  # an auxiliary
    return SignedOutput(vote.attempt, vote.reducer, member.own.digests[share], member.own.outputs[share])


def is_near(member: MemberState, event: VoteHeard) -> bool:
    """Return whether a promise is about a ballot that is not too far ahead."""
    # A promise far ahead would make this member promise along, and leave no ballot number for honest leaders.
    return isinstance(event.vote, Promise) and not leaps(member, event.vote.ballot)


def answers_me(member: MemberState, event: VoteHeard) -> bool:
    return (
        isinstance(event.vote, Promise)
        # An answer to an older question may lack a loss that its sender has seen since.
        and event.vote.ballot == member.promised
        # The first answer counts. A second one could take back what the leader's choice already relies on.
        and all(position != event.sender for position, _ in member.pending.promises)
    )


def outpaces(member: MemberState, event: VoteHeard) -> bool:
    return (
        isinstance(event.vote, StaleBallot)
        # A nack for an older question would make the leader ask again without need, and so without end.
        and event.vote.promised >= member.promised
        and not leaps(member, event.vote.promised)
    )


def is_due(member: MemberState, event: VoteHeard) -> bool:
    """Return whether this is the ballot that the member promised to take next."""
    vote = event.vote
    return (
        isinstance(vote, Begin)
        # Only the ballot that it promised last: after a newer promise it takes no part in older ones.
        and vote.ballot == member.promised
        # The number names the leader: no other member can begin a ballot in its name.
        and event.sender == ballot_leader(vote.ballot, member.size)
        and member.me in vote.view
    )


def is_impossible(member: MemberState, event: VoteHeard) -> bool:
    """Return whether a ballot that is due contradicts this member's knowledge of its own attempts."""
    vote = event.vote
    if not is_due(member, event) or not isinstance(vote, Begin):
        return False
    if event.sender not in vote.view:
        return True  # a leader goes on itself
    # A new attempt needs nothing of older ones, so this member's knowledge cannot contradict it.
    if vote.attempt == vote.ballot:
        return False
    # Auxiliaries hold no result, so no honest leader says that they lack one.
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


def contradicts(member: MemberState, sender: int, attempt: int, members: Members) -> bool:
    """Return whether a member names other members of an attempt than it has to know. Attempt 0 has all members.

    A later attempt's leader may have named different members to the sender and to this member.
    """
    if attempt == 0:
        return members != frozenset(range(member.size))
    # Only what one of the two began is certain between them: a third leader may have told them different things.
    began_it = ballot_leader(attempt, member.size) in (sender, member.me)
    return began_it and attempt == member.begun.attempt and members != member.begun.members


def is_false_promise(member: MemberState, event: VoteHeard) -> bool:
    """Return whether a promise contradicts the leader's knowledge or itself."""
    vote = event.vote
    if not isinstance(vote, Promise) or vote.ballot != member.promised:
        return False
    if {member.me, event.sender} & vote.apart:
        return True  # a member that answers has lost neither the leader nor itself
    accepted, complete = vote.accepted, vote.complete
    if complete is not None and (
        # A member holds no result of an attempt that it was not in.
        event.sender not in complete.members
        or contradicts(member, event.sender, complete.attempt, complete.members)
    ):
        return True
    return accepted is not None and (
        # It accepts only ballots of whose view it is a part.
        event.sender not in accepted.view
        or contradicts(member, event.sender, accepted.attempt, accepted.members)
        # Ballot 0 began with the commit of the roster, so its view is known to all: every member.
        or (accepted.ballot == 0 and len(accepted.view) != member.size)
        or (
            # The same ballot, begun by one of the two: both know its view.
            accepted.ballot == member.begun.ballot
            and ballot_leader(accepted.ballot, member.size) in (event.sender, member.me)
            and accepted.view != member.begun.view
        )
    )


def is_false_held(member: MemberState, event: VoteHeard) -> bool:
    """Return whether a member that needs the result names none, or one that needs none names one."""
    vote = event.vote
    if not isinstance(vote, ResultHeld) or not leads_ballot(member, event):
        return False
    # A holder that signs nothing would fill the view, and leave the leader without the proof of a commit.
    needs = event.sender in member.begun.members & member.seat.holders
    return needs != bool(vote.digests) or needs != bool(vote.signature)


def is_false_commit(member: MemberState, event: VoteHeard) -> bool:
    """Return whether a commit cannot be, whatever happened to other members."""
    vote = event.vote
    return isinstance(vote, ResultCommit) and (
        contradicts(member, event.sender, vote.attempt, vote.members)
        # An auxiliary signs nothing, whatever attempt a commit is about.
        or bool(vote.signers - member.seat.holders)
        # Two, and not this member's own minimum: each member has its own, and others may go on with fewer.
        or is_too_few(vote.members, member.seat.holders, member.seat.contributors, 2)
    )


def allowed(member: MemberState) -> Begin | None:
    """Return the ballot that the leader has begun, if the other members' promises allow this member to follow."""
    begin = member.pending.begin
    return begin if begin is not None and is_released(member, begin) else None


def is_released(member: MemberState, begin: Begin) -> bool:
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
    # From each member itself. What the leader says about promises is worth nothing here: it may lie.
    heard = {position: (ballot, attempt) for position, ballot, attempt in member.heard}
    leader = ballot_leader(begin.ballot, member.size)
    # Blamed members are among them: their votes still arrive, and the blame may come from a third member's lie.
    for other in member.seat.holders - member.lost - {member.me, leader}:
        # A member that has not spoken may still sign the attempt before.
        ballot, attempt = heard.get(other, (-1, -1))
        # A member that has left the older attempt has discarded its parts. It will not commit that result.
        left = begin.attempt != begin.ballot and other in begin.members and attempt != begin.attempt
        if ballot < begin.ballot or left:
            return False
    return True


def too_few(member: MemberState) -> bool:
    begin = allowed(member)
    return (
        begin is not None
        # The minimum is for new attempts. An older result may have been committed, and few members suffice for it.
        and begin.attempt == begin.ballot
        and is_too_few(begin.members, member.seat.holders, member.seat.contributors, member.seat.minimum)
    )


def is_new(member: MemberState) -> bool:
    begin = allowed(member)
    return begin is not None and begin.attempt == begin.ballot


def is_held(member: MemberState) -> bool:
    begin = allowed(member)
    return begin is not None and holds(member, begin)


def is_lacking(member: MemberState) -> bool:
    return allowed(member) is not None


def newest_of_lost(member: MemberState) -> int:
    """Return the newest ballot that another member has promised to a leader that this member has lost; -1 if none."""
    return max(
        (
            ballot
            for position, ballot, _ in member.heard
            # Leaders before the own one are those that this member has lost: it follows the first that it has not.
            if position not in member.lost and ballot_leader(ballot, member.size) < member.leader
        ),
        default=-1,
    )


def is_overtaken(member: MemberState) -> bool:
    """Return whether another member follows a leader that this member has lost, and needs its promise."""
    return newest_of_lost(member) > member.promised


def leads_overtaken(member: MemberState) -> bool:
    return member.leader == member.me and is_overtaken(member)


def holds(member: MemberState, vote: Begin) -> bool:
    if member.me not in vote.members & member.seat.holders:
        return True  # it needs no result, and only witnesses the adopted one
    return member.complete == Complete(vote.attempt, vote.members)


def concerns_me(member: MemberState, event: VoteHeard) -> bool:
    vote = event.vote
    return (
        isinstance(vote, Trouble)
        and member.leader == member.me
        and event.sender in member.begun.view
        and vote.peer in member.begun.view
        # A member cannot have lost itself.
        and event.sender != vote.peer
        # Each accusation counts once. Repeated, it would make the leader ask anew for ever.
        and not has_accused(member, event.sender, vote.peer)
    )


def is_of_another(member: MemberState, event: VoteHeard) -> bool:
    vote = event.vote
    # A member that has lost this leader follows another one, so its word against this one changes nothing here.
    return isinstance(vote, Trouble) and vote.peer not in (event.sender, member.me)


def has_accused(member: MemberState, accuser: int, accused: int) -> bool:
    return any(entry[:2] == (accuser, accused) for entry in member.pending.accusations)


def is_ahead(member: MemberState, event: VoteHeard) -> bool:
    """Return whether a member asks under a ballot of its own that is not too far ahead."""
    return (
        isinstance(event.vote, Gather)
        # The number belongs to one leader: no member can ask in another one's name.
        and ballot_leader(event.vote.ballot, member.size) == event.sender
        and not leaps(member, event.vote.ballot)
    )


def leaps(member: MemberState, ballot: int) -> bool:
    """Return whether a ballot is further ahead than honest members can be. A liar could use up all ballot numbers."""
    return ballot > member.promised + MAX_LEAP * member.size


def is_unknown(member: MemberState, event: VoteHeard) -> bool:
    # A member that has failed asks how the others ended. Once it knows, there is nothing more to learn.
    return member.committed is None and not is_false_commit(member, event)


# Conditions of transitions without an event.


def must_lead(member: MemberState) -> bool:
    return member.trouble and member.leader == member.me


def leader_asks(member: MemberState) -> bool:
    return any(sender == member.leader for sender, _ in member.pending.asked)


def leader_asks_anew(member: MemberState) -> bool:
    # Only the member that it follows is answered: else two that lead could overtake each other without end.
    return any(
        sender == member.leader and ballot > member.promised for sender, ballot in member.pending.asked
    )


def all_answered(member: MemberState) -> bool:
    answered = {position for position, _ in member.pending.promises}
    # All that can be reached, and not a quorum only: a member without an answer would be left out of the view.
    return answered >= frozenset(range(member.size)) - member.lost


def decide(member: MemberState) -> Begin | Stuck:
    decision = _choose(member)
    # A leader is bound like its followers: others may commit an older result with the signature that it gave.
    if isinstance(decision, Begin) and not is_released(member, decision):
        return Stuck("another member may have ended the round otherwise", False)
    return decision


def _choose(member: MemberState) -> Begin | Stuck:
    return choose(
        MemberAnswers(
            me=member.me,
            size=member.size,
            holders=member.seat.holders,
            contributors=member.seat.contributors,
            minimum=member.seat.minimum,
            ballot=member.promised,
            promises=dict(member.pending.promises),
            dead=member.dead,
            left=dict(member.left),
            verify=member.seat.verify,
        )
    )


def begins_anew(member: MemberState) -> bool:
    decision = decide(member) if all_answered(member) else None
    return isinstance(decision, Begin) and decision.attempt == decision.ballot


def begins_held(member: MemberState) -> bool:
    decision = decide(member) if all_answered(member) else None
    return isinstance(decision, Begin) and decision.attempt != decision.ballot and holds(member, decision)


def begins_lacking(member: MemberState) -> bool:
    decision = decide(member) if all_answered(member) else None
    return isinstance(decision, Begin) and decision.attempt != decision.ballot


def stuck_for_good(member: MemberState) -> bool:
    decision = decide(member) if all_answered(member) else None
    # A member that has told a commit to the others keeps to it: its failing would contradict what they rely on.
    return isinstance(decision, Stuck) and decision.final and member.ready is None


def stuck(member: MemberState) -> bool:
    # Not for good: a member that died meanwhile changes the quorum, or a member that is asked says how it ended.
    return all_answered(member) and isinstance(decide(member), Stuck)


def may_go_on(member: MemberState) -> bool:
    """Return whether the members that are not lost have become a quorum."""
    here = frozenset(range(member.size)) - member.lost
    return member.trouble and is_quorum(here, member.size, member.gone)


def all_hold(member: MemberState) -> bool:
    return (
        # A leader that has begun to prepare the next ballot must not commit the old one any more.
        member.promised == member.begun.ballot
        and ballot_leader(member.begun.ballot, member.size) == member.me
        and {position for position, _ in member.pending.held} >= member.begun.view
    )


def odd_members(member: MemberState) -> Members:
    """Return the members whose digests differ from what the reducers have signed to this leader.

    A leader that holds no result has no signatures. It takes what most members name.
    """
    if not all_hold(member):
        return frozenset()
    # Members that need no result name no digests.
    named = {position: digests for position, digests in member.pending.held if digests}
    whole = Complete(member.begun.attempt, member.begun.members)
    # The own result may be of another attempt, as at a leader that only witnesses the one that is adopted.
    own = member.own.digests if member.complete == whole else ()
    right = own or usual_digests(named.values())
    return frozenset(position for position, digests in named.items() if digests != right)


def at_odds(member: MemberState) -> bool:
    return bool(odd_members(member))


def own_fault(member: MemberState) -> bool:
    """Return whether most other members, and more than a third of the group, hold another average of its own share.

    So many members do not lie. The averages that this leader sent were damaged, and it cannot leave itself out.
    """
    if not at_odds(member) or not member.own.digests or member.me not in member.begun.members:
        return False
    share = sorted(member.begun.members).index(member.me)
    named = [digests for position, digests in member.pending.held if position != member.me and digests]
    count = len(member.own.digests)
    others = sum(len(found) == count and found[share] != member.own.digests[share] for found in named)
    # Both bounds: if few members name digests, one liar could be most of these.
    return 2 * others > len(named) and 3 * others > member.size


def in_result(member: MemberState) -> bool:
    needs = member.begun.members & member.seat.holders
    signed = {position for position, _ in member.pending.signatures}
    # A lost member may be dead, so its signature may be missing. Each member decides that from what it saw itself.
    return all_hold(member) and member.me in member.begun.members and needs <= signed | member.lost
