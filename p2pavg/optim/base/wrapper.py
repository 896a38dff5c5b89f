"""The common base of the optimizers of a run: they wrap a torch optimizer and follow the run's progress."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, overload

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from p2pavg.base.errors import AccumulateError
from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.arguments import check_averager, check_meets_all, check_min_peers
from p2pavg.optim.base.batches import NO_METRICS, Batches
from p2pavg.optim.base.joined import joined, kind_of
from p2pavg.optim.base.lineage import Lineage
from p2pavg.optim.base.model import ModelParts
from p2pavg.optim.base.recipe import Recipe, Settings, hyperparameters, named
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.base.state import checked_period
from p2pavg.optim.base.torch_optimizer import TorchOptimizer
from p2pavg.optim.base.zeroing import ZeroingCheck
from p2pavg.optim.catching_up.checkpoints import Owner
from p2pavg.optim.catching_up.common_state import CommonState, Extra
from p2pavg.optim.catching_up.run_state import RunState, model_of, run_state_of
from p2pavg.optim.catching_up.states import States
from p2pavg.optim.coordination.together import Together
from p2pavg.optim.coordination.training_run import TrainingRun
from p2pavg.optim.logging.update_news import tell_update
from p2pavg.optim.ranks.mesh import PeerMesh
from p2pavg.optim.ranks.shards import Ranks, local_of

if TYPE_CHECKING:
    import torch.distributed as dist

L = TypeVar("L")

OVERFLOW = "the GradScaler found gradients of this batch that are not finite: it is left out"


class PeerOptimizer(TorchOptimizer):
    """Wraps a torch optimizer, and is one; the base of :class:`AveragedOptimizer` and :class:`LocalUpdates`.

    A run begins at the first :meth:`step`, with the parameters at that time. See
    :class:`~p2pavg.optim.AveragedOptimizer` for the arguments.

    Raises:
        TypeError: ``inner`` needs a closure, ``scheduler`` needs a metric, ``model`` is not a module, or ``averager``
            is not one of :mod:`p2pavg.blocking`.
        ValueError: ``inner`` has nothing to train, or an argument is out of range; the message names it.
    """

    _together: Together
    _training: TrainingRun
    _is_mixed: ClassVar[bool] = False
    """True if the peers of a run hold different parameters."""

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        averager: Averager,
        *,
        scheduler: LRScheduler | None,
        on_update: Callable[[StepReport], None] | None,
        model: torch.nn.Module | None,
        buffers: Collection[str] | None,
        check_every: int | None,
        process_group: dist.ProcessGroup | PeerMesh | None = None,
        state: RunState | torch.nn.Module | None = None,
        batches: Batches,
        measure_updates: bool,
    ) -> None:
        check_averager(averager)
        if not self._is_mixed:
            check_meets_all(averager)
        run_state = run_state_of(state)
        model = model_of(model, run_state)
        self.inner = inner = joined(inner, model)
        self._become_optimizer()
        self.scheduler = scheduler
        self._batches = batches
        self._measures_updates = bool(measure_updates)
        self._update_norm: float | None = None
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
        self._ranks.share(self._parameters, self._parts.labels)
        self._averager = averager
        self._on_update = on_update
        self._run_state = run_state
        self._states: States | None = None
        self._zeroing = None if self._ranks.are_several else ZeroingCheck(self._parameters)
        averager.clear()  # contributions of an earlier optimizer

    def _join(
        self,
        *,
        rules: Settings,
        outer: Optimizer | None,
        target: float,
        peers_to_start: int | None,
        min_peers: int | None,
        sync_timeout: float,
        overlaps: bool = False,
        grace: float = math.inf,
    ) -> None:
        """Join the run, after the arguments are checked."""
        check_min_peers(min_peers, self._averager.config.min_group_size)
        self._rules = rules
        numbers = hyperparameters(self.inner)
        # The values at this time: a rate that is set by hand before the first step is published with the first update.
        self._numbers = numbers if outer is None else (*numbers, *named("outer", hyperparameters(outer)))
        self._together = self._coordination(
            target=target,
            peers_to_start=min_peers if peers_to_start is None else peers_to_start,
            min_peers=min_peers,
            sync_timeout=sync_timeout,
            recipe=self._recipe().digest,
            overlaps=overlaps,
            grace=grace,
        )
        self._training = TrainingRun(
            self._together,
            self._ranks,
            self._parts,
            recipe=self._recipe,
            parameters=self._locals,
            check_every=self._check_every,
        )

    def _coordination(self, **options: Any) -> Together:
        """Return this optimizer's coordination with the other peers."""
        return Together(self._averager, self._locals(), **options)

    @property
    def _stepped(self) -> Optimizer:
        return self.inner

    @property
    def lineage(self) -> Lineage:
        """The lineage of this peer's parameters; it averages with peers of the same lineage."""
        return self._together.run.lineage

    @property
    def epoch(self) -> int:
        """Number of updates that the parameters have taken."""
        return self._together.run.lineage.epoch

    @property
    def is_pending(self) -> bool:
        """True if the next backward pass adds to the present gradients: see ``accumulate``."""
        return self._batches.is_pending

    @property
    def are_several(self) -> bool:
        """True if this peer's ranks each have an optimizer, for their own parts of the parameters."""
        return self._ranks.are_several

    @property
    def ranks(self) -> Ranks:
        """The ranks of this peer that update together with this one."""
        return self._ranks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients, as in every torch optimizer; call it before each backward pass.

        Between two backward passes that ``accumulate`` joins, it leaves them as they are.
        """
        if not self._batches.is_pending:
            self.inner.zero_grad(set_to_none=set_to_none)

    def leave(self) -> None:
        """Stop taking part, so that the others do not wait for this peer, until :meth:`step` is called again.

        Closing the averager does the same; use this if the averager stays open.
        """
        self._together.run.leave()

    def _recipe(self) -> Recipe:
        frozen = [p for group in self.inner.param_groups for p in group["params"] if not p.requires_grad]
        layout = [[p.requires_grad for p in group["params"]] for group in self.inner.param_groups]
        rules = (
            ("optimizer", type(self).__name__),
            ("inner", kind_of(self.inner)),
            *self._rules,
            ("scheduler", None if self.scheduler is None else type(self.scheduler).__qualname__),
            ("layout", layout),
            *self._parts.rules(frozen),
        )
        return Recipe(rules=rules, numbers=self._numbers)

    def _locals(self) -> list[torch.Tensor]:
        return [local_of(parameter) for parameter in self._parameters]

    # ------------------------------------------------------------------ steps

    @overload  # type: ignore[override]  # torch's step returns nothing without a closure; this one a report
    def step(
        self, closure: None = None, *, samples: float | None = None, metrics: Mapping[str, float] = NO_METRICS
    ) -> StepReport: ...

    @overload
    def step(
        self,
        closure: Callable[[], L],
        *,
        samples: float | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> L: ...

    def step(
        self,
        closure: Callable[[], L] | None = None,
        *,
        samples: float | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> StepReport | L:
        """Take one batch, whose gradients the parameters hold, and the update if it is due.

        Args:
            closure: function that zeroes the gradients, computes the loss and its gradients, and returns the loss. It
                is called once.
            samples: size of the batch; the gradients must be the mean over its samples. ``batch_size`` or
                ``samples_of`` if not given. With a ``process_group``, the total of all its ranks, the same number on
                each.
            metrics: measurements on the batch, e.g. ``{"loss": loss.item()}``; 15 at most, with those of :meth:`note`.

        Returns:
            The report: progress of this peer and its run. If ``updated`` is true, the parameters have changed by an
            average. With a closure, its return value, as in torch; :attr:`report` has the report.

        Raises:
            p2pavg.AccumulateError: :class:`AveragedOptimizer` was given a gradient or a metric that is not finite, or
                ``samples`` that is not a number above 0; nothing is accumulated. With a ``process_group``, all its
                ranks raise. If the cause is neither a gradient nor ``samples``, the ranks' earlier accumulated
                gradients are discarded too.
            TypeError: the number of samples is not known.
            ValueError: ``inner`` trains other parameters than before, a buffer changes without being averaged, the
                parameters are not those of the loaded state, or for :class:`LocalUpdates`, ``samples`` is not a number
                above 0 or a metric is not a finite number. Nothing has changed then.
            p2pavg.ClosedError: the averager is closed.
        """
        loss: L | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        report = self._step_batch(samples, metrics)
        self._keep(report)
        return report if closure is None else cast(L, loss)

    def _step_batch(self, samples: float | None, metrics: Mapping[str, float]) -> StepReport:
        batch = self._batches.add(samples, metrics)
        scaled = getattr(self, "found_inf", None) is not None
        if batch is None:
            if scaled:
                self._batches.drop()
                raise ValueError(
                    "accumulate cannot be used with a GradScaler: call scaler.step once for all passes, with the"
                    " samples of all of them"
                )
            return self._training.report(goes_on=self._running)
        if scaled and not self._ranks.all_agree(not self._overflows()):
            self._training.begin()
            self._check_parameters()
            return replace(self._skip_batch(), skipped=OVERFLOW)
        self._unscale()
        return self._take_batch(batch.samples, batch.metrics)

    @abstractmethod
    def _take_batch(self, samples: float, metrics: Mapping[str, float]) -> StepReport:
        """Take the present gradients; see :meth:`step`."""

    @abstractmethod
    def _skip_batch(self) -> StepReport:
        """Leave the present gradients out, and go on with a round that runs."""

    def note(self, metrics: Mapping[str, float]) -> None:
        """Add measurements to those of the next :meth:`step`, such as a held-out loss.

        Raises:
            p2pavg.AccumulateError: a measurement is not a finite number, or there would be more than 15.
        """
        self._batches.note(metrics)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group of ``inner``; a group without one is left out."""
        return tuple(float(group["lr"]) for group in self.inner.param_groups if "lr" in group)

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

    @property
    def _running(self) -> bool:
        """True while the end of a round has not been collected, also after Ctrl-C."""
        return self._averager.round_state is not None

    @torch.no_grad()
    def _change(self, tensors: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
        """Step an optimizer of these tensors, and measure how far they move if the caller wants to know."""
        if not self._measures_updates:
            optimizer.step()
            return
        parts = [local_of(tensor.detach()) for tensor in tensors]
        before = [part.clone() for part in parts]
        optimizer.step()
        moved = [after.float() - old.float() for after, old in zip(parts, before, strict=True)]
        self._update_norm = self._ranks.norm(moved)

    def _named(self, error: AccumulateError) -> AccumulateError:
        """Return an error that names the parameter of one that names a tensor by its position."""
        assert error.position is not None
        label = self._parts.labels[error.position]
        what = label if error.position >= len(self._parameters) else f"the gradient of {label}"
        return AccumulateError(
            str(error).replace(f"tensor {error.position}", what, 1), position=error.position
        )

    def _updated(self, report: StepReport, rates: tuple[float, ...]) -> StepReport:
        """Tell the subscribers of an update, taken with these rates, and call ``on_update`` with its report."""
        report = replace(report, learning_rates=rates, update_norm=self._update_norm)
        tell_update(self._averager, self.lineage, report)
        if self._on_update is not None:
            self._on_update(report)
        return report

    # ------------------------------------------------------------------ states

    def _share_states(
        self, prefix: str, tensors: list[torch.Tensor], optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> None:
        """Offer states to other peers, and continue from the newest checkpoint, if there is one."""
        if self._run_state is None:
            return
        common = CommonState(
            prefix, tensors, self._parts, optimizer, scheduler, self._training, self._extra()
        )
        owner = cast(Owner, self)
        self._states = States(self._run_state, self._averager, common, owner, self._together, self._ranks)
        self._states.load_newest()
        self._together.on_look = self._look
        self._together.comes_back = True
        self._together.has_later = self._states.has_later
        self._together.pauses = self._states.pauses

    def _extra(self) -> Extra | None:
        """Return further values of the state that all peers of a lineage share."""
        return None

    def _look(self) -> None:
        """Compare with the other peers, and offer them states; called between updates."""
        self._training.look()
        if self._states is not None:
            self._states.look()

    def _is_following(self) -> bool:
        """Offer states to other peers; return whether this peer is on its way to the run's present state."""
        if self._states is None:
            return False
        self._states.look(at_step=True)
        return self._states.must_follow(None, outnumbered=False) and not self._any_running()

    def _must_follow(self, report: StepReport) -> bool:
        """Return whether this peer has to fetch the run's state, by the report of a step."""
        if self._states is None or self._any_running():
            return False
        outnumbered = report.drifted is not None and self._training.watch.outnumbered
        return self._states.must_follow(report.behind, outnumbered=outnumbered)

    def _catch_up(self) -> StepReport:
        """Follow the run for as long as a step may wait; return the report of the update, or of the progress."""
        assert self._states is not None
        until = time.monotonic() + self._together.patience
        while True:
            following = self._states.catch_up(until)
            if not following.caught_up:
                report = self._training.report(goes_on=True)
                return replace(report, catching_up=following.reason or None)
            if not self._should_observe(until):
                self._together.run.follow(False)
                return self._training.report(goes_on=True)
            observed = self._observe()
            if observed is None or observed.updated:
                return observed or self._training.report(goes_on=True)

    def _should_observe(self, until: float) -> bool:
        assert self._states is not None
        states, run = self._states, self._together.run
        return self._ranks.as_the_first(
            lambda: states.should_observe and run.survey().peers > 1 and time.monotonic() < until
        )

    def _any_running(self) -> bool:
        """Return whether a round runs on any rank.

        All ranks must take part in the same collectives, or they deadlock.
        """
        return not self._ranks.all_agree(not self._running)

    def _observe(self) -> StepReport | None:
        """Be in the run's next round without a contribution; return its report, or ``None`` if that is of no use.

        With local updates it is of no use: all peers wait for each other, so a peer that joins is in their next round.
        """
        return None

    def _took(self, success: Success) -> None:
        """Note an update that was taken in a round."""
        if self._states is not None:
            self._states.took(success)

    def _load_inner(self, saved: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(saved["inner"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])

    def _saved(self) -> dict[str, Any]:
        """Return the entries that the saved states of both kinds of optimizers have."""
        return {
            "inner": self.inner.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            **self._training.saved(),
        }


def _trained_by(inner: Optimizer) -> list[torch.Tensor]:
    return [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
