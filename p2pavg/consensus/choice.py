"""The leader's choice of a ballot's value from a quorum of promises: pure functions of positions in the roster.

This is Paxos (Lamport, "The Part-Time Parliament", 1998; "Paxos Made Simple", 2001) with one difference. A ballot
commits only when every member of its view holds the result. If one member of that view does not hold it, the ballot has
not committed. The leader may then begin a new attempt without the lost members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
class MemberAnswers:
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
    verify: bool = False
    """True if each member says only after its audits that it holds a result: a dead reducer answers none."""

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


def choose(answers: MemberAnswers) -> Begin | Stuck:
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

    The member with the most broken links is removed, until no link is broken. If several have as many, one that another
    one accuses of breaking the protocol is removed, or else the last of them in the roster. The leader never removes
    itself. So a liar that accuses one member costs the group that one, and one that accuses several costs itself only.
    """
    view = set(promises)
    while True:
        apart = [(a, b) for a, b in combinations(sorted(view), 2) if _apart(promises, a, b)]
        if not apart:
            return frozenset(view)
        troubles = {position: sum(position in pair for pair in apart) for position in view - {me}}
        accused = frozenset().union(*(promises[position].hostile for position in view))
        view.discard(max(troubles, key=lambda one: (troubles[one], one in accused, one)))


def _apart(promises: Mapping[int, Promise], a: int, b: int) -> bool:
    return b in promises[a].apart or a in promises[b].apart


def possibly_committed(answers: MemberAnswers) -> Accepted | None:
    """Return the newest result that a member that does not answer may have committed, or ``None``."""
    accepted = {position: _ballot(promise.accepted) for position, promise in answers.promises.items()}
    accepted |= {position: ballot for position, ballot in answers.left.items() if position not in accepted}
    found = {promise.accepted for promise in answers.promises.values() if promise.accepted is not None}
    for one in sorted(found, key=lambda accepted: -accepted.ballot):
        leader_answers = ballot_leader(one.ballot, answers.size) in accepted
        held = all(accepted[position] >= one.ballot for position in one.view if position in accepted)
        if (one.must or (held and not leader_answers)) and not is_contested(answers, one):
            return one
    return None


def is_contested(answers: MemberAnswers, result: Accepted | Complete) -> bool:
    """Return whether two members that answer hold different bits of one attempt.

    Each of them has to sign what is committed, so neither result was, and neither can be.
    """
    whole = Complete(result.attempt, result.members)
    held = {one.digest for one in answers.promises.values() if one.complete == whole and one.digest}
    return len(held) > 1


def _ballot(accepted: Accepted | None) -> int:
    return -1 if accepted is None else accepted.ballot


def _complete_without_the_dead(answers: MemberAnswers, view: Members) -> Complete | None:
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
        and not is_contested(answers, one)
        and not (answers.verify and any(answers.promises[p].complete != one for p in view & answers.holders))
    ]
    return max(usable, key=lambda one: one.attempt, default=None)


def _adopt(answers: MemberAnswers, view: Members, result: Complete, *, must: bool) -> Begin | Stuck:
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


def usual_digests(held: Iterable[tuple[bytes, ...]]) -> tuple[bytes, ...]:
    """Return the digests that most members name, or the largest of several that as many name.

    A leader needs this only if it holds no result itself, and so no signature of a reducer: an auxiliary, or a member
    that witnesses a result of an attempt without it.
    """
    counts = Counter(held)
    return max(counts, key=lambda digests: (counts[digests], digests), default=())


def share_in_dispute(own: Sequence[bytes], outputs: Sequence[bytes], other: Sequence[bytes]) -> int | None:
    """Return the first share of which another member names another digest than its reducer has signed.

    ``None`` if there is none: only shares without parts differ, or the other one names another number of them.
    """
    if len(own) != len(other) or len(own) != len(outputs):
        return None
    pairs = enumerate(zip(own, other, outputs, strict=True))
    return next((share for share, (mine, its, signed) in pairs if mine != its and signed), None)
