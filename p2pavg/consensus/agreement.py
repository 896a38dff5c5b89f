"""How the members of a group agree on how their round ends: one member's part, as a table of transitions.

No I/O, no clock, no random source. :func:`advance` takes what happened and returns the member's next state and what is
to be done. ``docs/round.md`` explains it; the diagram there is generated from :data:`TABLE`. Members are named by their
position in the roster; who leads is the first in the roster that a member has not lost.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from p2pavg.consensus.choice import (
    Answers,
    Stuck,
    ballot_leader,
    choose,
    disputed,
    is_quorum,
    is_too_few,
    next_ballot,
)
from p2pavg.consensus.votes import (
    Accepted,
    Begin,
    Behind,
    Commit,
    Complete,
    Gather,
    Held,
    Left,
    Members,
    Promise,
    Trouble,
    Unknown,
    Vote,
)


class Phase(enum.Enum):
    """What a member is doing."""

    EXCHANGING = "exchanging"  # moves the parts of its attempt
    HOLDING = "holding"  # holds the whole result, and has said so to the ballot's leader
    GATHERING = "gathering"  # leads: asks who is there, and what they hold
    PROMISED = "promised"  # has answered; waits for what the leader begins
    ASTRAY = "astray"  # cannot go on: waits to hear how the round ended
    COMMITTED = "committed"
    FAILED = "failed"


FINAL = frozenset({Phase.COMMITTED, Phase.FAILED})
LIVE = frozenset(Phase) - FINAL

MAX_LEAP = 64  # ballots of one leader between two that a member hears of; each loss costs one or two


# ---------------------------------------------------------------------- what happens


@dataclass(frozen=True, slots=True)
class Completed:
    """This member has the whole result of an attempt."""

    attempt: int
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing can be exchanged with a member any more, for the rest of the round."""

    peer: int
    hostile: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Dead:
    """A lost member's process has ended, or knows nothing of this round."""

    peer: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A member said something."""

    sender: int
    vote: Vote


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The time is over, or the caller wants no result."""

    reason: str = ""


Event: TypeAlias = Completed | Lost | Dead | Heard | GivenUp


# ---------------------------------------------------------------------- what is to be done


@dataclass(frozen=True, slots=True)
class Tell:
    """Say something to a member."""

    peer: int
    vote: Vote


