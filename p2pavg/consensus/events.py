"""Events and actions: the input and the output of the agreement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from p2pavg.base.codes import FailedCode
from p2pavg.consensus.votes import Members, Vote

# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Completed:
    """This member has the whole result of an attempt."""

    attempt: int
    digests: tuple[bytes, ...] = ()
    """One per share; a member that needs no result has none."""
    signature: bytes = b""
    """This member's signature that it holds the result."""
    outputs: tuple[bytes, ...] = ()
    """The signature of each share by its reducer; empty bytes for a share without parts.

    Each of them was verified when the share came.
    """


@dataclass(frozen=True, slots=True)
class Lost:
    """This member can exchange nothing more with another one in this round."""

    peer: int
    hostile: bool = False
    reason: str = ""
    reachable: bool = False
    """True if votes still arrive: it is left out of the next attempt, and is asked like the others."""


@dataclass(frozen=True, slots=True)
class Dead:
    """The process of a lost member has ended, or the process does not know this round."""

    peer: int


@dataclass(frozen=True, slots=True)
class VoteHeard:
    """A vote of another member arrived."""

    sender: int
    vote: Vote


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The round has timed out, or the caller cancelled it."""

    reason: str = ""
    code: FailedCode = FailedCode.OTHER


Event: TypeAlias = Completed | Lost | Dead | VoteHeard | GivenUp


# ---------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a vote to a member."""

    peer: int
    vote: Vote


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """Begin the exchange of an attempt, and end the previous one."""

    attempt: int
    members: Members


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send the shares of reducers that are gone to other members, as the same bytes."""

    attempt: int
    reducers: Members
    to: Members


@dataclass(frozen=True, slots=True)
class Drop:
    """Close all streams with a member, and ignore it."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exclude:
    """Note why a member that can be reached is left out of the next attempt."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class Readmit:
    """Forget why a member was left out: it has proven that another one lied."""

    peer: int


Action: TypeAlias = Tell | RunAttempt | PassOn | Drop | Exclude | Readmit
