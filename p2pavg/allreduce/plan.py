"""The plan of one attempt: its members, their shares and parts, and the values that this member holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.messages import Lane, LaneHeader
from p2pavg.allreduce.reduction import Ledger
from p2pavg.allreduce.reuse import START, Mark
from p2pavg.allreduce.values import Values
from p2pavg.group.roster import Roster
from p2pavg.group.shares import Part

STREAM_KINDS = (Lane.CONTRIBUTIONS, Lane.AVERAGES)
"""The streams that take the place of a direct lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """Everything that the sender and the receiver of one attempt share."""

    number: int
    context: RunContext
    group_id: bytes
    """Of the whole group, in the header of every lane."""
    members_digest: bytes
    """Of the attempt's members, in the header of every lane."""
    roster: Roster
    """The members that take part, with the shares that they have in this attempt."""
    me: str
    contributes: bool
    """True if this member has a vector to send."""
    ledger: Ledger
    values: Values
    position: Callable[[str], int]
    """Returns the position of a member in the roster of the whole group."""

    @property
    def own_parts(self) -> Sequence[Part]:
        """The parts of this member's share."""
        return self.ledger.parts[self.me]

    def header(self, lane: Lane, reducer: int = 0, begin: Mark = START) -> LaneHeader:
        """Return the header of a lane that this member opens."""
        return LaneHeader(self.group_id, lane, self.number, reducer, self.members_digest, begin)