@dataclass(frozen=True, slots=True)
class Run:
    """Begin the exchange of an attempt; the one before it is over."""

    attempt: int
    members: Members


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send members the shares of reducers that are gone, as the same bytes."""

    attempt: int
    reducers: Members
    to: Members


@dataclass(frozen=True, slots=True)
class Drop:
    """Have nothing more to do with a member."""

    peer: int
    reason: str


Action: TypeAlias = Tell | Run | PassOn | Drop


# ---------------------------------------------------------------------- one member


@dataclass(slots=True)
class Member:
    """One member's state. :func:`advance` changes a copy; the fields' values are immutable."""

    me: int
    size: int
    holders: Members
    """Those that want the result; the others only reduce a share."""
    contributors: Members
    """Of the holders, those whose vectors are averaged."""
    minimum: int
    """Holders that an attempt needs for this member."""
    phase: Phase = Phase.EXCHANGING
    ballot: int = 0
    """The last that was begun here."""
    promised: int = 0
    attempt: int = 0
    members: Members = frozenset()
    """Of the attempt."""
    view: Members = frozenset()
    """Of the ballot."""
    must: bool = False
    """The ballot is about a result that an older one may have committed."""
    source: int = 0
    """Who passes on what others lack of the attempt's result."""
    complete: Complete | None = None
    digests: tuple[bytes, ...] = ()
    accepted: Accepted | None = None
    lost: Members = frozenset()
    hostile: Members = frozenset()
    dead: Members = frozenset()
    left: tuple[tuple[int, int], ...] = ()
    """Members that gave the round up, and the last ballot that each accepted."""
    held: tuple[tuple[int, tuple[bytes, ...]], ...] = ()
    """To its leader: who holds the result of this ballot."""
    promises: tuple[tuple[int, Promise], ...] = ()
    asked: tuple[tuple[int, int], ...] = ()
    """Ballots of members that this one does not see as the leader yet."""
    accusations: frozenset[tuple[int, int, bool]] = frozenset()
    """(accuser, accused, hostile), of all that told this member of trouble in this ballot, while it led. They count
    with the accusers' answers: else a member could say it has trouble, answer that it has none, and so on for ever."""
    trouble: bool = False
    """The ballot cannot commit as it was begun."""
    reason: str = ""
    """Of a failure."""
    outcome: Complete | None = None
    """What the group committed, as far as this member knows."""

    def __post_init__(self) -> None:
        if not self.members:
            self.members = self.view = frozenset(range(self.size))

    @property
    def undecided(self) -> bool:
        """Of a failure: the others may have committed a result that counts this member's contribution."""
        if self.phase is not Phase.FAILED or self.outcome is not None:
            return False
        others = frozenset(range(self.size)) - {self.me} - self.gone
        if self.accepted is not None:
            return is_quorum(others, self.size, self.gone | {self.me})
        if not self.must:
            # It was in the view of every ballot that could commit what counts it, and held nothing. Without it only
            # members that cannot ask that ballot's leader may take the result for committed.
            others -= {ballot_leader(self.ballot, self.size)}
        return is_quorum(others, self.size, self.gone)

    @property
    def presumed_used(self) -> bool:
        """Of a failure that is decided: a result that counts this member's contribution may stand all the same.

        This member held the result and told the ballot's leader so. The leader may have committed before it died, and
        its program may have used or saved what it got. A contribution counts at most once, so it is not used again,
        unless a member of the ballot's view says that it never held the result: then the leader cannot have committed.
        """
        if self.phase is not Phase.FAILED or self.outcome is not None or self.accepted is None:
            return False
        accepted, left = self.accepted, dict(self.left)
        held_by_all = all(
            left.get(position, accepted.ballot) >= accepted.ballot for position in accepted.view
        )
        leader_died = ballot_leader(accepted.ballot, self.size) in self.dead - left.keys()
        return self.me in accepted.members and leader_died and held_by_all

    @property
    def leader(self) -> int:
        """Whom this member follows: the first that it has not lost."""
        return next(position for position in range(self.size) if position not in self.lost)

    @property
    def gone(self) -> Members:
        """Members that will decide nothing any more."""
        return self.dead | {position for position, _ in self.left}

    def key(self) -> tuple[Any, ...]:
        """Equal for equal states."""
        return tuple(getattr(self, name) for name in _FIELDS)


_FIELDS = tuple(Member.__slots__)


class _Draft:
    """A member's next state, and what is to be done."""

    def __init__(self, member: Member) -> None:
        self.m = copy.copy(member)
        self.actions: list[Action] = []

    def tell(self, peer: int, vote: Vote) -> None:
        if peer not in self.m.lost and peer != self.m.me:
            self.actions.append(Tell(peer, vote))

    def tell_all(self, vote: Vote) -> None:
        for peer in range(self.m.size):
            self.tell(peer, vote)


# ---------------------------------------------------------------------- conditions


def _is_attempt(member: Member, event: Completed) -> bool:
    return event.attempt == member.attempt


def _not_outvoted(member: Member, event: Completed) -> bool:
    return event.attempt == member.attempt and member.promised == member.ballot


def _leads_ballot(member: Member, event: Heard) -> bool:
    vote = event.vote
    return (
        isinstance(vote, Held)
        and vote.ballot == member.ballot == member.promised
        and ballot_leader(vote.ballot, member.size) == member.me
        and event.sender in member.view
    )


def _answers_me(member: Member, event: Heard) -> bool:
    return isinstance(event.vote, Promise) and event.vote.ballot == member.promised


def _outpaces(member: Member, event: Heard) -> bool:
    return (
        isinstance(event.vote, Behind)
        and event.vote.promised >= member.promised
        and not _leaps(member, event.vote.promised)
    )


