"""Local updates: peers train separately for a while, and then take a common step from their common starting point."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.allreduce.vector.metrics import checked_metrics
from p2pavg.base.result import Failed, FailedCode, InProgress, NoPeers, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.batches import Batches, SamplesOf
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.base.state import check_both, check_holds, checked_amount, digest_of, lineage_of, origin_of
from p2pavg.optim.base.wrapper import PeerOptimizer
from p2pavg.optim.catching_up.run_state import StateOption
from p2pavg.optim.coordination.progress import Average
from p2pavg.optim.local.anchor import Anchor, Outer
from p2pavg.optim.local.feedback import ErrorFeedback, feedback_for, warn_of_momentum
from p2pavg.optim.local.local_options import Boundaries, LocalOptions, SyncEvery, fragments_of
from p2pavg.optim.local.outer_steps import OuterSteps
from p2pavg.optim.ranks.mesh import PeerMesh
from p2pavg.optim.ranks.shards import local_of

if TYPE_CHECKING:
    import torch.distributed as dist


# Parameters and optimizer states that are not finite after an inner step.


@torch.no_grad()
def are_finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether all values of the parameters are finite."""
    # One pass and one synchronisation; minimum and maximum propagate NaN. On a CPU this takes a sixteenth of the time
    # of a maximum norm, which was most of the time of a step.
    extremes = [
        torch.stack(torch.aminmax(parameter.detach())).float()
        for parameter in parameters
        if parameter.numel()
    ]
    if not extremes:
        return True
    devices = {found.device for found in extremes}
    found = torch.stack(extremes if len(devices) <= 1 else [pair.cpu() for pair in extremes])
    return bool(found.isfinite().all())


def destroyed(labels: Sequence[str], parameters: Sequence[torch.Tensor]) -> str:
    """Return the name of the first parameter that is not finite, and the number of the others.

    Args:
        labels: names of the parameters; there may be more of them.
    """
    pairs = zip(labels, parameters, strict=False)
    names = [label for label, parameter in pairs if not bool(parameter.isfinite().all())]
    more = f", like {len(names) - 1} other parameters," if len(names) > 1 else ""
    return f"{names[0] if names else 'a parameter'}{more}"


@torch.no_grad()
def mend(optimizer: Optimizer, *, fills_at_first_step: bool) -> None:
    """Remove NaN and infinity from an optimizer's state.

    Args:
        fills_at_first_step: true if the optimizer makes its state at its first step, and not at construction.
    """
    kept = (value for state in optimizer.state.values() for value in state.values())
    tensors = [value for value in kept if isinstance(value, torch.Tensor) and value.is_floating_point()]
    wrong = [tensor for tensor in map(local_of, tensors) if not bool(tensor.isfinite().all())]
    if wrong and fills_at_first_step:
        optimizer.state.clear()  # as before its first step
        return
    for tensor in wrong:  # a state made at construction, e.g. Adagrad's, is not made again if cleared
        tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


# The schedule of a peer's inner steps, for a peer that joins a run.

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


logger = logging.getLogger(__name__)

MAX_RESTORED = 3  # consecutive destroyed steps, after which the others stop waiting for this peer


