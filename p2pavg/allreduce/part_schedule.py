"""The order of parts on a lane, and what each part waits for. Pure: no I/O, no clock.

Two drivers carry this out: :mod:`p2pavg.allreduce.lane_driver` in a thread, on a direct lane, and
:mod:`p2pavg.allreduce.sender` and :mod:`p2pavg.allreduce.receiver` on the event loop, on streams.

* Contributions wait for nothing, so all of them arrive. Averages wait for contributions only. If an average went
  before a contribution, two members could wait for each other.
* **Back-pressure.** A reducer reads at most ``MAX_WAITING_PARTS`` parts of a contributor that are not averaged yet.
  What is ahead of the slowest contributor waits with its sender, not in this process. Meanwhile the contributor owes
  nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.allreduce.messages import Lane
from p2pavg.group.shares import Part

# Parts of each contributor that may wait for the slowest one: 8 MiB of fp32 at most. With the part that is being read,
# and that part decoded, this is all that a peer can make this process hold beside its own vectors.
MAX_WAITING_PARTS = 4


@dataclass(frozen=True, slots=True)
class Step:
    """One part that is to be moved."""

    kind: Lane
    """``CONTRIBUTIONS`` or ``AVERAGES``."""
    part: Part
    after: int | None
    """Index of the part of this member's own share that must be averaged before; ``None`` if it waits for nothing."""
    last: bool
    """True for the last part of its kind: the sender owes none of this kind after it."""
    ends: bool
    """True for the last part on the lane."""


def outgoing(contributions: Sequence[Part], averages: Sequence[Part]) -> list[Step]:
    """Return the order in which a member sends its contributions to a reducer, and the averages of its own share."""
    return _steps(contributions, [None] * len(contributions), averages, [part.index for part in averages])


def incoming(contributions: Sequence[Part], averages: Sequence[Part]) -> list[Step]:
    """Return the order in which a member receives contributions to its own share, and the averages of a reducer's."""
    ahead = [part.index - MAX_WAITING_PARTS for part in contributions]
    after = [index if index >= 0 else None for index in ahead]
    return _steps(contributions, after, averages, [None] * len(averages))


def _steps(
    contributions: Sequence[Part],
    contributions_after: Sequence[int | None],
    averages: Sequence[Part],
    averages_after: Sequence[int | None],
) -> list[Step]:
    steps = [
        Step(kind, part, after, last=position == len(parts) - 1, ends=False)
        for kind, parts, waits in (
            (Lane.CONTRIBUTIONS, contributions, contributions_after),
            (Lane.AVERAGES, averages, averages_after),
        )
        for position, (part, after) in enumerate(zip(parts, waits, strict=True))
    ]
    if steps:
        end = steps[-1]
        steps[-1] = Step(end.kind, end.part, end.after, end.last, ends=True)
    return steps