def _is_due(member: Member, event: Heard) -> bool:
    """Whether this is what was promised to be taken next."""
    vote = event.vote
    return (
        isinstance(vote, Begin)
        and vote.ballot == member.promised
        and event.sender == ballot_leader(vote.ballot, member.size)
        and member.me in vote.view
    )


def _is_impossible(member: Member, event: Heard) -> bool:
    """Return whether a ballot that is due contradicts what this member knows of the attempts that it was in."""
    vote = event.vote
    if not _is_due(member, event) or not isinstance(vote, Begin) or vote.attempt == vote.ballot:
        return False
    if _contradicts(member, vote.attempt, vote.members) or vote.lacking - member.holders:
        return True
    needs = member.me in vote.members & member.holders
    has = member.complete == Complete(vote.attempt, vote.members)
    if needs and not has and vote.attempt != member.attempt:
        return True  # it was never in that attempt, or has given up what it had of it
    # A member may have completed the attempt since it answered: then it is said to lack what it has by now.
    lacks, is_served = needs and not has, member.me in vote.lacking
    passes_on = bool(vote.lacking) and vote.source == member.me
    return (lacks and not is_served) or (is_served and not needs) or (passes_on and not has)


def _contradicts(member: Member, attempt: int, members: Members) -> bool:
    """Return whether an attempt has other members than this member knows. All are in the first."""
    known = frozenset(range(member.size)) if attempt == 0 else member.members
    return attempt in (0, member.attempt) and members != known


def _is_false_promise(member: Member, event: Heard) -> bool:
    """Return whether an answer contradicts what the leader knows, or itself."""
    vote = event.vote
    if not isinstance(vote, Promise) or vote.ballot != member.promised:
        return False
    if {member.me, event.sender} & vote.apart:
        return True  # it answers, so it has lost neither the leader nor itself
    accepted, complete = vote.accepted, vote.complete
    if complete is not None and (
        event.sender not in complete.members or _contradicts(member, complete.attempt, complete.members)
    ):
        return True
    return accepted is not None and (
        event.sender not in accepted.view
        or _contradicts(member, accepted.attempt, accepted.members)
        or (accepted.ballot == 0 and len(accepted.view) != member.size)
        or (accepted.ballot == member.ballot and accepted.view != member.view)
    )


def _is_false_commit(member: Member, event: Heard) -> bool:
    vote = event.vote
    return isinstance(vote, Commit) and _contradicts(member, vote.attempt, vote.members)


def _too_few(member: Member, event: Heard) -> bool:
    vote = event.vote
    return (
        _is_due(member, event)
        and isinstance(vote, Begin)
        and vote.attempt == vote.ballot
        and is_too_few(vote.members, member.holders, member.contributors, member.minimum)
    )


def _is_new(member: Member, event: Heard) -> bool:
    vote = event.vote
    return _is_due(member, event) and isinstance(vote, Begin) and vote.attempt == vote.ballot


def _is_held(member: Member, event: Heard) -> bool:
    vote = event.vote
    return _is_due(member, event) and isinstance(vote, Begin) and _holds(member, vote)


def _holds(member: Member, vote: Begin) -> bool:
    if member.me not in vote.members & member.holders:
        return True  # it needs nothing, and witnesses what was adopted
    return member.complete == Complete(vote.attempt, vote.members)


def _has_it(member: Member, event: Heard) -> bool:
    vote = event.vote
    if not isinstance(vote, Commit) or member.me not in vote.members:
        return False
    return member.me not in member.holders or member.complete == Complete(vote.attempt, vote.members)


def _lacks_it(member: Member, event: Heard) -> bool:
    return isinstance(event.vote, Commit) and member.me in event.vote.members & member.holders


def _concerns_me(member: Member, event: Heard) -> bool:
    vote = event.vote
    return (
        isinstance(vote, Trouble)
        and member.leader == member.me
        and event.sender in member.view
        and vote.peer in member.view
        and event.sender != vote.peer
        and not _has_accused(member, event.sender, vote.peer)
    )


def _is_of_another(member: Member, event: Heard) -> bool:
    vote = event.vote
    return isinstance(vote, Trouble) and vote.peer not in (event.sender, member.me)


