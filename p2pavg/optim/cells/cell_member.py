"""A member of a cell: takes the cell's updates, and mixes the cell's parameters with those of the other cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.cells.between import CrossCellAverager
from p2pavg.optim.cells.cell_choice import CellBoard
from p2pavg.optim.cells.cells import Cells
from p2pavg.optim.coordination.progress import Average
from p2pavg.optim.large_batch.averaged import AveragedOptimizer

MIXED = "mixed"
"""Metric of a contribution to a mix: the part of all values whose outer average the member has."""


class CellMember(AveragedOptimizer):
    """An :class:`AveragedOptimizer` among the members of one cell, with a mix after every ``cells.every`` updates.

    Made by :class:`~p2pavg.optim.CellOptimizer`, which says what holds.

    Args:
        averager: averager of the cell's run.
        base: averager of the whole run.
        cells: the run's settings.
        cell: this peer's cell.
        board: the news of all cells.
        target_batch_size, options: for :class:`AveragedOptimizer`.
    """

    # Each cell has updates of its own, and a mix counts members.
    _counts_samples = False

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        averager: Averager,
        *,
        base: Averager,
        cells: Cells,
        cell: int,
        board: CellBoard,
        target_batch_size: float,
        **options: Any,
    ) -> None:
        self._cells = cells
        self._board = board
        self.cell = cell
        """This peer's cell."""
        self._distance = 0.0
        self._target = target_batch_size
        super().__init__(inner, averager, target_batch_size=target_batch_size, **options)
        elements = sum(tensor.numel() for tensor in self._mixed_tensors())
        self._between = CrossCellAverager(base, cells, elements)

    def _join(self, **given: Any) -> None:
        super()._join(**{**given, "rules": (*given["rules"], *self._cells.rules)})

    @property
    def _mix_is_next(self) -> bool:
        return self._cells.is_mix(self.epoch + 1)

    def _mixed_tensors(self) -> list[torch.Tensor]:
        """Return the values that are mixed: parameters, then averaged buffers."""
        return [*self._locals(), *self._parts.common.values()]

    def close(self) -> None:
        """Close the averagers of the outer averages; the cell's is the caller's."""
        self._between.close()

    # ------------------------------------------------------------------ steps

    def _step(self, samples: float, metrics: Mapping[str, float]) -> StepReport:
        if self._any_running():  # the batch belongs to the parameters before the running round's update
            return self._then_mix(self._collect())
        if self._mix_is_next:
            return self._mix()
        return self._then_mix(super()._step(samples, metrics))

    def _catch_up(self) -> StepReport:
        return self._then_mix(super()._catch_up())

    def _then_mix(self, report: StepReport) -> StepReport:
        """Take the mix after the update before it, in the same call: all members of that update are here."""
        if not report.updated or not self._mix_is_next:
            return report
        mix = self._mix()
        if not mix.updated:
            return replace(report, behind=mix.behind)
        return replace(report, epoch=mix.epoch, mixed=mix.mixed, consensus_distance=mix.consensus_distance)

    def _mix(self) -> StepReport:
        """Contribute what the outer averages change, and take the cell's sum of it; return the report."""
        # The mix is due at once, and each member waits: the target stands for that.
        self._together.run.publish(self._target, waiting=True)
        self._between.wait(self._together)
        self._averager.clear()
        changes = [torch.zeros_like(tensor) for tensor in self._mixed_tensors()]
        self._between.add_differences(changes)
        measured = self._training.with_speed({MIXED: self._between.mixed})
        self._averager.accumulate(changes, weight=1.0, metrics=measured)
        decision = self._together.decide_when_all_are_ready()
        if isinstance(decision, Average):
            return self._average(decision.peers)
        return self._training.report(goes_on=False)

    def _took(self, success: Success) -> None:
        super()._took(success)
        if self._cells.begins_outer(self.epoch) and self._averager.peer_id in success.peers:
            self._between.begin(self._mixed_tensors(), success.peers, self._board.live(self.cell))

    # ------------------------------------------------------------------ updates

    def _update(self, averaged: list[torch.Tensor], success: Success) -> float:
        if not self._mix_is_next:
            return super()._update(averaged, success)
        self._between.forget()
        self._averager.clear()  # a contribution to this mix that came back, if this peer replays it
        # The contributions are zero but for each member's shares, so their weighted sum is what the shares change.
        changes = [tensor * success.total_weight for tensor in averaged]
        self._distance = self._ranks.norm(changes)
        self._add(changes)
        self.zero_grad()
        return self._distance

    @torch.no_grad()
    def _add(self, changes: Sequence[torch.Tensor]) -> None:
        parameters = self._locals()
        for parameter, change in zip(parameters, changes, strict=False):
            parameter.add_(change.to(parameter.device))
        count = len(parameters)
        common = self._parts.common.values()
        self._parts.take([kept + change for kept, change in zip(common, changes[count:], strict=True)])

    def _step_scheduler(self) -> None:
        if not self._cells.is_mix(self.epoch):  # a schedule counts the updates with gradients
            super()._step_scheduler()

    def _updated(self, report: StepReport, rates: tuple[float, ...]) -> StepReport:
        if self._cells.is_mix(self.epoch) and isinstance(report.result, Success):
            members = len(report.result.weights)
            mixed = min(report.metrics.get(MIXED, 0.0) * members, 1.0)
            report = replace(report, mixed=mixed, consensus_distance=self._distance, grad_norm=None)
        return super()._updated(replace(report, cell=self.cell), rates)

    def adopted(self) -> None:
        """See :class:`~p2pavg.optim.catching_up.following.Owner`."""
        super().adopted()
        self._between.forget()

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        super()._load_state_dict(state)
        self._between.forget()
