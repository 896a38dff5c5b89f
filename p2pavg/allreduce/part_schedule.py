"""The order of parts on a lane, and what each part waits for. Pure: no I/O, no clock.

:mod:`p2pavg.allreduce.movers.moves` has what is done with each part.

* Contributions wait for nothing, so all of them arrive. Averages wait for contributions only. If an average went
  before a contribution, two members could wait for each other.
* **Back-pressure.** A reducer reads at most ``MAX_WAITING_PARTS`` parts of a contributor that are not averaged yet.
  What is ahead of the slowest contributor waits with its sender, not in this process. Meanwhile the contributor owes
  nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeAlias

from p2pavg.allreduce.messages import Lane
from p2pavg.group.shares import SharePart

# Parts of each contributor that may wait for the slowest one: 8 MiB of fp32 at most. With the part that is being read,
# and that part decoded, this is all that a peer can make this process hold beside its own vectors.
MAX_WAITING_PARTS = 4


@dataclass(frozen=True, slots=True)
class Step:
    """One part that is to be moved."""

    kind: Lane
    """``CONTRIBUTIONS`` or ``AVERAGES``."""
    part: SharePart
    after: int | None
    """Number, as in :meth:`~p2pavg.allreduce.values.AttemptData.is_ready`, of what must be ready before: one of this
    member's tasks, or an average to pass on; ``None`` if the part waits for nothing."""
    last: bool
    """True for the last contribution, and for the last average of each reducer: a signature follows it."""
    ends: bool
    """True for the last part on the lane."""
    reducer: str = ""
    """Of an average: the member that has made it."""


Average: TypeAlias = tuple[str, SharePart, int | None]
"""An average on a lane: the member that has made it, the part of that one's share, and what it waits for."""


def outgoing(
    contributions: Sequence[SharePart], averages: Sequence[Average], sums_at: int | None = None
) -> list[Step]:
    """Return the order in which a member sends its contributions to another one's tasks, and averages.

    Args:
        sums_at: the contributions are means of this member's site: number of its task that makes the first of them.
            ``None``: they are its own values, and wait for nothing.
    """
    after = [None if sums_at is None else sums_at + index for index in range(len(contributions))]
    return _steps(zip(contributions, after, strict=True), averages)


def incoming(
    contributions: Sequence[SharePart], averages: Sequence[tuple[str, SharePart]], skipped: int = 0
) -> list[Step]:
    """Return the order in which a member receives contributions to its tasks, and averages of reducers.

    Args:
        skipped: number of contributions that came in an earlier attempt.
    """
    ahead = [None] * MAX_WAITING_PARTS + [part.index for part in contributions]
    waits = list(zip(contributions, ahead, strict=False))[skipped:]
    return _steps(waits, [(reducer, part, None) for reducer, part in averages])


def _steps(contributions: Iterable[tuple[SharePart, int | None]], averages: Iterable[Average]) -> list[Step]:
    found = [
        *(Step(Lane.CONTRIBUTIONS, part, after, False, False) for part, after in contributions),
        *(Step(Lane.AVERAGES, part, after, False, False, reducer) for reducer, part, after in averages),
    ]
    # A relay passes on the shares of several reducers, one after the other. Each of them has signed its own.
    for index, (step, following) in enumerate(zip_longest(found, found[1:])):
        if following is None or (step.kind, step.reducer) != (following.kind, following.reducer):
            found[index] = replace(step, last=True)
    if found:
        found[-1] = replace(found[-1], ends=True)
    return found