def _has_accused(member: Member, accuser: int, accused: int) -> bool:
    return any(entry[:2] == (accuser, accused) for entry in member.accusations)


def _is_ahead(member: Member, event: Heard) -> bool:
    """Whether a member begins what this one has promised to another, or it never asked about."""
    return (
        isinstance(event.vote, Gather)
        and ballot_leader(event.vote.ballot, member.size) == event.sender
        and not _leaps(member, event.vote.ballot)
    )


def _leaps(member: Member, ballot: int) -> bool:
    """Whether nobody who follows the rules can have come so far: a liar could use up all ballots that there are."""
    return ballot > member.promised + MAX_LEAP * member.size


def _is_unknown(member: Member, event: Heard) -> bool:
    return member.outcome is None and not _is_false_commit(member, event)


# What follows by itself from the state, without anything happening.


def _must_lead(member: Member) -> bool:
    return member.trouble and member.leader == member.me


def _leader_asks(member: Member) -> bool:
    return any(sender == member.leader for sender, _ in member.asked)


def _leader_asks_anew(member: Member) -> bool:
    return any(sender == member.leader and ballot > member.promised for sender, ballot in member.asked)


def _all_answered(member: Member) -> bool:
    answered = {position for position, _ in member.promises}
    return answered >= frozenset(range(member.size)) - member.lost


def _decision(member: Member) -> Begin | Stuck:
    return choose(
        Answers(
            me=member.me,
            size=member.size,
            holders=member.holders,
            contributors=member.contributors,
            minimum=member.minimum,
            ballot=member.promised,
            promises=dict(member.promises),
            dead=member.dead,
            left=dict(member.left),
        )
    )


def _begins_anew(member: Member) -> bool:
    decision = _decision(member) if _all_answered(member) else None
    return isinstance(decision, Begin) and decision.attempt == decision.ballot


def _begins_held(member: Member) -> bool:
    decision = _decision(member) if _all_answered(member) else None
    return isinstance(decision, Begin) and decision.attempt != decision.ballot and _holds(member, decision)


def _begins_lacking(member: Member) -> bool:
    decision = _decision(member) if _all_answered(member) else None
    return isinstance(decision, Begin) and decision.attempt != decision.ballot


def _stuck_for_good(member: Member) -> bool:
    decision = _decision(member) if _all_answered(member) else None
    return isinstance(decision, Stuck) and decision.final


def _stuck(member: Member) -> bool:
    return _all_answered(member) and isinstance(_decision(member), Stuck)


def _may_go_on(member: Member) -> bool:
    """What was heard of others has made those that answer a quorum."""
    here = frozenset(range(member.size)) - member.lost
    return member.trouble and is_quorum(here, member.size, member.gone)


def _all_hold(member: Member) -> bool:
    return (
        member.promised == member.ballot
        and ballot_leader(member.ballot, member.size) == member.me
        and {position for position, _ in member.held} >= member.view
    )


def _dispute(member: Member) -> Members:
    if not _all_hold(member):
        return frozenset()
    source = None if member.source == member.me else member.source
    return disputed(dict(member.held), sorted(member.members), source)


def _at_odds(member: Member) -> bool:
    return bool(_dispute(member))


def _own_fault(member: Member) -> bool:
    return member.me in _dispute(member)


def _in_result(member: Member) -> bool:
    return _all_hold(member) and member.me in member.members


# ---------------------------------------------------------------------- what is done


def _note_completed(draft: _Draft, event: Completed) -> None:
    m = draft.m
    m.complete, m.digests = Complete(m.attempt, m.members), event.digests


def _accept(draft: _Draft, event: Completed | None = None) -> None:
    m = draft.m
    if event is not None:
        _note_completed(draft, event)
    m.accepted = Accepted(m.ballot, m.attempt, m.members, m.view, m.must)
    digests = m.digests if m.complete == Complete(m.attempt, m.members) else ()
    leader = ballot_leader(m.ballot, m.size)
    if leader == m.me:
        m.held = (*m.held, (m.me, digests))
    else:
        draft.tell(leader, Held(m.ballot, digests))


