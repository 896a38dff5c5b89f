"""One member of a group, as the agreement sees it: its phase and everything that it knows."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from p2pavg.consensus.choice import ballot_leader, is_quorum
from p2pavg.consensus.votes import Accepted, Complete, Members, Promise


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
            leader = ballot_leader(self.ballot, self.size)
            if leader == self.me:
                # Members that lost it may have taken the result for committed before they heard that it gave up. They
                # count it as gone by now, so fewer of them are a quorum.
                return is_quorum(others, self.size, self.gone | {self.me})
            others -= {leader}
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
