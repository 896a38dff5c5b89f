"""Large-batch training: peers accumulate gradients together and take one common optimizer step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.allreduce.vector.accumulation import AVERAGED_DTYPES
from p2pavg.base.errors import AccumulateError, P2PAvgError
from p2pavg.base.result import Failed, FailedCode, InProgress, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.batches import Batches, SamplesOf
from p2pavg.optim.base.recipe import hyperparameters
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.base.state import check_both, check_holds, checked_amount, digest_of, lineage_of, origin_of
from p2pavg.optim.base.touched import TouchedCheck
from p2pavg.optim.base.wrapper import PeerOptimizer
from p2pavg.optim.catching_up.run_state import StateOption
from p2pavg.optim.coordination.ending import GrowingPauses
from p2pavg.optim.coordination.progress import Average
from p2pavg.optim.large_batch.rechecking import Rechecker, Recompute
from p2pavg.optim.ranks.mesh import PeerMesh
from p2pavg.optim.ranks.shards import local_of, spread_like

if TYPE_CHECKING:
    import torch.distributed as dist


logger = logging.getLogger(__name__)


class AveragedOptimizer(PeerOptimizer):
    """Steps a torch optimizer with gradients that are averaged over the peers of a run.

    Every peer computes batches of its own and calls :meth:`step` after each backward pass. When the peers together have
    computed ``target_batch_size`` samples, their gradients are averaged, weighted by samples, and each peer takes the
    same step. The parameters of all peers stay identical to the last bit (on machines of one kind, see
    :mod:`p2pavg.optim.base.state`). A round that fails loses nothing: the accumulated gradients are kept for the next
    one.

    All peers of a run begin with the same parameters, optimizer and schedule. They take each update with exactly the
    same hyperparameters: a learning rate that is set by hand has to be a function of :attr:`epoch`, and is set in
    ``on_update``, since one call of :meth:`step` may take two updates. A peer differs from most others if it began with
    other parameters, stepped with other settings or missed a round. It fetches the run's state from the others then,
    within :meth:`step`: see docs/how-to/share-states.md. With ``state=False`` it cannot follow the run, and
    :attr:`StepReport.behind` says so, until the peer loads a state that another peer saved. The algorithm is
    synchronous data-parallel training with a fixed batch size, to which any peer may contribute, as in Ryabinin et al.
    2021 ("Distributed Deep Learning in Open Collaborations").

    Args:
        inner: any torch optimizer that needs no closure, or a list of several, each with parameters of its own; see
            :class:`JoinedOptimizer`. The gradients of its parameters that require one are averaged; a missing gradient
            counts as zeros.
        averager: averager of a run that averages nothing else. A round includes all peers with the same parameters, at
            most 64, whatever its ``group_size``. It waits for a peer that does not come until ``match_timeout``.
            Anything accumulated in the averager before is discarded.
        target_batch_size: number of samples, of all peers together, for one update.
        scheduler: learning-rate scheduler of ``inner`` that needs no metric; stepped once per update.
        max_grad_norm: L2 norm to which the averaged gradient is clipped, if given.
        max_samples_per_peer: samples after which this peer computes no more until the update, if given. If the peers'
            limits add up to the target, the composition of every update is fixed.
        overlap: average in the background while the next batches are computed. Those batches' gradients belong to the
            parameters before the update, so they are up to one update stale.
        peers_to_start: number of peers that this peer waits for before its first update; ``config.min_group_size`` if
            not given, or ``min_peers``. Without it, two peers that start early would leave the others behind. After one
            wait of ``sync_timeout``, this peer computes on and looks for them at each step.
        min_peers: number of peers that an update needs; ``config.min_group_size`` if not given. With 1, a peer that is
            alone takes updates by itself from the first batch on, and others join later (with ``state``). Two peers
            that lose each other then go on separately. When they meet, the one with fewer updates fetches the other's
            state.
        sync_timeout: seconds that a call waits at most for the other peers, and then at most for the round.
        process_group: for a peer of several ranks that hold parts of the parameters: a group of ``torch.distributed``
            if these are shards (FSDP), with an averager of its :func:`shard_config` on each rank; or a
            :class:`PeerMesh`, see :func:`divided_optimizer`. Either all ranks update, or none.
        on_update: called after every update, with its report.
        model: module whose parameters ``inner`` trains. With it, peers also compare the frozen parameters outside
            ``inner``. The running statistics of normalisation layers are averaged with the gradients (the mean over the
            batches of an update). A buffer that changes without being averaged is an error. Without it, this peer
            ignores buffers, and frozen parameters outside ``inner``.
        buffers: names of ``model``'s buffers to average, instead of the running statistics.
        check_every: number of updates between two comparisons of the peers' parameter digests; ``None`` or 0 for never.
        state: a peer that begins late or was left behind fetches the run's state from others, and offers it to them.
            If not given, that is the state of the parameters and their optimizer. Give the model if it has buffers; it
            stands for ``RunState(model)``, and counts as ``model``. Give a :class:`RunState` for checkpoints and
            limits. ``False`` shares no states: a peer that is behind takes no further part then.
        batch_size: number of samples behind each call of :meth:`step` that names none.
        samples_of: function that returns the number of samples behind a call of :meth:`step` that names none.
        accumulate: number of calls of :meth:`step`, each after a backward pass, whose gradients autograd adds up, as
            for a loop that divides its loss by this number. All calls but the last one of these only count their
            samples, and :meth:`zero_grad` between them changes nothing.
        measure_updates: measure :attr:`StepReport.update_norm`. It costs a copy of the parameters during each update.
        recompute: computes another peer's gradients again, for spot checks; it goes with
            :attr:`AveragingConfig.recheck`. It is called with that peer's id, the number of updates before, and its
            samples, and returns the gradients of the mean loss over these samples, in the order of ``inner``'s
            parameters. So the batches of all peers have to follow from these arguments. It may use the model, and
            leaves no trace but in its gradients and averaged buffers.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    _dtypes = AVERAGED_DTYPES
    _counts_samples = True

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        averager: Averager,
        *,
        target_batch_size: float,
        scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = None,
        max_samples_per_peer: float | None = None,
        overlap: bool = False,
        peers_to_start: int | None = None,
        min_peers: int | None = None,
        sync_timeout: float = 600.0,
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
        recompute: Recompute | None = None,
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
        codec = averager.config.codec
        if codec.needs_feedback:
            raise ValueError(
                f"AveragedOptimizer cannot use the codec {codec.name}: what it leaves out of a gradient would be lost."
                " Use local updates, such as diloco or sparseloco, which keep it for the next round"
            )
        self._max_grad_norm = (
            None if max_grad_norm is None else checked_amount("max_grad_norm", max_grad_norm)
        )
        self._limit = (
            math.inf
            if max_samples_per_peer is None
            else checked_amount("max_samples_per_peer", max_samples_per_peer)
        )
        if overlap and process_group is not None:
            raise ValueError("overlap cannot be used with a process_group")
        if averager.config.participation is not None and process_group is not None:
            # The participants are drawn for every rank separately: of one batch, only some shards would count.
            raise ValueError("a config with participation cannot be used with a process_group")
        self._overlap = overlap
        self._rechecker = Rechecker(recompute, averager, overlap=overlap or process_group is not None)
        target = checked_amount("target_batch_size", target_batch_size)
        self._join(
            rules=(
                ("target_batch_size", target),
                ("max_grad_norm", self._max_grad_norm),
                ("overlap", bool(overlap)),
            ),
            outer=None,
            target=target,
            peers_to_start=peers_to_start,
            min_peers=min_peers,
            sync_timeout=sync_timeout,
        )
        self.states_loaded = 0
        """Number of states of other peers that have replaced this peer's."""
        # Shards are moved by the library that made them.
        # The check takes each change of a tensor that is no update for the loop's.
        is_whole = not self._ranks.are_several and not any(hasattr(p, "to_local") for p in self._parameters)
        if is_whole:
            self._touched = TouchedCheck(self._parameters)
        self._tells_touched = GrowingPauses()
        # A peer that has computed no batch yet may observe a round, and share states: both need the shapes.
        averager.declare(self._contribution())
        self._share_states("parameter/", self._parameters, self.inner, self.scheduler)

    def _take_batch(self, samples: float, metrics: Mapping[str, float]) -> StepReport:
        self._begin()
        self._check_parameters()
        # Looked at before the batch: what this call does to the parameters itself is right.
        changed = self._changed()
        report = self._take_or_follow(samples, metrics)
        self.note_parameters()
        return replace(report, changed=changed) if changed else report

    def _take_or_follow(self, samples: float, metrics: Mapping[str, float]) -> StepReport:
        if self._is_following():
            return self._catch_up()
        report = self._step(samples, metrics)
        return self._catch_up() if self._must_follow(report) else report

    def note_parameters(self) -> None:
        """Note that the parameters are what they should be; see :attr:`StepReport.changed`."""
        self._touched.note()

    def _changed(self) -> str:
        """Return a sentence on parameters that something else than an update has changed; empty if there are none."""
        if why := self._find_interruption():
            return why
        if (position := self._touched.touched()) is None:
            return ""
        why = (
            f"{self._parts.labels[position]} was changed since the last step. Peers drift apart unless all change"
            " their parameters alike after each update: do it in on_update"
        )
        if self._tells_touched.is_due(time.monotonic()):
            logger.warning("%s", why)
        return why

    def _skip_batch(self) -> StepReport:
        if self._is_following():
            return self._catch_up()
        return self._collect() if self._any_running() else self._training.report(goes_on=False)

    def _step(self, samples: float, metrics: Mapping[str, float]) -> StepReport:
        self._parts.mend()
        measured, gradients = self._training.with_speed(metrics), self._contribution()
        # All ranks accumulate this batch or none does: the shards of one update must be of the same batches.
        self._ranks.check_batch(gradients, samples)
        try:
            self._ranks.on_all(lambda: self._averager.accumulate(gradients, weight=samples, metrics=measured))
        except P2PAvgError as error:
            if self._ranks.are_several:
                self._averager.clear()  # only some ranks have accumulated this batch
            if isinstance(error, AccumulateError) and error.position is not None:
                raise self._named(error) from None
            raise
        if self._zeroing is not None:
            self._zeroing.stepped()
        self._together.computed(samples)
        # A round that runs is first asked for its end: an update that is taken now changes what is due.
        before = self._collect() if self._any_running() else None
        if before is not None and self._any_running():
            return before  # this batch belongs to the next round
        # The others hear of this batch before this peer decides: it may be the one that completes the update.
        self._together.run.publish(self._averager.weight, waiting=self._averager.weight >= self._limit)
        decision = self._ranks.as_the_first(self._together.decide_when_all_are_ready)
        report = (
            self._average(decision.peers)
            if isinstance(decision, Average)
            else self._training.report(goes_on=False)
        )
        # One call may end a round and begin the next one. The report of the update is the one that the loop must see.
        return report if before is None or report.updated else before

    def _contribution(self) -> list[torch.Tensor]:
        """Return the gradients, then the averaged buffers."""
        # A parameter that no layer used in this batch has no gradient. All peers send the same tensors.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return [local_of(tensor) for tensor in (*gradients, *self._parts.averaged)]

    def _average(self, peers: int) -> StepReport:
        if self._together.goes_alone(peers):
            return self._take(self._together.alone())
        if self._overlap:
            self._together.begin_round(peers)
            return self._collect()
        return self._take(self._together.average(peers))

    def _collect(self) -> StepReport:
        """Report on the running round; wait for its end if this peer may not compute more before it."""
        if not self._running:  # a rank without a round follows the rank that has one
            reason = "the round of another rank of this peer is still running"
            return self._take(Failed(reason=reason, code=FailedCode.OTHER_RANK))
        # Without overlap, a round still runs here only if its call ended early: by
        # `sync_timeout`, by Ctrl-C, or on another rank.
        must_wait = not self._overlap or self._averager.weight >= self._limit
        return self._take(self._together.average() if must_wait else self._together.poll())

    def _take(self, result: RoundResult) -> StepReport:
        # Each rank averages its shard in a round of its own, and these may end differently.
        kinds = set(self._ranks.gather(type(result).__name__))
        goes_on = InProgress.__name__ in kinds
        if Success.__name__ in kinds and len(kinds) > 1:
            self._averager.clear()  # otherwise a later update would hold different batches in different shards
        if not isinstance(result, Success):
            return self._training.report(result, goes_on=goes_on)
        if len(kinds) > 1:
            return self._training.report(
                goes_on=goes_on,
                result=Failed(
                    reason="another rank of this peer has no result",
                    code=FailedCode.OTHER_RANK,
                    contribution_used=True,
                ),
            )
        assert isinstance(result.averaged, list)
        # Read before the update, which may change the averages in place. The scheduler changes the rates after it.
        averaged, numbers, rates = (
            digest_of(result.averaged),
            hyperparameters(self.inner),
            self.learning_rates,
        )
        if not self._overlap and self._averager.peer_id not in {*result.peers, *result.observers}:
            self._averager.clear()  # the others went on without it: its gradients belong to the parameters before
        # At the parameters at which the gradients were computed.
        rechecks = self._rechecker.check(result, self.epoch, [*self._parameters])
        # If the call is interrupted from here on, the next one finds the mark and fetches the run's state.
        self._before(result)
        self._touched.begin_update()
        norm = self._update(result.averaged, result)
        self._training.took(result, numbers, averaged, self._parameters)
        self._step_scheduler()
        # Last: an interruption before it leaves the mark, since the schedule belongs to the update.
        self.note_parameters()
        # Batches that were computed while the round ran count for the next update.
        self._together.run.publish(self._averager.weight, waiting=False)
        try:
            report = replace(self._training.report(result, norm, goes_on=False), rechecks=rechecks)
            return self._updated(report, rates)
        finally:
            # Also if `on_update` raises: the update is taken, and peers that lack it need its average.
            self._took(result)

    # ------------------------------------------------------------------ states of other peers

    def adopted(self) -> None:
        """See :class:`~p2pavg.optim.catching_up.following.Owner`."""
        self.states_loaded += 1
        self.note_parameters()
        # Gradients that were accumulated belong to the parameters that were replaced.
        self._averager.clear()
        self.zero_grad()

    def replay(self, averaged: list[torch.Tensor], success: Success) -> None:
        """See :class:`~p2pavg.optim.catching_up.following.Owner`."""
        digest, numbers, rates = digest_of(averaged), hyperparameters(self.inner), self.learning_rates
        self._averager.clear()  # gradients at the parameters that this update replaces
        self._touched.begin_update()
        norm = self._update(averaged, success)
        self._training.replayed(success, numbers, digest, self._parameters)
        self._step_scheduler()
        self.note_parameters()
        self._updated(self._training.report(success, norm, goes_on=True), rates)

    def _observe(self) -> StepReport:
        """Be in the run's next round without a contribution; return its report. See :class:`PeerOptimizer`."""
        return self._take(self._together.observe())

    def own_state(self) -> dict[str, Any]:
        """See :class:`~p2pavg.optim.catching_up.following.Owner`."""
        return {}

    def load_own(self, saved: Mapping[str, Any]) -> None:
        """See :class:`~p2pavg.optim.catching_up.following.Owner`."""

    def _update(self, averaged: list[torch.Tensor], success: Success) -> float:  # noqa: ARG002 - for subclasses
        """Apply the averaged gradient and buffers of a round; return the gradient's L2 norm."""
        count = len(self._parameters)
        self._parts.take(averaged[count:])
        # Ranks that hold copies of a parameter take the bits of one of them, and the norm counts it once.
        gradients = self._ranks.settle(averaged[:count])
        norm = self._ranks.norm(gradients)
        if self._max_grad_norm is not None:
            clip(gradients, self._max_grad_norm, norm)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = spread_like(parameter, gradient)
        self._change(self._parameters, self.inner)
        self.zero_grad()
        return norm

    def _state_dict(self) -> dict[str, Any]:
        return self._saved() | {"parameters": digest_of(self._locals()).hex()}

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        # These raise if the state is malformed. Nothing has changed then.
        lineage = lineage_of(state)
        origin_of(state)
        check_holds(state, "inner", "parameters")
        check_both("scheduler", state, self.scheduler)
        self._training.plan_in(state)
        self._load_inner(state)
        self._training.load(state, lineage)
        # The parameters may be loaded after this call, so they must not be taken for changed.
        self._touched.forget()


@torch.no_grad()
def clip(gradients: Sequence[torch.Tensor], limit: float, norm: float) -> None:
    """Scale gradients of this L2 norm down to one of at most ``limit``, as ``torch.nn.utils`` does."""
    factor = torch.clamp(limit / (torch.tensor(norm, dtype=torch.float32, device="cpu") + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