def _note_held(draft: _Draft, event: Heard) -> None:
    assert isinstance(event.vote, Held)
    others = tuple(entry for entry in draft.m.held if entry[0] != event.sender)
    draft.m.held = tuple(sorted((*others, (event.sender, event.vote.digests))))


def _lose(draft: _Draft, event: Lost) -> None:
    _lose_one(draft, event.peer, hostile=event.hostile, reason=event.reason)


def _lose_one(draft: _Draft, peer: int, *, hostile: bool, reason: str = "") -> None:
    m = draft.m
    if peer in m.lost or peer == m.me:
        return
    concerned = peer in m.view or peer == ballot_leader(m.promised, m.size)
    m.lost |= {peer}
    if hostile:
        m.hostile |= {peer}
    m.promises = tuple(entry for entry in m.promises if entry[0] != peer)
    m.asked = tuple(entry for entry in m.asked if entry[0] != peer)
    if m.phase is Phase.GATHERING or not concerned:
        m.promises = tuple(
            (position, _own_promise(m)) if position == m.me else (position, promise)
            for position, promise in m.promises
        )
        return
    m.trouble = True
    if m.leader != m.me:
        draft.tell(m.leader, Trouble(peer, hostile, reason))


def _note_dead(draft: _Draft, event: Dead) -> None:
    if event.peer in draft.m.lost:
        draft.m.dead |= {event.peer}
        draft.m.trouble |= draft.m.phase is Phase.ASTRAY


def _hear_unknown(draft: _Draft, event: Heard) -> None:
    _lose_one(draft, event.sender, hostile=False, reason="it knows nothing of this round")
    _note_dead(draft, Dead(event.sender))


def _hear_left(draft: _Draft, event: Heard) -> None:
    assert isinstance(event.vote, Left)
    known = dict(draft.m.left)
    known[event.sender] = event.vote.accepted
    draft.m.left = tuple(sorted(known.items()))
    _lose_one(draft, event.sender, hostile=False, reason=f"it gave the round up: {event.vote.reason}")
    draft.m.trouble |= draft.m.phase is Phase.ASTRAY


def _hear_gather(draft: _Draft, event: Heard) -> None:
    assert isinstance(event.vote, Gather)
    others = tuple(entry for entry in draft.m.asked if entry[0] != event.sender)
    draft.m.asked = tuple(sorted((*others, (event.sender, event.vote.ballot))))


def _own_promise(m: Member) -> Promise:
    return Promise(m.promised, m.attempt, m.accepted, m.complete, m.lost, m.hostile)


def _promise(draft: _Draft) -> None:
    m = draft.m
    asked = dict(m.asked)
    leader = m.leader
    m.promised = asked.pop(leader)
    m.asked, m.held, m.promises, m.trouble = tuple(sorted(asked.items())), (), (), False
    draft.tell(leader, _own_promise(m))


def _refuse(draft: _Draft) -> None:
    m = draft.m
    asked = dict(m.asked)
    leader = m.leader
    del asked[leader]
    m.asked = tuple(sorted(asked.items()))
    draft.tell(leader, Behind(m.promised))


def _gather(draft: _Draft) -> None:
    m = draft.m
    newest = max([m.promised, *(ballot for _, ballot in m.asked)])
    m.promised = next_ballot(m.me, m.size, newest)
    m.held, m.asked, m.trouble = (), (), False
    m.promises = ((m.me, _own_promise(m)),)
    draft.tell_all(Gather(m.promised))


def _gather_again(draft: _Draft, event: Heard) -> None:
    assert isinstance(event.vote, Behind)
    draft.m.promised = max(draft.m.promised, event.vote.promised)
    _gather(draft)


def _note_promise(draft: _Draft, event: Heard) -> None:
    assert isinstance(event.vote, Promise)
    others = tuple(entry for entry in draft.m.promises if entry[0] != event.sender)
    promise = _with_accusations(draft.m, event.sender, event.vote)
    draft.m.promises = tuple(sorted((*others, (event.sender, promise)), key=lambda entry: entry[0]))


