"""The schedule of a peer's inner steps, for a peer that joins a run."""

from __future__ import annotations

import logging
import warnings

from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger(__name__)

MAX_SCHEDULE_STEPS = 10**7
"""Steps that an inner schedule is advanced at once, in about a minute. A state from a stranger may claim any update."""


def advance(scheduler: LRScheduler | None, steps: int) -> None:
    """Bring a schedule to the place of a peer that has taken this many inner steps, if it is behind it."""
    if scheduler is None:
        return
    behind = steps - scheduler.last_epoch
    if behind > MAX_SCHEDULE_STEPS:
        logger.warning("the inner schedule stays where it is: the run is %d steps ahead of it", behind)
        return
    with warnings.catch_warnings():  # torch warns of a schedule that goes on before the first step
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(behind):
            scheduler.step()
