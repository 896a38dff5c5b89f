"""The common base of the optimizers of a run: they wrap a torch optimizer and follow the run's progress."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.allreduce.vector.accumulation import AVERAGED_DTYPES
from p2pavg.base.errors import AccumulateError, RunEndedError
from p2pavg.base.result import Success
from p2pavg.blocking import Averager, stay
from p2pavg.data import SharedSampler
from p2pavg.optim.base.arguments import (
    check_averager,
    check_dtypes,
    check_inner,
    check_meets_all,
    check_min_peers,
    check_schedule,
)
from p2pavg.optim.base.batches import Batches
from p2pavg.optim.base.joined import joined, kind_of
from p2pavg.optim.base.model import ModelParts
from p2pavg.optim.base.recipe import VERSION, Recipe, Settings, hyperparameters, named
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.base.state import Lineage, checked_period
from p2pavg.optim.base.torch_optimizer import TorchOptimizer
from p2pavg.optim.base.touched import TouchedCheck, ZeroingCheck, modules_around, saved_buffers
from p2pavg.optim.catching_up.common_state import CommonState
from p2pavg.optim.catching_up.following import Owner
from p2pavg.optim.catching_up.run_state import StateOption, model_of, run_state_of
from p2pavg.optim.catching_up.states import States
from p2pavg.optim.coordination.ending import GrowingPauses
from p2pavg.optim.coordination.parting import Parting
from p2pavg.optim.coordination.together import RoundCoordinator
from p2pavg.optim.coordination.training_run import TrainingRun
from p2pavg.optim.coordination.turns import begins
from p2pavg.optim.coordination.watch import DriftMonitor
from p2pavg.optim.logging.loggers import tell_update
from p2pavg.optim.ranks.mesh import PeerMesh
from p2pavg.optim.ranks.shards import Ranks, local_of

if TYPE_CHECKING:
    import torch.distributed as dist


logger = logging.getLogger(__name__)

OVERFLOW = "the GradScaler found gradients of this batch that are not finite: it is left out"


MAX_NAMED_BUFFERS = 3  # in the warning of buffers that are left out


class PeerOptimizer(TorchOptimizer):
    """Wraps a torch optimizer, and is one; the base of :class:`AveragedOptimizer` and :class:`LocalUpdates`.

    A run begins at the first :meth:`step`, with the parameters at that time. See
    :class:`~p2pavg.optim.AveragedOptimizer` for the arguments.

    Raises:
        TypeError: ``inner`` needs a closure, ``scheduler`` needs a metric, ``model`` is not a module, or ``averager``
            is not one of :mod:`p2pavg.blocking`.
        ValueError: ``inner`` has nothing to train, or an argument is out of range; the message names it.
    """

    _together: RoundCoordinator
    _training: TrainingRun
    _dtypes: ClassVar[tuple[torch.dtype, ...]] = (*AVERAGED_DTYPES, torch.float64)
    """Of the parameters: local updates average an anchor of float32."""
    _is_mixed: ClassVar[bool] = False
    """True if the peers of a run hold different parameters."""

    _counts_samples: ClassVar[bool] = False
    """True if the weights of an update are the samples that its members have taken since the one before."""

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
        state: StateOption = None,
        batches: Batches,
        measure_updates: bool,
    ) -> None:
        check_averager(averager)
        # Gossip averages among a few peers: optimizers whose peers hold the same parameters would drift apart with it.
        if not self._is_mixed:
            check_meets_all(averager)
        run_state = run_state_of(state)
        model = model_of(model, run_state)
        # Before the next line: torch's part of the optimizer reads `defaults`, which are those of `inner`.
        self.inner = inner = joined(inner, model)
        check_inner(inner)
        check_schedule(scheduler, inner)
        if on_update is not None and not callable(on_update):
            raise TypeError(f"on_update must be a function of one report, got {type(on_update).__name__}")
        self._become_optimizer()
        self.scheduler = scheduler
        self._batches = batches
        self._measures_updates = bool(measure_updates)
        self._update_norm: float | None = None
        # In a list, LBFGS has been refused by `joined`.
        if isinstance(inner, torch.optim.LBFGS):
            raise TypeError(
                "inner evaluates the loss several times per step, which cannot be averaged: LBFGS"
            )
        self._parameters = _trained_by(inner)
        if not self._parameters:
            raise ValueError("inner has no parameters that require a gradient")
        self._check_every = checked_period("check_every", check_every)
        self._parts = ModelParts(model, self._parameters, buffers=buffers, codec=averager.config.codec)
        check_dtypes(self._parts.labels, self._parameters, self._dtypes)
        self._ranks = Ranks(process_group)
        # Collective: from here on, an error on one rank alone would leave the other ranks waiting.
        self._ranks.share(self._parameters, self._parts.labels)
        # Without the model, buffers such as running statistics stay this peer's own, and peers differ in them unseen.
        if model is None:
            _warn_of_buffers(self._parameters)
        self._averager = averager
        self._on_update = on_update
        self._run_state = run_state
        self._states: States | None = None
        self._leaves_out = GrowingPauses()
        self._touched = TouchedCheck(())
        # The check hooks autograd's accumulation, which FSDP goes around.
        self._zeroing = None if self._ranks.are_several else ZeroingCheck(self._parameters)
        if run_state is not None and run_state.data is not None:
            self._check_data(run_state.data, averager)
        averager.clear()  # contributions of an earlier optimizer

    def _check_data(self, data: SharedSampler, averager: Averager) -> None:
        """Raise ValueError if the updates do not tell which samples were taken, or the sampler is another peer's."""
        if not self._counts_samples or self._ranks.are_several or averager.config.participation is not None:
            raise ValueError(
                "data can be used with an AveragedOptimizer only, without a process_group and without participation:"
                " other updates do not tell which samples were taken. Use p2pavg.data.PeerSampler"
            )
        if data.peer_id != averager.peer_id:
            raise ValueError(
                f"data is a sampler of the peer {data.peer_id!r}: make it with peer_id=averager.peer_id"
            )

    def _join(
        self,
        *,
        rules: Settings,
        outer: Optimizer | None,
        target: float,
        peers_to_start: int | None,
        min_peers: int | None,
        sync_timeout: float,
        delay: int = 0,
        grace: float | None = math.inf,
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
            # Peers of another recipe have another lineage, so they never share a group.
            recipe=self._recipe().digest,
            watch=DriftMonitor(self._averager, every=self._check_every, labels=self._parts.labels),
            delay=delay,
            grace=grace,
        )
        self._training = TrainingRun(
            self._together,
            self._ranks,
            self._parts,
            recipe=self._recipe,
            parameters=self._parameters,
            data=None if self._run_state is None else self._run_state.data,
        )
        self._parting = Parting(
            self._averager,
            self._together,
            # Several ranks take their snapshots together, at the same update; at the end each rank is on its own.
            snapshots=not self._ranks.are_several,
        )
        # Leaving the averager's block stays for the stragglers as `finish` does.
        self._averager.on_end(self._parting)
        # Already here: another optimizer of this loop may wait in its step before this one is stepped first.
        if self._takes_turns:
            self._together.turn.expect(self._together)

    @property
    def _takes_turns(self) -> bool:
        return not (self._is_mixed or self._ranks.are_several)  # ranks would have to give way together

    def _coordination(self, **options: Any) -> RoundCoordinator:
        """Return this optimizer's coordination with the other peers."""
        return RoundCoordinator(self._averager, self._locals(), **options)

    @property
    def _stepped(self) -> Optimizer:
        return self.inner

    @property
    def averager(self) -> Averager:
        """The averager that it was made with."""
        return self._averager

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
    def shares_data(self) -> bool:
        """True if a :class:`~p2pavg.data.SharedSampler` is told of each update."""
        return self._run_state is not None and self._run_state.data is not None

    @property
    def are_several(self) -> bool:
        """True if this peer's ranks each have an optimizer, for their own parts of the parameters."""
        return self._ranks.are_several

    @property
    def averaged_buffers(self) -> frozenset[str]:
        """Names of the model's buffers that are averaged."""
        return frozenset(self._parts.common)

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

        Use it to leave in the midst of a run. At its end, close the averager, or call :meth:`finish`: they also give
        other peers the last updates that these lack.
        """
        # The last word comes first: a peer that is connected, and has neither progress nor a last word, is waited for.
        self._parting.leave()
        self._together.turn.end()
        self._together.run.leave()

    def finish(self) -> None:
        """End this peer's training: stay until the members of its last groups have its last update too, or are gone.

        Leaving the averager's block without an exception does the same; use this if the averager stays open. This peer
        waits for ``match_timeout`` at most without any sign of progress from those that lack the update, and for
        ``match_timeout`` and ``exchange_timeout`` at most in all. It logs for whom it waits. Ctrl-C ends the waiting.
        Then it leaves the run, until :meth:`step` is called again.
        """
        # The progress is withdrawn only after this: it tells peers that lack the update that this peer hands it over.
        stay([self._parting])
        self._together.turn.end()
        self._together.run.leave()

    def _recipe(self) -> Recipe:
        # Frozen parameters are not averaged, so only the recipe notices that two peers hold other ones.
        frozen = [p for group in self.inner.param_groups for p in group["params"] if not p.requires_grad]
        # Peers that freeze other tensors of the same shapes send vectors of the same layout. This tells them apart.
        layout = [[p.requires_grad for p in group["params"]] for group in self.inner.param_groups]
        rules = (
            ("optimizer", type(self).__name__),
            ("inner", kind_of(self.inner)),
            *self._rules,
            ("scheduler", None if self.scheduler is None else type(self.scheduler).__qualname__),
            ("layout", layout),
            *self._parts.rules(frozen),
        )
        if self._run_state is not None and self._run_state.data is not None:
            # All of them have to cover the same samples.
            rules = (*rules, *named("data", tuple(self._run_state.data.plan.identity.items())))
        # Peers of two versions may train with the same settings, and must not share a group.
        if version := self._averager.config.version:
            rules = (*rules, (VERSION, version))
        return Recipe(rules=rules, numbers=self._numbers)

    def _locals(self) -> list[torch.Tensor]:
        return [local_of(parameter) for parameter in self._parameters]

    # ------------------------------------------------------------------ steps

    def _step_once(self, samples: float | None, metrics: Mapping[str, float]) -> StepReport:
        # Before anything waits: an optimizer that this one replaces is in the same process, and would be waited for.
        begins(self, self._averager)
        # The backward pass may have held Python's lock, and other peers take a silent peer for a dead one.
        self._averager.catch_up()
        if self._takes_turns:
            self._together.turn.begin(time.monotonic(), self._together)
        if self._parting.stepping.locked() and self._parting.stepper == threading.get_ident():
            raise RuntimeError(
                "step was called within a step of the same optimizer, such as in on_update, and would wait for itself:"
                " call it after that one has returned"
            )
        # Another thread that closes the averager now must not hand over a state that is half updated.
        with self._parting.stepping:
            self._parting.stepper = threading.get_ident()
            self._parting.resume()
            report = self._step_batch(samples, metrics)
            # An update shows that the run goes on.
            if not report.updated:
                self._check_run_goes_on()
            self._check_job_goes_on()
        return report

    def _step_batch(self, samples: float | None, metrics: Mapping[str, float]) -> StepReport:
        batch = self._batches.add(samples, metrics)
        # Set by a `GradScaler` that calls this `step`: above 0 if the gradients are not finite.
        found_inf = getattr(self, "found_inf", None)
        # One of several backward passes: the gradients are a part of the batch until the last of them.
        if batch is None:
            # The scale may change between two calls, and a sum of passes with different scales cannot be unscaled.
            if found_inf is not None:
                self._batches.drop()
                raise ValueError(
                    "accumulate cannot be used with a GradScaler: call scaler.step once for all passes, with the"
                    " samples of all of them"
                )
            # The round may run on one rank only. Ranks whose reports differ in this take part in other collectives.
            return self._training.report(goes_on=self._any_running())
        if self._run_state is not None and self._run_state.data is not None:
            self._run_state.data.stepped(batch.samples)
        # All ranks leave the batch out if one has to: else their shards would count different batches. An overflow is
        # told before a bad metric: the loss of the same batch often is infinite as well.
        if found_inf is not None and not self._ranks.all_agree(not bool(found_inf)):
            return self._left_out(OVERFLOW)
        if wrong := next(filter(None, self._ranks.gather(batch.wrong)), ""):
            # Warned of ever more rarely: a model that has diverged has a bad metric in every batch.
            if self._leaves_out.is_due(time.monotonic()):
                logger.warning("%s", wrong)
            return self._left_out(wrong)
        # Only gradients that are taken are unscaled. A scaler that did so itself leaves no `grad_scale`.
        self._unscale()
        return self._take_batch(batch.samples, batch.metrics)

    def _left_out(self, reason: str) -> StepReport:
        """Leave this batch out, on all ranks; return the report."""
        # A first batch that is left out begins the run all the same: other peers should see this one.
        self._begin()
        self._check_parameters()
        interrupted = self._find_interruption()
        report = replace(self._skip_batch(), skipped=reason)
        return replace(report, changed=interrupted) if interrupted else report

    def _begin(self) -> None:
        """Begin the run, at the first step."""
        self._training.begin()

    def _check_run_goes_on(self) -> None:
        """Raise RunEndedError, on all ranks, if the run has ended without this peer."""
        # The ranks hear of last words at different times. If one raised alone, the others would wait for it.
        end = self._ranks.as_the_first(self._together.run.run_end)
        if end is not None:
            self._parting.has_ended = True  # it has nothing to say, and nothing to hand over
            self._together.turn.end()
            self._together.run.leave()  # no other peer should wait for one that cannot go on
            raise RunEndedError(end.reason, epoch=end.epoch)

    def _check_job_goes_on(self) -> None:
        """Raise RunEndedError, on all ranks, if another version of the job takes over now.

        That is after an update, which all members of the run take: the other version begins with the same parameters.
        """
        run = self._together.run
        if run.change is None:
            return
        if why := self._ranks.as_the_first(lambda: run.other_job):
            if self._states is not None:
                self._states.save()
            raise RunEndedError(why, epoch=run.lineage.epoch)

    @abstractmethod
    def _take_batch(self, samples: float, metrics: Mapping[str, float]) -> StepReport:
        """Take the present gradients; see :meth:`step`."""

    @abstractmethod
    def _skip_batch(self) -> StepReport:
        """Leave the present gradients out, and go on with a round that runs."""

    def note(self, metrics: Mapping[str, float]) -> None:
        """Add measurements to those of the next :meth:`step`, such as a held-out loss.

        Raises:
            p2pavg.AccumulateError: a measurement is not a number, or there would be more than 15. One that is NaN or
                infinite is left out, with a warning.
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

    def _find_interruption(self) -> str:
        """Return a sentence on the last update if it was interrupted, and fetch the run's state; else an empty text.

        An update that was interrupted, as in a notebook, leaves parameters of which some have taken it and others have
        not, or a lineage without it: this peer would take it again from the log. Only a state of another peer mends
        that.
        """
        if not self._touched.was_interrupted:
            return ""
        self._touched.forget()
        why = "the last update was interrupted, and may be in some of the parameters only"
        if self._states is not None:
            self._states.fetch_state()
            why += ": this peer fetches the run's state"
        logger.warning("%s", why)
        return why

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
        # Measuring costs a copy of the parameters, so it is asked for.
        if not self._measures_updates:
            optimizer.step()
            return
        parts = [local_of(tensor.detach()) for tensor in tensors]
        before = [part.clone() for part in parts]
        optimizer.step()
        # In float32: the difference of two bfloat16 values may be too small for their own precision.
        moved = [after.float() - old.float() for after, old in zip(parts, before, strict=True)]
        self._update_norm = self._ranks.norm(moved)

    def _named(self, error: AccumulateError) -> AccumulateError:
        """Return an error that names the parameter of one that names a tensor by its position."""
        assert error.position is not None
        # The averager knows positions only; behind the parameters come the averaged buffers.
        label = self._parts.labels[error.position]
        what = label if error.position >= len(self._parameters) else f"the gradient of {label}"
        return AccumulateError(
            str(error).replace(f"tensor {error.position}", what, 1), position=error.position
        )

    def _updated(self, report: StepReport, rates: tuple[float, ...]) -> StepReport:
        """Tell the subscribers of an update, taken with these rates, and call ``on_update`` with its report."""
        report = replace(report, learning_rates=rates, update_norm=self._update_norm)
        # Before `on_update`, which is the caller's code and may raise: the update has been taken in any case.
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
        common = CommonState(prefix, tensors, self._parts, optimizer, scheduler, self._training)
        owner = cast(Owner, self)
        self._states = States(self._run_state, self._averager, common, owner, self._together, self._ranks)
        self._states.load_newest()
        self._together.share(self._states)
        self._parting.states = self._states

    def _is_following(self) -> bool:
        """Offer states to other peers; return whether this peer is on its way to the run's present state."""
        if self._states is None:
            return False
        self._states.poll(at_step=True)
        # The first condition is the same on all ranks, so they also reach the collective of the second one together.
        return self._states.must_follow(None, outnumbered=False) and not self._any_running()

    def _must_follow(self, report: StepReport) -> bool:
        """Return whether this peer has to fetch the run's state, by the report of a step."""
        # A round that runs ends first: the others count on this peer, and its update may be what this peer lacks.
        if self._states is None or self._any_running():
            return False
        # Raises if no state could help, such as with another architecture, instead of fetching in vain for ever.
        if report.behind is not None:
            self._states.check_company()
        outnumbered = report.drifted is not None and self._together.watch.outnumbered
        return self._states.must_follow(report.behind, outnumbered=outnumbered)

    def _catch_up(self) -> StepReport:
        """Follow the run for as long as a step may wait; return the report of the update, or of the progress."""
        assert self._states is not None
        # A call may return without an update, so the training loop keeps control, and the next step goes on here.
        until = time.monotonic() + self._together.patience
        while True:
            following = self._states.catch_up(until)
            if not following.caught_up:
                report = self._training.report(goes_on=True)
                return replace(report, catching_up=following.reason or None)
            # Its own batches come in time: it takes part in the next round with a contribution.
            if not self._should_observe(until):
                self._together.run.follow(False)
                return self._training.report(goes_on=True)
            # If the run is fast, a batch would be of an older update when it is done. So this peer is in the next round
            # without one, and if that fails, it is behind by an average again: the loop replays it.
            observed = self._observe()
            if observed is None or observed.updated:
                return observed or self._training.report(goes_on=True)

    def _should_observe(self, until: float) -> bool:
        assert self._states is not None
        states, run = self._states, self._together.run
        # The clock and the survey differ from rank to rank, and observing is a collective.
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

    def _before(self, success: Success) -> None:
        """Note that an update of a round is about to be taken."""
        if self._states is not None:
            self._states.before_update(success)

    def _took(self, success: Success) -> None:
        """Note an update that was taken in a round."""
        if self._states is not None:
            self._states.took(success)

    def _load_inner(self, saved: Mapping[str, Any]) -> None:
        # The groups belong to the training before the loaded state: their members cannot tell whether the run has
        # ended.
        self._together.run.forget_groups()
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


def _warn_of_buffers(parameters: Sequence[torch.Tensor]) -> None:
    """Say that buffers are left out, if the parameters belong to a model that has any."""
    if names := saved_buffers(parameters, modules_around(parameters)):
        logger.warning(
            "the parameters belong to a model with buffers (%s%s), which this optimizer does not know: peers do not"
            " average or compare them, and a peer that joins late does not fetch them. Give state=model",
            ", ".join(names[:MAX_NAMED_BUFFERS]),
            ", .." if len(names) > MAX_NAMED_BUFFERS else "",
        )


def _trained_by(inner: Optimizer) -> list[torch.Tensor]:
    return [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