def _with_accusations(m: Member, sender: int, promise: Promise) -> Promise:
    """An answer with all that its sender has said of others, before it and after it."""
    said = {(accused, hostile) for accuser, accused, hostile in m.accusations if accuser == sender}
    return replace(
        promise,
        apart=promise.apart | {accused for accused, _ in said},
        hostile=promise.hostile | {accused for accused, hostile in said if hostile},
    )


def _accuse(draft: _Draft, event: Heard) -> None:
    assert isinstance(event.vote, Trouble)
    draft.m.accusations |= {(event.sender, event.vote.peer, event.vote.hostile)}


def _hear_trouble(draft: _Draft, event: Heard) -> None:
    _accuse(draft, event)
    draft.m.trouble = True


def _add_trouble(draft: _Draft, event: Heard) -> None:
    """To an answer that was given before the trouble came."""
    _accuse(draft, event)
    draft.m.promises = tuple(
        (position, _with_accusations(draft.m, position, promise) if position == event.sender else promise)
        for position, promise in draft.m.promises
    )


def _drop_liar(draft: _Draft, event: Heard) -> None:
    reason = f"it said what cannot be: {type(event.vote).__name__}"
    _lose_one(draft, event.sender, hostile=True, reason=reason)
    draft.actions.append(Drop(event.sender, reason))


def _begin(draft: _Draft) -> None:
    """What this leader has decided."""
    m = draft.m
    decision = _decision(m)
    assert isinstance(decision, Begin)
    for position in sorted(decision.view):
        draft.tell(position, decision)
    _take_up(draft, decision)


def _take_up(draft: _Draft, begin: Begin) -> None:
    m = draft.m
    m.ballot, m.attempt, m.members = begin.ballot, begin.attempt, begin.members
    m.view, m.must, m.source = begin.view, begin.must, begin.source
    m.held, m.promises, m.trouble = (), (), bool(begin.view & m.lost)
    m.accusations = frozenset()  # of two that cannot exchange, one is in the view no more
    if m.accepted is not None and m.accepted.attempt != begin.attempt:
        m.accepted = None  # a quorum has answered, and it was not committed
    if begin.attempt == begin.ballot:
        m.complete, m.digests = None, ()
        draft.actions.append(Run(begin.attempt, begin.members))
    elif _holds(m, begin):
        _accept(draft)
    if begin.source == m.me and begin.lacking:
        draft.actions.append(PassOn(begin.attempt, begin.members - begin.view, begin.lacking))
    for peer in sorted(begin.view & m.lost):
        draft.tell(m.leader, Trouble(peer, peer in m.hostile, "it was lost before"))


def _hear_begin(draft: _Draft, event: Heard) -> None:
    assert isinstance(event.vote, Begin)
    _take_up(draft, event.vote)


def _commit(draft: _Draft, event: Heard | None = None) -> None:
    """Tell everybody, as whoever decided may have died before it told all."""
    m = draft.m
    vote = Commit(m.attempt, m.members) if event is None else event.vote
    assert isinstance(vote, Commit)
    m.outcome = Complete(vote.attempt, vote.members)
    draft.tell_all(vote)


def _left_out(draft: _Draft, event: Heard | None = None) -> None:
    draft.m.reason = "the others gave this peer up, and ended the round without it"
    _commit(draft, event)


def _too_late(draft: _Draft, event: Heard) -> None:
    draft.m.reason = "the others ended the round with this peer's contribution, but it has not their result"
    _commit(draft, event)


def _fail(draft: _Draft, event: GivenUp | None = None) -> None:
    m = draft.m
    m.reason = m.reason or (event.reason if event is not None else "")
    draft.tell_all(Left(-1 if m.accepted is None else m.accepted.ballot, m.reason))


def _fail_stuck(draft: _Draft) -> None:
    decision = _decision(draft.m)
    assert isinstance(decision, Stuck)
    draft.m.reason = decision.reason
    _fail(draft)
    draft.m.accepted = None  # a quorum has answered, and it was not committed


def _fail_too_few(draft: _Draft, _event: Heard) -> None:
    draft.m.reason = "fewer members are left than this peer's min_group_size"
    _fail(draft)
    draft.m.accepted = None  # a quorum has answered, and it was not committed