class LocalUpdates(PeerOptimizer):
    """Takes inner steps locally and, after every ``sync_every`` of them, an outer step with all peers of the run.

    Each peer keeps the *anchor*: the parameters after the last outer step, the same bits for all peers. After
    ``sync_every`` inner steps the *pseudo-gradients* (anchor - parameters) are averaged, weighted by samples. The outer
    optimizer takes a step from the anchor with that average as its gradient, and all peers continue from the result.
    The inner optimizer keeps its state. With SGD of rate 1 as the outer one this is FedAvg;
    :mod:`p2pavg.optim.local.recipes` has others. The scheme is algorithm 1 of Reddi et al. 2021 ("Adaptive Federated
    Optimization").

    With ``delay``, the average is made while the inner steps go on, and with ``fragments``, a part of the model at a
    time, as in Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512). All peers have the same anchor and the same
    outer optimizer's state after each outer step, as without; their parameters differ by their inner steps.

    A round that fails loses nothing: the peer trains on, and its next pseudo-gradient covers everything since the
    anchor. A peer whose anchor differs from most peers' takes the outer steps that it has missed, which the others
    keep, and what it has computed meanwhile counts in its next round. With ``state=False`` it cannot follow:
    :attr:`StepReport.behind` says so, until the peer loads a state. If a parameter is NaN or infinite after an inner
    step, this peer returns to the anchor, with a cleaned inner optimizer state. Its work since the last outer step is
    lost, and :attr:`StepReport.restored` says so.

    Beside the parameters it keeps float32 vectors on their device: the anchor, and the outer optimizer's state (one
    vector of momentum, for DiLoCo). The averager keeps one for the contribution, of a fragment's length. While a round
    runs and the peer trains on, there is one more of this length, unless ``alpha`` is given; also after a round whose
    end this peer does not know.

    Args:
        inner: any torch optimizer of this peer's parameters that needs no closure, or a list of several, each with
            parameters of its own; see :class:`JoinedOptimizer`.
        outer: factory of the outer optimizer. It is given the anchor: float32 copies of the parameters, on their
            devices. With several ``fragments`` a copy may be cut into flat ranges of its elements.
        averager: averager of a run that averages nothing else. A round includes all peers with the same anchor, at most
            64, whatever its ``group_size``. It waits for a peer that does not come until ``match_timeout``.
        sync_every: number of inner steps between two outer steps, H; or a time such as ``"30s"``, for peers of
            different speeds. The same for all peers.
        fragments: number of parts of the model, P, which are averaged in turn: one every ``sync_every / fragments``
            inner steps. They have the same number of elements, and are made of layers; ``model`` tells their names.
        delay: number of inner steps for which a round runs in the background, tau; 0 waits for it. The average is
            applied after so many steps, or with the first later step at which it is there. At the next outer step the
            peer waits for it, ``sync_timeout`` at most. At most ``sync_every / fragments``.
        alpha: share of this peer's own parameters when an average is applied: ``alpha * parameters + (1 - alpha) *
            anchor``. The paper has 0.5 with overlap. ``None`` loses no step: the parameters become the anchor plus the
            steps since the contribution.
        offload: keep the anchor, the outer optimizer's state and the contribution in the CPU's memory.
        scheduler: learning-rate scheduler of ``inner`` that needs no metric; stepped with every inner step.
        proximal: mu of FedProx: adds ``mu * (parameter - anchor)`` to each gradient before an inner step (Li et al.
            2020, "Federated Optimization in Heterogeneous Networks", equation 2). 0 adds nothing.
        feedback: compensates the error of a lossy codec in the pseudo-gradients: an :class:`ErrorFeedback`, or ``True``
            for one of the averager's codec. If not given, sparse codecs (``TopK``) have one with a beta of 0.95, and
            others none. A sparse codec cannot do without. Each fragment has a residual of its own.
        peers_to_start: number of peers that this peer waits for before its first outer step; ``config.min_group_size``
            if not given.
        min_peers: see :class:`AveragedOptimizer`.
        sync_timeout: seconds that a call waits at most for the other peers, and then at most for the round.
        grace: seconds that peers that are due wait for those that still compute. After it a round begins without these,
            if the peers that are due are more than half, and as many as a group needs (``config.min_group_size``). The
            samples of a peer that was left out count in its next round. ``None``: with ``delay``, the time of so many
            of this peer's batches, and 10 s at least, since the average is not needed earlier; without it, or with
            ``state=False``, for as long as these peers are expected, because a peer that is left out would not come
            back.
        process_group: for a peer of several ranks that hold parts of the parameters; see :class:`AveragedOptimizer`. It
            cannot be combined with ``delay``, and not with ``fragments`` if ranks hold the same parameters.
        on_update: called after every outer step, with its report.
        model, buffers, check_every, state, batch_size, samples_of, accumulate, measure_updates: see
            :class:`AveragedOptimizer`; the running statistics are averaged at the outer steps, and the anchors are
            compared. ``feedback`` cannot be combined with averaged buffers. A peer that fetches the run's state begins
            at the anchor, with its own inner optimizer.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        outer: Outer,
        averager: Averager,
        *,
        sync_every: SyncEvery,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
        offload: bool = False,
        scheduler: LRScheduler | None = None,
        proximal: float = 0.0,
        feedback: ErrorFeedback | bool | None = None,
        peers_to_start: int | None = None,
        min_peers: int | None = None,
        sync_timeout: float = 600.0,
        grace: float | None = None,
        process_group: dist.ProcessGroup | PeerMesh | None = None,
        on_update: Callable[[StepReport], None] | None = None,
        model: torch.nn.Module | None = None,
        buffers: Collection[str] | None = None,
        check_every: int | None = 10,
        state: StateOption = None,
        batch_size: float | None = None,
        samples_of: SamplesOf | None = None,
        accumulate: int = 1,
        measure_updates: bool = False,
    ) -> None:
        super().__init__(
            inner,
            averager,
            scheduler=scheduler,
            on_update=on_update,
            model=model,
            buffers=buffers,
            check_every=check_every,
            process_group=process_group,
            state=state,
            batches=Batches(batch_size=batch_size, samples_of=samples_of, accumulate=accumulate),
            measure_updates=measure_updates,
        )
        self._options = LocalOptions(
            sync_every=sync_every, fragments=fragments, delay=delay, alpha=alpha, proximal=proximal
        )
        chosen = feedback_for(averager.config.codec, feedback)
        self._check_company(chosen, process_group)
        if grace is not None:
            grace = checked_amount("grace", grace)
        elif not self._options.overlaps or state is False:  # else that of the delay
            grace = math.inf
        names, shapes = self._parts.labels[: len(self._parameters)], [tuple(t.shape) for t in self._locals()]
        pieces = fragments_of(names, shapes, fragments)
        self._anchor = Anchor(self._parameters, outer, pieces, offload=bool(offload))
        self._outer_steps = self._make_outer_steps(chosen)
        self._has_feedback = chosen is not None
        warn_of_momentum(averager.config.codec, self.outer)
        self._join(
            rules=(*self._options.rules(names, pieces), ("outer", type(self.outer).__qualname__)),
            outer=self.outer,
            target=math.inf,
            peers_to_start=peers_to_start,
            min_peers=min_peers,
            sync_timeout=sync_timeout,
            delay=delay,
            grace=grace,
        )
        self._boundaries = Boundaries(self._options.interval)
        self._rates = self.learning_rates
        """The rates of the last inner step."""
        self._restored = 0
        """Inner steps since the last one that was not destroyed."""
        # After a destroyed step, a state that is made at the first step may be cleared. A
        # state that exists now would not be made again.
        self._fills_at_first_step = not self.inner.state
        # States are shared after this, since peers have to know of which tensors a state is.
        averager.declare([*self._outer_steps.like, *self._parts.averaged])
        self._share_states("anchor/", self._anchor.tensors, self.outer, None)

    def _check_company(self, feedback: ErrorFeedback | None, process_group: object) -> None:
        """Raise ValueError for arguments that exclude each other."""
        if self._averager.config.recheck:
            raise ValueError("local updates cannot be computed again: leave recheck out of the config")
        if feedback is not None and self._parts.averaged:
            raise ValueError("feedback cannot be combined with averaged buffers of a model; give buffers=[]")
        if process_group is not None and self._options.delay:
            raise ValueError("delay cannot be used with a process_group")
        if self._ranks.hold_copies and self._options.fragments > 1:
            raise ValueError(
                "fragments must be 1 if ranks of this peer hold the same parameters, as with tensor parallelism"
            )
        if process_group is not None and self._averager.config.participation is not None:
            # The participants are drawn for every rank separately.
            raise ValueError("a config with participation cannot be used with a process_group")

    def _make_outer_steps(self, feedback: ErrorFeedback | None) -> OuterSteps:
        common = (self._options, self._ranks, self._change)
        return OuterSteps(self._anchor, self._parts, feedback, *common)

    @property
    def outer(self) -> Optimizer:
        """The outer optimizer. Its parameters are the anchor's tensors, or the pieces of its fragments."""
        return self._anchor.optimizer

    @property
    def anchor(self) -> list[torch.Tensor]:
        """A copy of the parameters after the last outer step: float32, in the order of ``inner``'s parameters."""
        return [tensor.clone() for tensor in self._anchor.tensors]

    @property
    def _samples(self) -> float:
        """This peer's samples behind the next pseudo-gradient."""
        return self._outer_steps.samples[self._fragment]

    @property
    def _fragment(self) -> int:
        """The fragment of the next outer step."""
        return self.epoch % self._anchor.fragments

    # ------------------------------------------------------------------ steps

    def _take_batch(self, samples: float, metrics: Mapping[str, float]) -> StepReport:
        # All that may raise comes before the inner step, so after an error nothing has changed.
        weight, measured = checked_amount("samples", samples), checked_metrics(metrics)
        self._outer_steps.metrics.check_room(self._training.with_speed(measured))
        self._ranks.check_batch([], weight)
        self._begin()
        self._check_parameters()
        interrupted = self._find_interruption()
        report = self._take_or_follow(weight, measured)
        return replace(report, changed=interrupted) if interrupted else report

    def _take_or_follow(self, weight: float, measured: Mapping[str, float]) -> StepReport:
        if self._is_following():
            return self._catch_up()
        report = self._step(weight, measured)
        return self._catch_up() if self._must_follow(report) else report

    def _begin(self) -> None:
        # The program has set other parameters since this optimizer was made, e.g.
        # by loading a model. The run begins with those.
        if self._training.begin():
            self._anchor.take()

    def _skip_batch(self) -> StepReport:
        if self._is_following():
            return self._catch_up()
        # There is no inner step, but the result of a round that has ended must not wait for the next good batch.
        if self._any_running() and self._outer_steps.may_take:
            return self._take(self._together.poll())
        return self._training.report(goes_on=self._running)

    def _step(self, weight: float, measured: Mapping[str, float]) -> StepReport:
        # The parameters that were sent are kept before they change. The update
        # adds only the inner steps that came after them.
        self._outer_steps.before_inner_step()
        self._anchor.pull(self._options.proximal)
        # The report names the rates of this step. The scheduler sets other ones below.
        self._rates = self.learning_rates
        self.inner.step()
        if self._zeroing is not None:
            self._zeroing.stepped()
        # One rank with a destroyed shard takes all ranks of this peer back to the
        # anchor, or the shards would not belong together.
        if not self._ranks.all_agree(are_finite(self._locals())):
            return self._restore()
        self._restored = 0
        self._boundaries.stepped(time.monotonic())
        self._outer_steps.stepped(weight, measured)
        self._together.computed(weight)
        running = self._any_running()
        # An interval may be a time, and the ranks' clocks differ. All of them
        # must begin the same round, so the first decides.
        due = self._ranks.as_the_first(lambda: self._is_due(running=running))
        # A peer whose round runs in the background keeps no other peer waiting, although it computes on.
        waiting = due or (running and self._options.overlaps)
        self._together.run.publish(self._samples, waiting=waiting)
        self._step_scheduler()
        if running:  # in the background, or its call ended early, by sync_timeout or Ctrl-C
            return self._collect(due=due)
        return self._attempt() if due else self._training.report(goes_on=False)

    def _is_due(self, *, running: bool) -> bool:
        if self._boundaries.is_due(time.monotonic()):
            return True
        # A peer that joined in the middle of an interval would make all others wait for a whole one. With a round
        # in the background it is ready for them already.
        return not (running and self._options.overlaps) and self._together.run.is_called

    def _collect(self, *, due: bool) -> StepReport:
        """Take the running round's result, if it is there and not too early; at a boundary, wait for it."""
        # An averager has one round at a time, so at a boundary the running one has to end before the next one begins.
        if due:
            report = self._take(self._together.average())
        elif self._outer_steps.may_take:
            overlaps = self._options.overlaps
            report = self._take(self._together.look_on() if overlaps else self._together.poll())
        else:
            return self._training.report(goes_on=True)
        # Only in the background does a round begin in the step that takes the result of the one before.
        if not (due and self._options.overlaps and report.updated):
            return report
        if not self._boundaries.is_due(time.monotonic()):
            return (
                report  # the group was complete late: its slowest member is due later than this peer expected
            )
        self._together.run.publish(self._samples, waiting=True)  # the next round begins with the same step
        following = self._attempt()
        return following if following.updated else report

    def _attempt(self) -> StepReport:
        """Average with the others, if enough of them are there: now, or in the background."""
        decision = self._ranks.as_the_first(self._together.decide_when_all_are_ready)
        if not isinstance(decision, Average):
            return self._training.report(goes_on=False)
        now = time.monotonic()
        tensors, weight, means = self._outer_steps.contribute(self._fragment, now)
        self._averager.clear()  # drops a failed round's contribution: the new pseudo-gradients contain it
        # A peer that met no group for long has more samples than the run lets count. An averager refuses more.
        weight = min(weight, self._averager.config.most_weight)
        self._averager.accumulate(tensors, weight=weight, metrics=self._training.with_speed(means))
        del tensors  # the averager has a copy
        # The next interval runs while this round does, so it begins with the contribution.
        # Without overlap it begins when the round has ended.
        if self._options.overlaps:
            self._boundaries.passed(now)
        # What was accumulated becomes the average of this peer alone.
        if self._together.goes_alone(decision.peers):
            return self._take(self._together.alone())
        if not self._options.overlaps:
            return self._take(self._together.average(decision.peers))
        result = self._together.begin_round(decision.peers)
        if not isinstance(result, InProgress):
            return self._take(result)
        return self._training.report(result, goes_on=True)

    @torch.no_grad()
    def _restore(self) -> StepReport:
        """Return to the anchor after an inner step that made a parameter NaN or infinite."""
        # The names are read first: the next line replaces the values.
        wrong = destroyed(self._parts.labels, self._locals())
        lost = self._outer_steps.lose()
        mend(self.inner, fills_at_first_step=self._fills_at_first_step)
        self._restored += 1
        reason = (
            f"{wrong} was NaN or infinite after an inner step: this peer is back at the anchor, and"
            f" {lost:g} samples since the last outer step are lost"
        )
        logger.warning("%s", reason)
        # No sample of this peer is left to count, and it is not ready for a round.
        if self._restored < MAX_RESTORED:
            self._together.run.publish(0.0, waiting=False)
        else:
            self._together.run.leave()  # until a step succeeds, no other peer should wait for this one
        self._step_scheduler()
        return replace(self._training.report(goes_on=self._any_running()), restored=reason)

    # ------------------------------------------------------------------ rounds

    def _take(self, result: RoundResult) -> StepReport:
        # Each rank averages its shard in a round of its own, and these may end
        # differently. The update is taken on all ranks or on none.
        kinds = set(self._ranks.gather(type(result).__name__))
        goes_on = InProgress.__name__ in kinds
        if Success.__name__ in kinds and len(kinds) > 1:
            self._averager.clear()  # otherwise a later update would hold different steps in different shards
            result = Failed(
                reason="another rank of this peer has no result",
                code=FailedCode.OTHER_RANK,
                contribution_used=True,
            )
        if not isinstance(result, Success):
            self._missed(result)
            return self._training.report(result, goes_on=goes_on)
        assert isinstance(result.averaged, list)
        # Read before the update: the outer optimizer may change the average in place, and its own
        # hyperparameters. The update also forgets what was sent.
        averaged, numbers, now = digest_of(result.averaged), self._anchor.numbers, time.monotonic()
        sent = self._outer_steps.sent
        # If the call is interrupted from here on, the next one finds the mark: the log would bring this step again.
        self._before(result)
        self._touched.begin_update()
        norm = self._outer_steps.update(self._fragment, result, result.averaged, self._averager.peer_id)
        self._training.took(result, numbers, averaged, self._anchor.tensors)
        self._touched.note()
        if not self._options.overlaps:
            self._boundaries.passed(now)
        elif sent is not None and result.exchange_duration:
            # The group was complete at this moment, the same one for all members.
            # So their next intervals end together.
            self._boundaries.align(sent.at + result.duration - result.exchange_duration)
        self._together.run.publish(self._samples, waiting=False)
        try:
            return self._updated(self._training.report(result, norm, goes_on=False), self._rates)
        finally:
            # Also if `on_update` raises: the update is taken, and peers that lack it need its average. This may raise
            # itself, if the state cannot be saved. The update is noted and told by then.
            self._took(result)

    def _updated(self, report: StepReport, rates: tuple[float, ...]) -> StepReport:
        return super()._updated(replace(report, outer_rate=self._anchor.rate), rates)

    def _missed(self, result: RoundResult) -> None:
        """Note that there is no result, or not yet: the next attempt follows after a whole interval.

        In the background, this peer looks for a group until it finds one: the others may be at another step.
        """
        if isinstance(result, InProgress):
            # This call has waited for `sync_timeout`. The peer computes a whole interval before it waits again.
            if self._boundaries.is_due(time.monotonic()):
                self._boundaries.passed(time.monotonic())
            return
        # The work is not lost: the next pseudo-gradient contains it.
        self._outer_steps.missed(result)
        if not self._options.overlaps:
            self._boundaries.passed(time.monotonic())
        elif isinstance(result, NoPeers):
            self._boundaries.again()

    # ------------------------------------------------------------------ states of other peers

    def adopted(self) -> None:
        """See :class:`~p2pavg.optim.catching_up.following.Owner`."""
        # What this peer has computed belongs to the anchor that was replaced.
        self._averager.clear()
        self._anchor.give()
        self._outer_steps.forget()
        self._boundaries.passed(time.monotonic())
        # The schedule counts inner steps, so it stands where the other peers' schedules are.
        advance(self.scheduler, self.epoch * self._options.interval.steps)

    @torch.no_grad()
    def replay(self, averaged: list[torch.Tensor], success: Success) -> None:
        """See :class:`~p2pavg.optim.catching_up.following.Owner`. The inner steps of this peer count in a later
        round."""
        digest, numbers = digest_of(averaged), self._anchor.numbers
        self._touched.begin_update()
        norm = self._outer_steps.update(
            self._fragment, success, averaged, self._averager.peer_id, replayed=True
        )
        self._boundaries.align(time.monotonic())  # the others have just taken their last one
        self._training.replayed(success, numbers, digest, self._anchor.tensors)
        self._touched.note()
        advance(self.scheduler, self.epoch * self._options.interval.steps)
        self._updated(self._training.report(success, norm, goes_on=True), self.learning_rates)

    def own_state(self) -> dict[str, Any]:
        """See :class:`~p2pavg.optim.catching_up.following.Owner`."""
        saved = self._state_dict()
        names = ("inner", "scheduler", "feedback", "steps", "samples")
        return {name: saved[name] for name in names} | {
            "parameters": [local_of(parameter).detach() for parameter in self._parameters]
        }

    @torch.no_grad()
    def load_own(self, saved: Mapping[str, Any]) -> None:
        """See :class:`~p2pavg.optim.catching_up.following.Owner`."""
        check_both("scheduler", saved, self.scheduler)
        check_both("feedback", saved, self._has_feedback or None)
        if [tuple(t.shape) for t in saved["parameters"]] != [tuple(p.shape) for p in self._locals()]:
            raise ValueError("it has other parameters")
        # This refuses a state that does not fit, before the inner optimizer and the parameters change.
        self._outer_steps.load(saved)
        self._boundaries.passed(time.monotonic(), steps=int(saved["steps"]))
        self._load_inner(saved)
        for parameter, kept in zip(self._locals(), saved["parameters"], strict=True):
            parameter.copy_(kept)

    def _state_dict(self) -> dict[str, Any]:
        return (
            self._saved()
            | self._outer_steps.saved()
            | {
                "peer_id": self._averager.peer_id,
                "outer": self.outer.state_dict(),
                "anchor": self.anchor,
                "steps": self._boundaries.steps,
                "parameters": digest_of(self._locals()).hex(),
            }
        )

    @torch.no_grad()
    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Both raise if the state is malformed.
        lineage = lineage_of(state)
        origin_of(state)
        check_holds(state, "inner", "outer", "anchor", "steps", "samples", "peer_id")
        check_both("scheduler", state, self.scheduler)
        check_both("feedback", state, self._has_feedback or None)
        # The anchor and the outer optimizer are the run's. Residuals, samples and
        # inner steps belong to the peer that saved them.
        is_mine = state["peer_id"] == self._averager.peer_id
        self._anchor.check(state["anchor"])
        # Loads that may raise come first, before the anchor and the lineage change.
        steps = int(state["steps"]) if is_mine else 0
        if is_mine:
            self._outer_steps.load(state)
        else:
            self._outer_steps.forget()
        self._load_inner(state)
        self.outer.load_state_dict(state["outer"])
        self._anchor.load(state["anchor"])
        # Without its inner steps, this peer begins at the anchor.
        if not is_mine:
            self._anchor.give()
        self._boundaries.passed(time.monotonic(), steps=steps)
        if not is_mine:
            # The anchor's, which were given to the parameters above.
            state = {name: value for name, value in state.items() if name != "parameters"}
        if lineage.epoch == 0 and not steps:  # other parameters at the next step begin the run
            state = {**state, "parameters": digest_of(self._locals()).hex()}
        self._training.load(state, lineage)
        self._touched.forget()
