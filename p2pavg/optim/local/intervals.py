"""Intervals between two outer steps, in inner steps or in seconds. No I/O, no clock: calls are given ``now``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from p2pavg.optim.base.state import checked_count

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
MAX_INTERVAL_SECONDS = 30 * 24 * 3600.0

SyncEvery = int | str
"""A number of inner steps, or a time such as ``"30s"``, ``"5min"`` or ``"1h"``."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval: one of the two is above 0."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def is_time(self) -> bool:
        """True if it is in seconds."""
        return self.seconds > 0

    def part(self, count: int) -> Interval:
        """Return this interval divided by a number of fragments.

        Raises:
            ValueError: it is a number of steps that is no multiple of ``count``.
        """
        if self.steps % count:
            raise ValueError(
                f"sync_every must be a multiple of fragments: {self.steps} steps cannot be divided by {count}"
            )
        return Interval(self.steps // count, self.seconds / count)


def checked_interval(value: SyncEvery) -> Interval:
    """Return the interval that ``sync_every`` names; raise ValueError for anything else."""
    if not isinstance(value, str):
        return Interval(steps=checked_count("sync_every", value))
    found = _TIME.fullmatch(value)
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= MAX_INTERVAL_SECONDS:
        raise ValueError(
            f'sync_every must be a number of steps, or a time such as "30s", "5min" or "1h", got {value!r}'
        )
    return Interval(seconds=seconds)


class Boundaries:
    """Tells when this peer's next outer step is due.

    Args:
        interval: between two outer steps.
    """

    def __init__(self, interval: Interval) -> None:
        self.interval = interval
        self.steps = 0
        """Inner steps since the last boundary."""
        self._since: float | None = None
        """Time of the last boundary; of the first inner step before there was one."""
        self._again = False

    def stepped(self, now: float) -> None:
        """Note an inner step."""
        self.steps += 1
        if self._since is None:
            self._since = now

    def is_due(self, now: float) -> bool:
        """Return whether an outer step is due."""
        if self._again and self.steps > 0:
            return True
        if not self.interval.is_time:
            return self.steps >= self.interval.steps
        return self.steps > 0 and self._since is not None and now >= self._since + self.interval.seconds

    def passed(self, now: float, *, steps: int = 0) -> None:
        """Begin the next interval.

        Args:
            now: moment of the boundary, which all peers of a round should agree on.
            steps: inner steps since then.
        """
        self.steps, self._since, self._again = steps, now, False

    def again(self) -> None:
        """Note that the last boundary's round found no group: the next inner step is a boundary too."""
        self._again = True

    def align(self, moment: float) -> None:
        """Note the moment at which the group of the last boundary was complete: the same for all its members.

        Peers whose batches take different times would otherwise drift apart.
        """
        self._since = moment
