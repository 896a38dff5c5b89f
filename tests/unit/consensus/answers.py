"""Promises and answers for tests of a leader's choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from p2pavg.consensus.choice import MemberAnswers
from p2pavg.consensus.votes import Accepted, Complete, Members, Promise

SIZE = 4
ALL: Members = frozenset(range(SIZE))
BALLOT = 9  # the ballot that the leader is about to begin


def some(*members: int) -> Members:
    return frozenset(members)


def accepted(
    ballot: int = 0, attempt: int = 0, members: Members = ALL, view: Members = ALL, *, must: bool = False
) -> Accepted:
    return Accepted(ballot, attempt, members, view, must)


def promise(
    *,
    attempt: int = 0,
    accepted: Accepted | None = None,
    complete: Complete | None = None,
    apart: Iterable[int] = (),
    hostile: Iterable[int] = (),
) -> Promise:
    hostile = frozenset(hostile)
    return Promise(BALLOT, attempt, accepted, complete, frozenset(apart) | hostile, hostile)


def holds(accepted: Accepted) -> Promise:
    """Return the promise of a member that has the whole result and has accepted it in a ballot."""
    return promise(
        attempt=accepted.attempt, accepted=accepted, complete=Complete(accepted.attempt, accepted.members)
    )


def answers(
    promises: Mapping[int, Promise],
    *,
    me: int | None = None,
    size: int = SIZE,
    holders: Members | None = None,
    contributors: Members | None = None,
    minimum: int = 2,
    dead: Members = frozenset(),
    left: Mapping[int, int] | None = None,
) -> MemberAnswers:
    """Return a leader's answers. The leader is ``me``, or else the first member that answers."""
    holders = frozenset(range(size)) if holders is None else holders
    return MemberAnswers(
        me=min(promises) if me is None else me,
        size=size,
        holders=holders,
        contributors=holders if contributors is None else contributors,
        minimum=minimum,
        ballot=BALLOT,
        promises=promises,
        dead=dead,
        left={} if left is None else left,
    )
