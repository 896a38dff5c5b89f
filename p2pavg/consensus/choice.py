"""What a leader concludes from the answers to its question. Plain functions of positions in the roster.

After Paxos (Lamport, "The Part-Time Parliament", 1998; "Paxos Made Simple", 2001), with one difference: a ballot
commits only when every member of its view holds the result, so one member of that view that does not is proof that the
ballot has not committed, and the leader is free to begin again without whoever was lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from p2pavg.consensus.votes import Accepted, Begin, Complete, Members, Promise


def ballot_leader(ballot: int, size: int) -> int:
    """Whose ballot it is."""
    return ballot % size


def next_ballot(me: int, size: int, above: int) -> int:
    """The first ballot of a member that is newer than another."""
    round_of = above // size
    ballot = round_of * size + me
    return ballot if ballot > above else ballot + size


def is_quorum(some: Members, size: int, gone: Members) -> bool:
    """Whether these may decide: no two disjoint sets are both quorums.

    More than half of the members that are not gone, or just half with the first of them. ``gone`` are members that
    will never decide anything any more, because their process has ended or they said so. Two members may know of
    different ones to be gone: disjoint sets of at least (n-a)/2 and (n-b)/2 members, both among those that are not
    gone, can only be two halves, of which one has the first.
    """
    left = [position for position in range(size) if position not in gone]
    count = sum(position in some for position in left)
    return 2 * count > len(left) or (2 * count == len(left) and bool(left) and left[0] in some)


def is_too_few(members: Members, holders: Members, contributors: Members, minimum: int) -> bool:
    """Whether an attempt among these is worth nothing: too few would hold its result, or nobody is in it."""
    return len(members & holders) < minimum or not members & contributors


@dataclass(frozen=True, slots=True)
class Answers:
    """What a leader knows when everybody whom it can reach has answered."""

    me: int
    size: int
    holders: Members
    contributors: Members
    minimum: int
    """Holders that an attempt needs."""
    ballot: int
    promises: Mapping[int, Promise]
    """Of everybody whom the leader can reach, itself included."""
    dead: Members
    left: Mapping[int, int]
    """Members that gave the round up, and the last ballot that each accepted."""

    @property
    def gone(self) -> Members:
        """Who decides nothing any more."""
        return self.dead | self.left.keys()


@dataclass(frozen=True, slots=True)
class Stuck:
    """The leader must not begin anything."""

    reason: str
    final: bool
    """Nothing that is still to be heard can change that."""


def choose(answers: Answers) -> Begin | Stuck:
    """What the new ballot is about."""
    view = choose_view(answers.me, answers.promises)
    if not is_quorum(view, answers.size, answers.gone):
        return Stuck(
            "too few of the members answer to be sure that the others do not go on without them", False
        )
    must = possibly_committed(answers)
    if must is not None:
        return _adopt(answers, view, Complete(must.attempt, must.members), must=True)
    free = _complete_without_the_dead(answers, view)
    if free is not None:
        return _adopt(answers, view, free, must=False)
    if is_too_few(view, answers.holders, answers.contributors, answers.minimum):
        left, minimum = len(view & answers.holders), answers.minimum
        if left < minimum:
            return Stuck(f"{left} of the members are left, at least {minimum} are needed", True)
        return Stuck("none of the members that are left has a contribution", True)
    return Begin(answers.ballot, answers.ballot, view, view, answers.me, frozenset())


def choose_view(me: int, promises: Mapping[int, Promise]) -> Members:
    """The members that can all exchange with one another: who broke the protocol goes, then who has most troubles.

    Of one accuser one accusation counts. Of two members that cannot exchange, the later one in the roster goes. So a
    liar costs the group one honest member, or two that come after it.
    """
    view = set(promises)
    for position in sorted(promises):
        if position in view:
            view -= set(sorted(promises[position].hostile - {me})[:1])
    while True:
        apart = [(a, b) for a, b in combinations(sorted(view), 2) if _apart(promises, a, b)]
        if not apart:
            return frozenset(view)
        troubles = {position: sum(position in pair for pair in apart) for position in view - {me}}
        view.discard(max(troubles, key=lambda position: (troubles[position], position)))


def _apart(promises: Mapping[int, Promise], a: int, b: int) -> bool:
    return b in promises[a].apart or a in promises[b].apart


def possibly_committed(answers: Answers) -> Accepted | None:
    """The newest result that a member that does not answer may have committed, or ``None``."""
    accepted = {position: _ballot(promise.accepted) for position, promise in answers.promises.items()}
    accepted |= {position: ballot for position, ballot in answers.left.items() if position not in accepted}
    found = {promise.accepted for promise in answers.promises.values() if promise.accepted is not None}
    for one in sorted(found, key=lambda accepted: -accepted.ballot):
        leader_answers = ballot_leader(one.ballot, answers.size) in accepted
        held = all(accepted[position] >= one.ballot for position in one.view if position in accepted)
        if one.must or (held and not leader_answers):
            return one
    return None


def _ballot(accepted: Accepted | None) -> int:
    return -1 if accepted is None else accepted.ballot


def _complete_without_the_dead(answers: Answers, view: Members) -> Complete | None:
    """A result that somebody holds, with everybody who answers in it, and else only members that are dead.

    One that was given up and may live keeps its contribution, so no result that counts it may be committed.
    """
    complete = {
        promise.complete
        for position, promise in answers.promises.items()
        if promise.complete is not None and position in view & answers.holders
    }
    usable = [
        one
        for one in complete
        if view <= one.members
        and one.members - view <= answers.dead
        and all(answers.promises[position].attempt == one.attempt for position in view)
    ]
    return max(usable, key=lambda one: one.attempt, default=None)


def _adopt(answers: Answers, view: Members, result: Complete, *, must: bool) -> Begin | Stuck:
    sources = [
        position
        for position in sorted(view & answers.holders)
        if answers.promises[position].complete == result
    ]
    lacking = frozenset(
        position
        for position in view & result.members & answers.holders
        if answers.promises[position].complete != result
    )
    moved_on = [p for p in lacking if answers.promises[p].attempt != result.attempt]
    if moved_on or (lacking and not sources):
        return Stuck("a result that may have been committed is held by nobody who answers", False)
    source = sources[0] if sources else answers.me
    return Begin(answers.ballot, result.attempt, result.members, view, source, lacking, must)


def disputed(
    digests: Mapping[int, Sequence[bytes]], reducers: Sequence[int], source: int | None = None
) -> Members:
    """Who is at fault when members hold different results.

    A member whose digests differ from most others' in several shares is itself odd; a share on which members differ
    otherwise is its reducer's fault, who sent one thing to one and another to the other. Where the reducer is gone, its
    share was passed on: then it is the fault of who did that, or of the odd member.

    Args:
        digests: of each member that holds the result, one a share.
        reducers: whose share each digest is of.
        source: who has passed on shares, if it may be blamed.
    """
    votes = {member: tuple(found) for member, found in digests.items() if found}
    if len(set(votes.values())) <= 1:
        return frozenset()
    if any(len(found) != len(reducers) for found in votes.values()):
        return frozenset(member for member, found in votes.items() if len(found) != len(reducers))
    columns = list(zip(*votes.values(), strict=True))
    usual = [max(set(column), key=lambda digest: (column.count(digest), digest)) for column in columns]
    odd = {
        member: [share for share, digest in enumerate(found) if digest != usual[share]]
        for member, found in votes.items()
    }
    strange = frozenset(member for member, shares in odd.items() if len(shares) > 1)
    blamed = set()
    for member, shares in odd.items():
        if member not in strange:
            others = member if source is None else source
            blamed |= {reducers[share] if reducers[share] in digests else others for share in shares}
    return strange | blamed
