"""The leader's choice of a ballot's value from a quorum of promises: pure functions of positions in the roster.

This is Paxos (Lamport, "The Part-Time Parliament", 1998; "Paxos Made Simple", 2001) with one difference. A ballot
commits only when every member of its view holds the result. If one member of that view does not hold it, the ballot has
not committed. The leader may then begin a new attempt without the lost members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from p2pavg.consensus.votes import Accepted, Begin, Complete, Members, Promise


def ballot_leader(ballot: int, size: int) -> int:
    """Return the position of the member that leads a ballot."""
    return ballot % size


def next_ballot(me: int, size: int, above: int) -> int:
    """Return the first ballot that member ``me`` leads and that is newer than ``above``."""
    round_of = above // size
    ballot = round_of * size + me
    return ballot if ballot > above else ballot + size


def is_quorum(some: Members, size: int, gone: Members) -> bool:
    """Return whether ``some`` members are a quorum. No two disjoint sets are both quorums.

    A quorum is more than half of the members that are not gone, or exactly half of them including the first of them.
    ``gone`` are members that will never decide again, because their process has ended or they said so.

    Two members may know different sets of gone members, of sizes a and b. Their quorums have at least (n-a)/2 and
    (n-b)/2 members that are not gone. If the quorums are disjoint, both are exact halves, and only one of them
    includes the first member.
    """
    left = [position for position in range(size) if position not in gone]
    count = sum(position in some for position in left)
    return 2 * count > len(left) or (2 * count == len(left) and bool(left) and left[0] in some)


def is_too_few(members: Members, holders: Members, contributors: Members, minimum: int) -> bool:
    """Return whether an attempt has too few members that would hold its result, or no contributor."""
    return len(members & holders) < minimum or not members & contributors


@dataclass(frozen=True, slots=True)
class Answers:
    """The facts that a leader decides from, after every member that it can reach has answered."""

    me: int
    size: int
    holders: Members
    contributors: Members
    minimum: int
    """Number of holders that an attempt needs."""
    ballot: int
    promises: Mapping[int, Promise]
    """Promises of all members that the leader can reach, itself included."""
    dead: Members
    left: Mapping[int, int]
    """Members that gave up the round, with the last ballot that each accepted."""

    @property
    def gone(self) -> Members:
        """Members that will never decide again."""
        return self.dead | self.left.keys()


@dataclass(frozen=True, slots=True)
class Stuck:
    """The leader must not begin a ballot."""

    reason: str
    final: bool
    """True if no later message can change that."""


def choose(answers: Answers) -> Begin | Stuck:
    """Return the value of the new ballot, or the reason for which there is none."""
    view = choose_view(answers.me, answers.promises)
    if not is_quorum(view, answers.size, answers.gone):
        return Stuck("the members that answer are not a quorum; the others may go on without them", False)
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
    """Return members that can all exchange with one another.

    First, members that are accused of breaking the protocol are removed; only one accusation of each accuser counts.
    Then the member with the most broken links is removed, until no link is broken. If several have as many, the last
    of them in the roster is removed. The leader never removes itself. So a liar costs the group one honest member, or
    two that come after it.
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
    """Return the newest result that a member that does not answer may have committed, or ``None``."""
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
    """Return a result that a member holds and that counts all of the view and otherwise only dead members.

    A lost member that may be alive keeps its contribution, so no result that counts it may be committed.
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
        return Stuck("no member that answers holds a result that may have been committed", False)
    source = sources[0] if sources else answers.me
    return Begin(answers.ballot, result.attempt, result.members, view, source, lacking, must)


def disputed(
    digests: Mapping[int, Sequence[bytes]], reducers: Sequence[int], source: int | None = None
) -> Members:
    """Return the members that are at fault when members hold different results.

    A member whose digests differ from those of most others in several shares is itself at fault. If a member differs in
    one share only, the share's reducer is at fault: it sent different averages to different members. If that reducer
    is gone, another member passed its share on. Then that source is at fault, or, without a source, the member that
    differs.

    Args:
        digests: each holder's digests of the result, one per share.
        reducers: the reducer of each share, in the same order.
        source: the member that passed on shares, if it may be blamed.
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