def _fail_at_odds(draft: _Draft) -> None:
    draft.m.reason = "this peer holds another result than the other members"
    _fail(draft)


def _go_astray(draft: _Draft) -> None:
    draft.m.promises = ()


def _settle_dispute(draft: _Draft) -> None:
    for peer in sorted(_dispute(draft.m)):
        _lose_one(draft, peer, hostile=True)
        draft.actions.append(
            Drop(peer, "it sent one result to one member and another to another, say their digests")
        )
    draft.m.held, draft.m.trouble = (), True


def _learn(draft: _Draft, event: Heard) -> None:
    assert isinstance(event.vote, Commit)
    draft.m.outcome = Complete(event.vote.attempt, event.vote.members)


def _note_gone(draft: _Draft, event: Heard) -> None:
    if isinstance(event.vote, Left):
        _hear_left(draft, event)
    else:
        _hear_unknown(draft, event)


def _tell_the_end(draft: _Draft, event: Heard) -> None:
    m = draft.m
    if m.outcome is not None:
        draft.tell(event.sender, Commit(m.outcome.attempt, m.outcome.members))
    else:
        draft.tell(event.sender, Left(-1 if m.accepted is None else m.accepted.ballot, m.reason))


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Row:
    """In one of ``phases``, when ``on`` happens and ``when`` holds: ``do``, and be in ``becomes`` (``None``: stay).

    Of several rows that fit, the first counts. ``on`` is an event or the kind of a vote that was heard; ``None`` is
    what follows from the state by itself, and is looked for after everything that happens.
    """

    phases: frozenset[Phase]
    on: tuple[type | None, ...]
    when: Callable[..., bool] | None
    do: Callable[..., None] | None
    becomes: Phase | None
    text: str


def _row(
    phases: Phase | Iterable[Phase],
    on: type | tuple[type, ...] | None,
    when: Callable[..., bool] | None,
    do: Callable[..., None] | None,
    becomes: Phase | None,
    text: str,
) -> Row:
    found = frozenset([phases]) if isinstance(phases, Phase) else frozenset(phases)
    return Row(found, on if isinstance(on, tuple) else (on,), when, do, becomes, text)


_E, _H, _G, _P, _A = Phase.EXCHANGING, Phase.HOLDING, Phase.GATHERING, Phase.PROMISED, Phase.ASTRAY

