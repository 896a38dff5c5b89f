"""What can happen to a member of a group, and what it can be told to do: the input and the output of the agreement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from p2pavg.consensus.votes import Members, Vote

# ---------------------------------------------------------------------- events


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


# ---------------------------------------------------------------------- actions


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
