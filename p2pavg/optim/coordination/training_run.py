"""One optimizer's part in its run: the beginning, the updates, the comparison with other peers, and the reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.result import RoundResult, Success
from p2pavg.data import EpochPlan, SharedSampler
from p2pavg.optim.base.model import ModelParts
from p2pavg.optim.base.recipe import VERSION, Recipe, Settings, numbers_digest
from p2pavg.optim.base.report import SPEED, StepReport, report_of
from p2pavg.optim.base.state import (
    Lineage,
    Origin,
    digest_in,
    digest_of,
    lineage_from,
    origin_of,
    pack_lineage,
    pack_origin,
)
from p2pavg.optim.coordination.together import RoundCoordinator
from p2pavg.optim.coordination.word import RecipeRecord
from p2pavg.optim.ranks.shards import Ranks, local_of

logger = logging.getLogger(__name__)

DATA = "data"
"""Of a saved state: the plan of the data."""


class TrainingRun:
    """Keeps the lineage and the origin of the parameters, tells the other peers of them, and reports what they tell.

    A run begins at the first step. Loading a state makes the next step begin again.

    Args:
        together: the optimizer's coordination with the other peers.
        ranks: the ranks of this peer.
        parts: the model's buffers.
        recipe: returns the recipe with the present settings.
        parameters: the trained parameters, of which this process may have a part.
        data: the sampler that is told of each update, if the peers share one.
    """

    def __init__(
        self,
        together: RoundCoordinator,
        ranks: Ranks,
        parts: ModelParts,
        *,
        recipe: Callable[[], Recipe],
        parameters: Sequence[torch.Tensor],
        data: SharedSampler | None = None,
    ) -> None:
        self._together = together
        self._ranks = ranks
        self._parts = parts
        self.data = data
        """The sampler of the run's data, which is a part of the common state."""
        self._recipe = recipe
        self._parameters = parameters
        self._has_begun = False
        self._origin: Origin | None = None
        self._loaded: Mapping[str, Any] | None = None
        """The state that was loaded since the last step."""
        if ranks.are_several:
            together.is_at(self._as_one(together.run.lineage))
        self.last_numbers: Settings = ()
        """The hyperparameters of the last update."""
        self.compares = True
        """False for peers whose parameters differ by design: nothing is published of them."""

    @property
    def lineage(self) -> Lineage:
        """The lineage of this peer's parameters."""
        return self._together.run.lineage

    def begin(self) -> bool:
        """Begin the run at the first step; return whether the parameters changed since the optimizer was made.

        Raises:
            ValueError: a state was loaded, and the parameters are not those that were saved with it.
        """
        if self._has_begun:
            return False
        recipe, parameters = self._recipe(), self._digest()
        changed = False
        loaded = self._loaded
        is_first = loaded is not None and not self.lineage.epoch
        if loaded is not None and is_first and not self._ranks.all_agree(_is_of(loaded, parameters)):
            loaded = None
        if loaded is None:
            changed = self._begin_anew(parameters, recipe)
            self._origin = _origin(parameters, recipe)
        else:
            self._origin = self._go_on(loaded, parameters, recipe)
        self._has_begun, self._loaded = True, None
        self._parts.begin()
        names = frozenset(name for name, _ in recipe.rules)
        self._together.watch.begins(self._word_of(self._origin), self.lineage, names)
        return changed

    def _begin_anew(self, parameters: bytes, recipe: Recipe) -> bool:
        first = self._as_one(lineage_from(parameters, recipe.digest))
        changed = first != self.lineage
        if changed:
            logger.info(
                "the parameters were changed after this optimizer was made: the run begins with them as they are now"
            )
            self._together.is_at(first)
        return changed

    def _go_on(self, loaded: Mapping[str, Any], parameters: bytes, recipe: Recipe) -> Origin:
        """Continue from a loaded state; return its origin."""
        saved = origin_of(loaded)
        if not self._ranks.all_agree(_is_of(loaded, parameters)):
            raise ValueError(
                "the parameters are not those that the state was saved with: load the model's state that was saved"
                " beside the optimizer's"
            )
        if self._ranks.all_agree(saved.rules == recipe.rules_digest):
            if saved.recipe not in (recipe.digest, self._origin and self._origin.recipe):
                # A rate in this program may be meant to be another one: it must not be replaced without a word.
                logger.warning(
                    "the run began with %s; the hyperparameters are those of the run's state now",
                    _told_differences(saved, recipe, recipe.numbers),
                )
            return saved
        logger.warning(
            "the state was saved by a peer with other settings; this peer continues with its own settings, and only"
            " with peers that do the same"
        )
        rules = bytes.fromhex(self._ranks.as_one(recipe.rules_digest.hex()))
        self._together.is_at(self.lineage.with_rules(rules))
        return _origin(saved.parameters, recipe)

    def load(self, state: Mapping[str, Any], lineage: Lineage) -> None:
        """Continue from a loaded state.

        The parameters are compared with it at the next step, since they may be loaded later. A state without an update
        belongs to no parameters: if the next step has others, the run begins with those.
        """
        plan = self.plan_in(state)
        if self.data is not None and plan is not None:
            self.data.load(plan)
        self._together.averager.clear()
        self._together.is_at(lineage)
        self._loaded, self._has_begun = state, False

    def plan_in(self, state: Mapping[str, Any]) -> EpochPlan | None:
        """Return the plan of the data in a loaded state; ``None`` if this peer has no data to plan.

        Raises:
            ValueError: there is none, or it is malformed.
        """
        if self.data is None:
            return None
        # The next version of a job, which has other rules, may have other data than its own checkpoint is of, or the
        # first: all of its peers begin a plan anew.
        has_other_rules = origin_of(state).rules != self._recipe().rules_digest
        if has_other_rules and not self.data.plan.is_of(state.get(DATA)):
            return EpochPlan(self.data.plan.order)
        if DATA not in state:
            raise ValueError("the state has no plan of the data")
        return self.data.plan.loaded(state[DATA])

    def saved(self) -> dict[str, Any]:
        """Return the lineage, the origin, and the data's plan if there is one, as plain values for a saved state."""
        lineage, origin = self.lineage, self._present_origin()
        if not self._has_begun and self._loaded is None:
            lineage = self._as_one(lineage_from(origin.parameters, origin.recipe))
        saved = {"lineage": pack_lineage(lineage), "origin": pack_origin(origin)}
        return saved | ({} if self.data is None else {DATA: self.data.saved()})

    def _present_origin(self) -> Origin:
        if self._loaded is not None:
            return origin_of(self._loaded)
        if self._has_begun and self._origin is not None:
            return self._origin
        return _origin(self._digest(), self._recipe())

    def _digest(self) -> bytes:
        return digest_of(local_of(tensor) for tensor in self._parameters)

    def _as_one(self, lineage: Lineage) -> Lineage:
        """Return one common lineage for all ranks of this peer."""
        return replace(lineage, state=bytes.fromhex(self._ranks.as_one(lineage.state.hex())))

    def refusal(self, state: Mapping[str, Any], *, is_own: bool) -> str | None:
        """Return the reason for which this peer cannot continue from a state: other settings; or ``None``.

        Args:
            is_own: true for this peer's own checkpoint, false for a state of another peer.

        Raises:
            ValueError: ``state`` is malformed.
        """
        saved, recipe = origin_of(state), self._recipe()
        try:
            self._word_of(saved).normalised()  # this peer would publish it, and shows its texts
        except (RemoteProtocolError, ValueError) as error:
            raise ValueError(f"state: its origin is {error}") from None
        # The next version of a program begins where the one before has ended, and may have other settings.
        is_next = is_own and dict(saved.fields).get(VERSION) != dict(recipe.fields).get(VERSION)
        if is_next or saved.rules == recipe.rules_digest:
            return None
        return f"the run trains with {_told_differences(saved, recipe, recipe.rules)}"

    def _word_of(self, origin: Origin) -> RecipeRecord:
        parameters = [local_of(tensor) for tensor in self._parameters]
        return RecipeRecord(
            recipe=origin.recipe,
            origin=origin.parameters,
            tensors=len(parameters),
            elements=sum(tensor.numel() for tensor in parameters),
            fields=origin.fields,
        )

    def with_speed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the caller's metrics and this peer's speed; raise ValueError if the caller's include a speed."""
        if SPEED in metrics:
            raise ValueError(f"metrics: {SPEED!r} is measured by the optimizer itself")
        return {**metrics, SPEED: self._together.run.pace.samples_per_second}

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
        if self.compares:
            self._together.watch.updated(self.lineage, numbers, [*parameters, *self._parts.averaged])

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
        self._together.compare(forked=report.others > 0)
        watch = self._together.watch
        return replace(report, drifted=watch.drifted, differs=watch.differs)


def _is_of(loaded: Mapping[str, Any], parameters: bytes) -> bool:
    """Return whether a loaded state was saved with these parameters, as far as it tells."""
    return loaded.get("parameters") is None or digest_in(loaded, "parameters") == parameters


def _told_differences(saved: Origin, recipe: Recipe, settings: Settings) -> str:
    """Return the settings of a loaded state's run that are not this peer's, as a part of a sentence."""
    names = {name for name, _ in settings}
    its, own = dict(saved.fields), dict(recipe.fields)
    told = [
        f"{name} {its.get(name, 'none')}, this peer with {own.get(name, 'none')}"
        for name in {**own, **its}
        if name in names and its.get(name) != own.get(name)
    ]
    return "; ".join(told) or "other settings, which are too many or too long to tell"


def _origin(parameters: bytes, recipe: Recipe) -> Origin:
    return Origin(
        parameters=parameters,
        recipe=recipe.digest,
        rules=recipe.rules_digest,
        fields=recipe.fields,
        settings=recipe.packed,
    )
