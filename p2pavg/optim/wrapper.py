"""The common base of the optimizers of a run: they wrap a torch optimizer and follow the run's progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from p2pavg.blocking import Averager
from p2pavg.optim.digest import digest_of, tensor_digest
from p2pavg.optim.lineage import Lineage, lineage_from
from p2pavg.optim.model import ModelParts
from p2pavg.optim.recipe import Recipe, Settings, hyperparameters, named, numbers_digest
from p2pavg.optim.report import SPEED, StepReport
from p2pavg.optim.shards import Ranks, local_of
from p2pavg.optim.state import Origin, checked_period, digest_in, origin_of, pack_lineage, pack_origin
from p2pavg.optim.together import Together
from p2pavg.optim.watch import Watch
from p2pavg.optim.word import Word
from p2pavg.optim.zeroing import ZeroingCheck
from p2pavg.result import Success

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)


class PeerOptimizer:
    """Wraps a torch optimizer; the base of :class:`AveragedOptimizer` and :class:`LocalUpdates`.

    A run begins at the first :meth:`step`, with the parameters at that time. See
    :class:`~p2pavg.optim.AveragedOptimizer` for the arguments.

    Raises:
        TypeError: ``inner`` needs a closure, ``scheduler`` needs a metric, or ``model`` is not a module.
        ValueError: ``inner`` has nothing to train, or an argument is out of range; the message names it.
    """

    _together: Together
    _watch: Watch

    def __init__(
        self,
        inner: Optimizer,
        averager: Averager,
        *,
        scheduler: LRScheduler | None,
        on_update: Callable[[StepReport], None] | None,
        model: torch.nn.Module | None,
        buffers: Collection[str] | None,
        check_every: int | None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.inner = inner
        self.scheduler = scheduler
        if isinstance(inner, torch.optim.LBFGS):
            raise TypeError(
                "inner evaluates the loss several times per step, which cannot be averaged: LBFGS"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError("scheduler needs a metric at every step, and gets none: ReduceLROnPlateau")
        self._parameters = _trained_by(inner)
        if not self._parameters:
            raise ValueError("inner has no parameters that require a gradient")
        self._check_every = checked_period("check_every", check_every)
        self._parts = ModelParts(model, self._parameters, buffers=buffers, codec=averager.config.codec)
        self._ranks = Ranks(process_group)
        self._averager = averager
        self._on_update = on_update
        self._zeroing = None if self._ranks.are_several else ZeroingCheck(self._parameters)
        self._has_begun = False
        self._loaded: Mapping[str, Any] | None = None
        """The state that was loaded since the last step."""
        averager.clear()  # contributions of an earlier optimizer

    def _join(
        self,
        *,
        rules: Settings,
        outer: Optimizer | None,
        target: float,
        peers_to_start: int | None,
        sync_timeout: float,
    ) -> None:
        """Join the run, after the arguments are checked."""
        self._rules = rules
        numbers = hyperparameters(self.inner)
        # The values at this time: a rate that is set by hand before the first step is published with the first update.
        self._numbers = numbers if outer is None else (*numbers, *named("outer", hyperparameters(outer)))
        recipe = self._recipe()
        self._together = Together(
            self._averager,
            self._locals(),
            target=target,
            peers_to_start=peers_to_start,
            sync_timeout=sync_timeout,
            recipe=recipe.digest,
        )
        if self._ranks.are_several:
            self._together.is_at(self._as_one(self.lineage))
        self._watch = Watch(self._averager, every=self._check_every, labels=self._parts.labels)
        self._together.on_look = self._look

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of ``inner``."""
        return self.inner.param_groups

    @property
    def lineage(self) -> Lineage:
        """The lineage of this peer's parameters; it averages with peers of the same lineage."""
        return self._together.lineage

    @property
    def epoch(self) -> int:
        """Number of updates that the parameters have taken."""
        return self._together.lineage.epoch

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, as in every torch optimizer; call it before each backward pass."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def leave(self) -> None:
        """Stop taking part, so that the others do not wait for this peer, until :meth:`step` is called again.

        Closing the averager does the same; use this if the averager stays open.
        """
        self._together.leave()

    # ------------------------------------------------------------------ the beginning

    def _begin(self) -> bool:
        """Begin the run at the first step; return whether the parameters changed since this optimizer was made.

        Raises:
            ValueError: a state was loaded, and the parameters are not those that were saved with it.
        """
        if self._has_begun:
            return False
        recipe, parameters = self._recipe(), digest_of(self._locals())
        changed = False
        if self._loaded is None:
            changed = self._begin_anew(parameters, recipe)
            self._origin = _origin(parameters, recipe)
        else:
            self._origin = self._go_on(self._loaded, parameters, recipe)
        self._parts.begin()
        self._has_begun, self._loaded = True, None
        self._watch.begins(self._word(), self.lineage)
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
        is_right = loaded.get("parameters") is None or digest_in(loaded, "parameters") == parameters
        if not self._ranks.all_agree(is_right):
            raise ValueError(
                "the parameters are not those that the state was saved with: load the model's state that was saved"
                " beside the optimizer's"
            )
        if self._ranks.all_agree(saved.rules == recipe.rules_digest):
            return saved
        logger.warning(
            "the state was saved by a peer that trains otherwise; this peer goes on with its own settings, and only"
            " with peers that do the same"
        )
        rules = bytes.fromhex(self._ranks.as_one(recipe.rules_digest.hex()))
        self._together.is_at(self.lineage.with_rules(rules))
        return _origin(saved.parameters, recipe)

    def _goes_on_from(self, state: Mapping[str, Any], lineage: Lineage) -> None:
        """Continue from a loaded state.

        The parameters are compared with it at the next step, since they may be loaded later.
        """
        self._averager.clear()
        self._together.is_at(lineage)
        self._loaded, self._has_begun = state, False

    def _recipe(self) -> Recipe:
        frozen = [p for group in self.inner.param_groups for p in group["params"] if not p.requires_grad]
        layout = [[p.requires_grad for p in group["params"]] for group in self.inner.param_groups]
        rules = (
            ("optimizer", type(self).__name__),
            ("inner", type(self.inner).__qualname__),
            *self._rules,
            ("scheduler", None if self.scheduler is None else type(self.scheduler).__qualname__),
            ("layout", layout),
            *self._parts.rules(frozen),
        )
        return Recipe(rules=rules, numbers=self._numbers)

    def _word(self) -> Word:
        return Word(
            recipe=self._origin.recipe,
            origin=self._origin.parameters,
            tensors=len(self._parameters),
            elements=sum(tensor.numel() for tensor in self._locals()),
            fields=self._origin.fields,
        )

    def _locals(self) -> list[torch.Tensor]:
        return [local_of(parameter) for parameter in self._parameters]

    def _as_one(self, lineage: Lineage) -> Lineage:
        """Return one common lineage for all ranks of this peer."""
        return replace(lineage, state=bytes.fromhex(self._ranks.as_one(lineage.state.hex())))

    # ------------------------------------------------------------------ steps

    def _check_parameters(self) -> None:
        """Raise ValueError if the trained parameters were replaced.

        The inner optimizer would step new parameters with this peer's gradients alone, and the peers would diverge.
        """
        now = _trained_by(self.inner)
        if len(now) != len(self._parameters) or any(
            a is not b for a, b in zip(now, self._parameters, strict=True)
        ):
            raise ValueError(
                "inner has other parameters that require a gradient than when this optimizer was made;"
                " make a new one on all peers"
            )
        self._parts.check_constants()

    def _step_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def _with_speed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        if SPEED in metrics:
            raise ValueError(f"metrics: {SPEED!r} is measured by the optimizer itself")
        return {**metrics, SPEED: self._together.samples_per_second}

    def _took(
        self, success: Success, numbers: Settings, result: bytes, parameters: Sequence[torch.Tensor]
    ) -> None:
        """Note an update.

        Args:
            numbers: hyperparameters of the update.
            result: digest of the averaged tensors.
            parameters: the parameters after the update.
        """
        group_id = self._ranks.as_one(success.group_id)
        joint = bytes.fromhex(self._ranks.as_one(result.hex()))
        self._together.took(replace(success, group_id=group_id), joint, numbers_digest(numbers))
        self._watch.updated(self.lineage, numbers, lambda: self._digests(parameters))

    def _digests(self, parameters: Sequence[torch.Tensor]) -> list[bytes]:
        return [tensor_digest(local_of(tensor)) for tensor in (*parameters, *self._parts.averaged)]

    def _look(self) -> None:
        self._watch.look(forked=self._together.survey().others > 0)

    def _checked(self, report: StepReport) -> StepReport:
        """Add the comparison with the other peers' recipes and parameters to a report."""
        self._watch.look(forked=report.others > 0)
        return replace(report, drifted=self._watch.drifted, differs=self._watch.differs)

    def _updated(self, report: StepReport) -> StepReport:
        """Call ``on_update`` with the report of an update."""
        if self._on_update is not None:
            self._on_update(report)
        return report

    # ------------------------------------------------------------------ states

    def _load_inner(self, saved: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(saved["inner"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])

    def _saved(self) -> dict[str, Any]:
        """Return the entries that the saved states of both kinds of optimizers have."""
        lineage, origin = self.lineage, self._origin_now()
        if not self._has_begun and self._loaded is None:
            lineage = self._as_one(lineage_from(origin.parameters, origin.recipe))
        return {
            "inner": self.inner.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "lineage": pack_lineage(lineage),
            "origin": pack_origin(origin),
        }

    def _origin_now(self) -> Origin:
        if self._has_begun:
            return self._origin
        if self._loaded is not None:
            return origin_of(self._loaded)
        return _origin(digest_of(self._locals()), self._recipe())


def _origin(parameters: bytes, recipe: Recipe) -> Origin:
    return Origin(
        parameters=parameters, recipe=recipe.digest, rules=recipe.rules_digest, fields=recipe.fields
    )


def _trained_by(inner: Optimizer) -> list[torch.Tensor]:
    return [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
