"""What the optimizers of a run have in common: the torch optimizer in them, and how far the run is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from p2pavg.blocking import Averager
from p2pavg.optim.lineage import Lineage
from p2pavg.optim.report import SPEED, StepReport
from p2pavg.optim.state import pack_lineage
from p2pavg.optim.together import Together


class PeerOptimizer:
    """Wraps a torch optimizer; the base of :class:`AveragedOptimizer` and :class:`LocalUpdates`.

    Args:
        inner: the optimizer.
        averager: of the run.
        scheduler: of ``inner``.
        on_update: called after every update, with its report.

    Raises:
        TypeError: ``inner`` needs a closure, or ``scheduler`` a metric.
        ValueError: ``inner`` has nothing to train.
    """

    _together: Together

    def __init__(
        self,
        inner: Optimizer,
        averager: Averager,
        *,
        scheduler: LRScheduler | None,
        on_update: Callable[[StepReport], None] | None,
    ) -> None:
        self.inner = inner
        self.scheduler = scheduler
        if isinstance(inner, torch.optim.LBFGS):
            raise TypeError("inner evaluates the loss several times a step, which cannot be averaged: LBFGS")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError("scheduler needs a metric at every step, and gets none: ReduceLROnPlateau")
        self._parameters = _trained_by(inner)
        if not self._parameters:
            raise ValueError("inner has no parameters that require a gradient")
        self._averager = averager
        self._on_update = on_update
        averager.clear()  # what an optimizer before this one accumulated

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of ``inner``."""
        return self.inner.param_groups

    @property
    def lineage(self) -> Lineage:
        """Which parameters the peers that this one averages with have in common."""
        return self._together.lineage

    @property
    def epoch(self) -> int:
        """Updates that these have taken."""
        return self._together.lineage.epoch

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of every torch optimizer: before each backward pass."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def leave(self) -> None:
        """This peer trains no more: the others do not wait for it. Until :meth:`step` is called again.

        Closing the averager does the same; this is for a peer that goes on to something else before that.
        """
        self._together.leave()

    def _check_parameters(self) -> None:
        """The inner optimizer would step others with this peer's gradients alone, and no two peers be alike."""
        now = _trained_by(self.inner)
        if len(now) != len(self._parameters) or any(
            a is not b for a, b in zip(now, self._parameters, strict=True)
        ):
            raise ValueError(
                "inner has other parameters that require a gradient than when this optimizer was made;"
                " make a new one on all peers"
            )

    def _step_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def _with_speed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        if SPEED in metrics:
            raise ValueError(f"metrics: {SPEED!r} is measured by the optimizer itself")
        return {**metrics, SPEED: self._together.samples_per_second}

    def _updated(self, report: StepReport) -> StepReport:
        """Tell who wants to know of an update."""
        if self._on_update is not None:
            self._on_update(report)
        return report

    def _load_inner(self, saved: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(saved["inner"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])

    def _saved(self) -> dict[str, Any]:
        return {
            "inner": self.inner.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "lineage": pack_lineage(self.lineage),
        }


def _trained_by(inner: Optimizer) -> list[torch.Tensor]:
    return [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
