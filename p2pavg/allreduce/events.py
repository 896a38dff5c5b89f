"""Events of an attempt, which its exchange is told on the event loop. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from p2pavg.base.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class ResultComplete:
    """This member has the whole result. There is one digest a share, in the order of the roster."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LaneFailed:
    """A lane to or from a member broke, and no other one takes its place."""

    peer_id: str
    reason: str
    hostile: bool


@dataclass(frozen=True, slots=True)
class DirectLaneBroke:
    """A direct lane to or from a member broke. The lane may be begun again, or the member may be gone."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class BytesArrived:
    """Bytes of a member came: a sign of life."""

    peer_id: str
    count: int


@dataclass(frozen=True, slots=True)
class ContributionOwed:
    """A member's contribution is waited for, or no longer."""

    peer_id: str
    owed: bool


AttemptEvent: TypeAlias = ResultComplete | LaneFailed | DirectLaneBroke | BytesArrived | ContributionOwed


# Faults in what a member contributes to a part.


class BadContributionError(RemoteProtocolError):
    """A member's part cannot be averaged."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(f"{peer_id} sent {reason}")
        self.peer_id = peer_id


class UndecodableError(BadContributionError):
    """A member's part does not decode."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(peer_id, f"a part that does not decode: {reason}")


class FalseNormError(BadContributionError):
    """A member's values are longer than it signed."""

    def __init__(self, peer_id: str, length: float, signed: float) -> None:
        super().__init__(
            peer_id, f"values of a norm of {length:g} or more, after it signed a norm of {signed:g}"
        )