TABLE: tuple[Row, ...] = (
    # What happens to this member.
    _row(_E, Completed, _not_outvoted, _accept, _H, "has the whole result: tells the leader"),
    _row(LIVE, Completed, _is_attempt, _note_completed, None, "has the whole result"),
    _row(LIVE, Lost, None, _lose, None, "lost a member: tells the leader"),
    _row(LIVE, Dead, None, _note_dead, None, "a lost member is known to be dead"),
    _row(LIVE, GivenUp, None, _fail, Phase.FAILED, "out of time, or given up by the caller"),
    # What it hears.
    _row((_E, _H), Held, _leads_ballot, _note_held, None, "a member holds the result"),
    _row(LIVE, Commit, _is_false_commit, _drop_liar, None, "a commit that cannot be: gives up who says so"),
    _row(LIVE, Commit, _has_it, _commit, Phase.COMMITTED, "the group has committed"),
    _row(
        LIVE,
        Commit,
        _lacks_it,
        _too_late,
        Phase.FAILED,
        "committed with its contribution, but it lacks the result",
    ),
    _row(LIVE, Commit, None, _left_out, Phase.FAILED, "committed without this member"),
    _row(LIVE, Gather, _is_ahead, _hear_gather, None, "a member asks"),
    _row(_G, Promise, _is_false_promise, _drop_liar, None, "an answer that cannot be: gives up who says so"),
    _row(_G, Promise, _answers_me, _note_promise, None, "a member answers"),
    _row(_G, Behind, _outpaces, _gather_again, None, "a newer ballot was promised: asks with a newer one"),
    _row(_P, Begin, _is_impossible, _drop_liar, None, "a ballot that cannot be: gives its leader up"),
    _row(_P, Begin, _too_few, _fail_too_few, Phase.FAILED, "fewer are left than it needs"),
    _row(_P, Begin, _is_new, _hear_begin, _E, "a new attempt"),
    _row(_P, Begin, _is_held, _hear_begin, _H, "an older result, which it holds or need not hold"),
    _row(_P, Begin, _is_due, _hear_begin, _E, "an older result, of which it lacks some"),
    _row(_G, Trouble, _is_of_another, _add_trouble, None, "a member has trouble with another"),
    _row((_E, _H, _P, _A), Trouble, _concerns_me, _hear_trouble, None, "a member has trouble with another"),
    _row(LIVE, Left, None, _hear_left, None, "a member gave up"),
    _row(LIVE, Unknown, None, _hear_unknown, None, "a member has forgotten the round"),
    # What follows from the state.
    _row(LIVE, None, _leader_asks_anew, _promise, _P, "answers its leader"),
    _row(LIVE, None, _leader_asks, _refuse, None, "has promised a newer ballot, and says so"),
    _row((_E, _H), None, _own_fault, _fail_at_odds, Phase.FAILED, "holds another result than the others"),
    _row(
        (_E, _H),
        None,
        _at_odds,
        _settle_dispute,
        None,
        "a member sent different results to different members",
    ),
    _row((_E, _H), None, _in_result, _commit, Phase.COMMITTED, "everybody holds the result: commits"),
    _row((_E, _H), None, _all_hold, _left_out, Phase.FAILED, "everybody holds a result without this member"),
    _row((_E, _H, _P), None, _must_lead, _gather, _G, "leads, and the ballot cannot commit: asks"),
    _row(_G, None, _begins_anew, _begin, _E, "begins a new attempt with those that are left"),
    _row(_G, None, _begins_held, _begin, _H, "goes on with an older result, which it holds"),
    _row(_G, None, _begins_lacking, _begin, _E, "goes on with an older result, of which it lacks some"),
    _row(_G, None, _stuck_for_good, _fail_stuck, Phase.FAILED, "too few contributors are left"),
    _row(_G, None, _stuck, _go_astray, _A, "too few answer"),
    _row(_A, None, _may_go_on, _gather, _G, "others have died, and those that answer may decide"),
    # After the end.
    _row(Phase.FAILED, Commit, _is_unknown, _learn, None, "hears how the others ended"),
    _row(Phase.FAILED, (Left, Unknown), None, _note_gone, None, "hears that a member does not know either"),
    _row(FINAL, Gather, None, _tell_the_end, None, "says how it ended"),
    _row(FINAL, Trouble, None, _tell_the_end, None, "says how it ended"),
    _row(FINAL, Held, None, _tell_the_end, None, "says how it ended"),
)


_ENDS = (Commit, Left, Unknown)  # what a lost member, asked how the round ended, may still say


def advance(member: Member, event: Event) -> tuple[Member, list[Action]]:
    """What a member becomes when something happens, and what it does."""
    draft = _Draft(member)
    if isinstance(event, Heard) and event.sender in member.lost and type(event.vote) not in _ENDS:
        return member, []  # what it said before it was given up
    on = type(event.vote) if isinstance(event, Heard) else type(event)
    for row in _ROWS.get((member.phase, on), ()):
        if row.when is None or row.when(draft.m, event):
            if row.do is not None:
                row.do(draft, event)
            draft.m.phase = row.becomes or draft.m.phase
            _follow(draft)
            break
    return draft.m, draft.actions


def _follow(draft: _Draft) -> None:
    """What follows from the state by itself, until nothing does."""
    while (row := _next_row(draft.m)) is not None:
        if row.do is not None:
            row.do(draft)
        draft.m.phase = row.becomes or draft.m.phase


def _next_row(member: Member) -> Row | None:
    for row in _ROWS.get((member.phase, None), ()):
        if row.when is not None and row.when(member):
            return row
    return None


_ROWS: dict[tuple[Phase, type | None], list[Row]] = {}
for _each in TABLE:
    for _phase in _each.phases:
        for _on in _each.on:
            _ROWS.setdefault((_phase, _on), []).append(_each)
