"""One optimizer's part in its run: the beginning, the updates, the comparison with other peers, and the reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from p2pavg.base.result import RoundResult, Success
from p2pavg.data import EpochPlan, SharedSampler
from p2pavg.optim.base.model import ModelParts
from p2pavg.optim.base.recipe import Recipe, Settings, numbers_digest
from p2pavg.optim.base.report import SPEED, StepReport, report_of
from p2pavg.optim.base.state import Lineage, tensor_digest
from p2pavg.optim.coordination.beginning import Beginning
from p2pavg.optim.coordination.together import RoundCoordinator
from p2pavg.optim.coordination.watch import DriftMonitor
from p2pavg.optim.ranks.shards import Ranks, local_of

DATA = "data"
"""Of a saved state: the plan of the data."""


class TrainingRun:
    """Keeps the lineage of the parameters, tells the other peers of it, and reports what they tell.

    Args:
        together: the optimizer's coordination with the other peers.
        ranks: the ranks of this peer.
        parts: the model's buffers.
        recipe: returns the recipe with the present settings.
        parameters: returns the present parameters, or this process's part of them.
        check_every: number of updates between two digests of the parameters; 0 for none.
        data: the sampler that is told of each update, if the peers share one.
    """

    def __init__(
        self,
        together: RoundCoordinator,
        ranks: Ranks,
        parts: ModelParts,
        *,
        recipe: Callable[[], Recipe],
        parameters: Callable[[], Sequence[torch.Tensor]],
        check_every: int,
        data: SharedSampler | None = None,
    ) -> None:
        self._together = together
        self._ranks = ranks
        self._parts = parts
        self.data = data
        """The sampler of the run's data, which is a part of the common state."""
        self._beginning = Beginning(together, ranks, recipe=recipe, parameters=parameters)
        self.watch = DriftMonitor(
            together.averager,
            every=check_every,
            labels=parts.labels,
            companions=lambda: together.run.companions,
        )
        self.last_numbers: Settings = ()
        """The hyperparameters of the last update."""
        self.compares = True
        """False for peers whose parameters differ by design: nothing is published of them."""
        together.on_look = self.poll
        together.run.differs = lambda: self.watch.differs

    @property
    def lineage(self) -> Lineage:
        """The lineage of this peer's parameters."""
        return self._together.run.lineage

    def begin(self) -> bool:
        """Begin the run at the first step; return whether the parameters changed since the optimizer was made.

        Raises:
            ValueError: a state was loaded, and the parameters are not those that were saved with it.
        """
        if self._beginning.has_begun:
            return False
        changed = self._beginning.begin()
        self._parts.begin()
        self.watch.begins(self._beginning.word(), self.lineage, self._beginning.rules)
        return changed

    def load(self, state: Mapping[str, Any], lineage: Lineage) -> None:
        """Continue from a loaded state.

        The parameters are compared with it at the next step, since they may be loaded later.
        """
        plan = self.plan_in(state)
        if self.data is not None and plan is not None:
            self.data.load(plan)
        self._together.averager.clear()
        self._beginning.load(state, lineage)

    def plan_in(self, state: Mapping[str, Any]) -> EpochPlan | None:
        """Return the plan of the data in a loaded state; ``None`` if this peer has no data to plan.

        Raises:
            ValueError: there is none, or it is malformed.
        """
        if self.data is None:
            return None
        # The next version of a job, which has other rules, may have other data than its own checkpoint is of, or the
        # first: all of its peers begin a plan anew.
        if self._beginning.has_other_rules(state) and not self.data.plan.is_of(state.get(DATA)):
            return EpochPlan(self.data.plan.order)
        if DATA not in state:
            raise ValueError("the state has no plan of the data")
        return self.data.plan.loaded(state[DATA])

    def saved(self) -> dict[str, Any]:
        """Return the lineage, the origin, and the data's plan if there is one, as plain values for a saved state."""
        return self._beginning.saved() | ({} if self.data is None else {DATA: self.data.saved()})

    def refusal(self, state: Mapping[str, Any], *, is_own: bool) -> str | None:
        """Return the reason for which this peer cannot continue from a state, or ``None``.

        Args:
            is_own: true for this peer's own checkpoint, false for a state of another peer.

        Raises:
            ValueError: ``state`` is malformed.
        """
        return self._beginning.refusal(state, is_own=is_own)

    def with_speed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the caller's metrics and this peer's speed; raise ValueError if the caller's include a speed."""
        if SPEED in metrics:
            raise ValueError(f"metrics: {SPEED!r} is measured by the optimizer itself")
        return {**metrics, SPEED: self._together.run.samples_per_second}

    def took(
        self, success: Success, numbers: Settings, result: bytes, parameters: Sequence[torch.Tensor]
    ) -> None:
        """Note an update.

        Args:
            numbers: hyperparameters of the update.
            result: digest of the averaged tensors.
            parameters: the parameters after the update.
        """
        self.last_numbers = numbers
        group_id = self._ranks.as_one(success.group_id)
        joint = bytes.fromhex(self._ranks.as_one(result.hex()))
        self._together.took(replace(success, group_id=group_id), joint, numbers_digest(numbers))
        if self.data is not None:
            self.data.took(success.weights, self._together.averager.weight)
        self._tell(numbers, parameters)

    def replayed(
        self, success: Success, numbers: Settings, result: bytes, parameters: Sequence[torch.Tensor]
    ) -> None:
        """Note an update of the run that this peer has taken later than the others; see :meth:`took`."""
        self.last_numbers = numbers
        joint = bytes.fromhex(self._ranks.as_one(result.hex()))
        after = self.lineage.after(self._ranks.as_one(success.group_id), joint, numbers_digest(numbers))
        self._together.is_at(after)
        self._together.run.was_in({*success.peers, *success.observers} - {self._together.averager.peer_id})
        if self.data is not None:
            self.data.took(success.weights, self._together.averager.weight)
        self._tell(numbers, parameters)

    def _tell(self, numbers: Settings, parameters: Sequence[torch.Tensor]) -> None:
        """Let the other peers compare the parameters after an update."""
        if not self.compares:
            return
        self.watch.updated(
            self.lineage,
            numbers,
            lambda: [tensor_digest(local_of(tensor)) for tensor in (*parameters, *self._parts.averaged)],
        )

    def poll(self) -> None:
        """Compare with the other peers, if they may have published anything new."""
        self.watch.poll(forked=self._together.run.survey().others > 0)

    def report(
        self, result: RoundResult | None = None, norm: float | None = None, *, goes_on: bool
    ) -> StepReport:
        """Return the report of a step, with the comparison with the other peers' recipes and parameters.

        Args:
            result: result of the round, if the step tried one or found that one had ended.
            norm: L2 norm of the average, after an update.
            goes_on: true if the round goes on.
        """
        # While its round goes on, this peer may look behind only because it hears of the end last.
        behind = None if goes_on else self._ranks.as_the_first(self._together.left_behind)
        report = report_of(self._together, result, norm, behind)
        self.watch.poll(forked=report.others > 0)
        return replace(report, drifted=self.watch.drifted, differs=self.watch.differs)
