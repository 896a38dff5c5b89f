"""What :class:`~p2pavg.matchmaking.rules.Matchmaking` asks to be done, and what it is told to aim at. Plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from p2pavg.group.candidate import Candidate
from p2pavg.group.limits import MAX_WEIGHT
from p2pavg.group.participation import silent_members
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.messages import Ask, Message, Nudge


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer with whom a join stream is open."""

    peer_id: str
    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class Open:
    """Open a stream to a candidate and begin it with ``message`` (``Ask`` or ``Nudge``)."""

    candidate: Candidate
    message: Ask | Nudge
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Let go of the join stream with a peer, after what was sent on it.

    ``upward``: the stream on which this peer asked, not one on which it was asked.
    """

    peer_id: str
    reason: str
    upward: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """The attempt goes on, and its caller may be told how far it is."""

    ready_peers: int
    reason: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Nobody was there at the deadline; the attempt is over."""

    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """This attempt's deadline is long over: begin another one with a new deadline."""

    reason: str


@dataclass(frozen=True, slots=True)
class Formed:
    """The group stands."""

    roster: Roster
    reason: str


@dataclass(frozen=True, slots=True)
class Expect:
    """Streams of this group may arrive from now on; any other group that was expected is off."""

    group_id: bytes | None
    reason: str


Action: TypeAlias = Send | Open | Close | Report | GaveUp | Renew | Formed | Expect
Actions: TypeAlias = list[Action]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a peer wants of a group."""

    target: int
    minimum: int
    match_timeout: float  # seconds
    cut_shares: Callable[[Sequence[Candidate]], tuple[int, ...]]
    """From what the members signed: every member computes the same, so no leader can load one of them."""
    max_share: int | None = None  # elements that this peer reduces at most
    max_weight: float = MAX_WEIGHT  # of one contribution; a peer that announces more is not met
    choose_observers: Callable[[Sequence[Candidate]], frozenset[str]] | None = silent_members
    """Who of some members only observes, from what they signed alone; ``None`` takes what the leader says."""
