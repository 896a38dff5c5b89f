"""Actions and settings of :class:`~p2pavg.matchmaking.rules.Matchmaking`, as plain values. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from p2pavg.base.limits import MAX_WEIGHT
from p2pavg.base.result import NoPeersCode
from p2pavg.group.candidate import Candidate
from p2pavg.group.participation import silent_members
from p2pavg.group.roster import Roster, ShareCutter
from p2pavg.matchmaking.messages import JoinRequest, Message, Nudge


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer over the open join stream."""

    peer_id: str
    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class Open:
    """Open a stream to a candidate and begin it with ``message`` (``JoinRequest`` or ``Nudge``)."""

    candidate: Candidate
    message: JoinRequest | Nudge
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Close the join stream with a peer, after the messages that were queued on it.

    ``upward``: close the stream on which this peer asked, not the one on which it was asked.
    """

    peer_id: str
    reason: str
    upward: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Report progress to the caller; the attempt goes on."""

    ready_peers: int
    reason: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The attempt has ended without a group."""

    reason: str
    code: NoPeersCode = NoPeersCode.NO_GROUP


@dataclass(frozen=True, slots=True)
class Renew:
    """Begin a new attempt: the deadline of this one is long over, or this peer is reached in another way now."""

    reason: str
    deadline: float | None = None
    """Deadline of the new attempt (wall clock, seconds); ``None``: a whole match timeout from now."""


@dataclass(frozen=True, slots=True)
class Formed:
    """The group is committed."""

    roster: Roster
    reason: str


@dataclass(frozen=True, slots=True)
class Expect:
    """Accept streams of this group from now on, and of no other; ``None``: of no group."""

    group_id: bytes | None
    reason: str


Action: TypeAlias = Send | Open | Close | Report | GaveUp | Renew | Formed | Expect
Actions: TypeAlias = list[Action]


Refuses: TypeAlias = Callable[[Candidate, float], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Requirements of a peer for its group."""

    target: int
    """Members that want the result, with which a group is complete."""
    contributors: int = 0
    """Members with a weight above 0 without which a group is not complete. So an observer that came unexpected takes no
    contributor's place."""
    expected: frozenset[str] = frozenset()
    """Ids of the other peers that the group is to be with, if they are known. A contributor that is not among them
    takes the place of none of them: the group waits for them as it would without it."""
    minimum: int
    match_timeout: float  # seconds
    cutter: ShareCutter
    max_share: int | None = None  # largest number of elements that this peer reduces
    max_weight: float = MAX_WEIGHT  # largest weight of a contribution; peers that announce more are refused
    refuses: Refuses | None = None
    """Returns the reason for which a candidate is no member of the run at this time (wall clock, seconds), or ``None``.

    ``None``: the run has no authority, and admits all candidates.
    """
    choose_observers: Callable[[Sequence[Candidate]], frozenset[str]] | None = silent_members
    """Returns the ids of the members that only observe, from their signed records only.

    ``None``: take the leader's choice.
    """
