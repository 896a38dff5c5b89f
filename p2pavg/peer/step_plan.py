"""The arguments of an averager's ``step``, checked. No I/O, no clock."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.base.limits import MAX_GROUP_SIZE, MAX_STATE_BYTES
from p2pavg.group.places.gossip import SearchPlace, SearchStage, stages_at
from p2pavg.group.topology import Gossip
from p2pavg.runs.config import AveragingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The arguments of ``step`` for the round that it starts."""

    state: bytes
    observes: bool
    target: int | None
    contributors: int
    stages: tuple[SearchStage, ...] | None = None
    """Where the group is looked for; ``None``: where the run's topology says."""


def checked_plan(
    state: bytes,
    observe: bool,
    group_size: int | None,
    contributors: int,
    config: AveragingConfig,
    meeting: SearchPlace | Sequence[SearchStage] | None = None,
) -> StepPlan:
    """Return the plan of a round.

    Args:
        config: of the averager.

    Raises:
        ValueError: an argument is out of range.
    """
    if not isinstance(state, bytes) or len(state) > MAX_STATE_BYTES:
        raise ValueError(f"state must be at most {MAX_STATE_BYTES} bytes, got {state!r}")
    least, topology = config.min_group_size, config.aggregation.topology
    whole = isinstance(group_size, int) and not isinstance(group_size, bool)
    if group_size is not None and not (whole and least <= group_size <= MAX_GROUP_SIZE):
        raise ValueError(
            f"group_size must be None or a whole number from {least} to {MAX_GROUP_SIZE}, got {group_size!r}"
        )
    if isinstance(topology, Gossip) and group_size not in (None, topology.group_size):
        raise ValueError(
            f"group_size must be None or {topology.group_size} with the topology {topology.text!r}, got {group_size}"
        )
    if not (isinstance(contributors, int) and 0 <= contributors <= MAX_GROUP_SIZE):
        raise ValueError(f"contributors must be from 0 to {MAX_GROUP_SIZE}, got {contributors!r}")
    return StepPlan(
        state=state,
        observes=observe,
        target=group_size,
        contributors=contributors,
        stages=None if meeting is None else stages_at(meeting),
    )


def checked_wait(wait: float | None) -> float:
    """Return the seconds that ``step`` may wait; infinity for ``None``.

    Raises:
        ValueError: ``wait`` is negative or not a number.
    """
    if wait is None:
        return math.inf
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not wait >= 0:
        raise ValueError(f"wait must be None or a number of seconds, 0 or more, got {wait!r}")
    return float(min(wait, sys.float_info.max))
