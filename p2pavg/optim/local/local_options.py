"""The options of local updates that all peers of a run share, checked. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.optim.base.recipe import Settings
from p2pavg.optim.base.state import checked_count, checked_period
from p2pavg.optim.local.fragments import Fragment, layout_digest
from p2pavg.optim.local.intervals import Interval, SyncEvery, checked_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Options of :class:`~p2pavg.optim.LocalUpdates`, which documents them."""

    sync_every: SyncEvery
    interval: Interval
    """Between two outer steps: that of a fragment, divided by the number of fragments."""
    fragments: int
    delay: int
    alpha: float | None
    proximal: float

    @property
    def overlaps(self) -> bool:
        """True if rounds run in the background."""
        return self.delay > 0

    def rules(self, names: Sequence[str], pieces: Sequence[Fragment]) -> Settings:
        """Return the settings for the recipe; those of options that are not used are left out."""
        rules: list[tuple[str, object]] = [("sync_every", self.sync_every), ("proximal", self.proximal)]
        if self.fragments > 1:
            rules += [("fragments", self.fragments), ("layout of fragments", layout_digest(names, pieces))]
        if self.delay:
            rules.append(("delay", self.delay))
        if self.alpha is not None:
            rules.append(("alpha", self.alpha))
        return tuple(rules)


def checked_options(
    *, sync_every: SyncEvery, fragments: int, delay: int, alpha: float | None, proximal: float
) -> LocalOptions:
    """Return the options; raise ValueError, with the argument's name, if one is out of range."""
    interval = checked_interval(sync_every).part(checked_count("fragments", fragments))
    delay = checked_period("delay", delay)
    if not interval.is_time and delay > interval.steps:
        raise ValueError(
            f"delay must be at most sync_every / fragments, {interval.steps} inner steps, got {delay}"
        )
    if alpha is not None and not (_is_number(alpha) and 0 <= alpha < 1):
        raise ValueError(f"alpha must be a number from 0 to below 1, or None, got {alpha!r}")
    if not (_is_number(proximal) and 0 <= proximal < math.inf):
        raise ValueError(f"proximal must be a number, 0 or more, got {proximal!r}")
    return LocalOptions(
        sync_every=sync_every,
        interval=interval,
        fragments=fragments,
        delay=delay,
        alpha=None if alpha is None else float(alpha),
        proximal=float(proximal),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
