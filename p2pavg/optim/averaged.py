"""Large-batch training: peers accumulate gradients together, and take one optimizer step for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.blocking import Averager
from p2pavg.errors import P2PAvgError
from p2pavg.optim.digest import digest_of
from p2pavg.optim.progress import Average
from p2pavg.optim.recipe import hyperparameters
from p2pavg.optim.report import StepReport, report_of
from p2pavg.optim.shards import local_of, spread_like, whole_of
from p2pavg.optim.state import check_both, check_holds, checked_amount, lineage_of, origin_of
from p2pavg.optim.wrapper import PeerOptimizer
from p2pavg.result import Failed, InProgress, RoundResult, Success

if TYPE_CHECKING:
    import torch.distributed as dist


class AveragedOptimizer(PeerOptimizer):
    """Steps a torch optimizer with gradients that are averaged over the peers of a run.

    Every peer computes batches of its own and calls :meth:`step` after each backward pass. When the peers together
    have computed ``target_batch_size`` samples, their gradients are averaged, weighted by samples, and each takes the
    same step: the parameters of all peers stay identical to the last bit (on machines of one kind, see
    :mod:`p2pavg.optim.lineage`). A round that fails costs nothing: what was accumulated still is, and counts.

    All peers of a run begin with the same parameters, optimizer and schedule, and take each update with the same
    hyperparameters, to the last bit: a learning rate that is set by hand has to be a function of :attr:`epoch`. One
    that differs from most peers, because it began otherwise, stepped otherwise or missed a round, cannot follow:
    :attr:`StepReport.behind` says so, until it loads a state that another peer saved. The algorithm is synchronous data
    parallel training with a batch of a fixed size, whoever computes it, as in Ryabinin et al. 2021 ("Distributed Deep
    Learning in Open Collaborations").

    Args:
        inner: any torch optimizer that needs no closure; the gradients of its parameters that require one are what is
            averaged. One that has no gradient counts as zeros.
        averager: of a run that averages nothing else. Rounds are among all peers with the same parameters, whatever
            its ``group_size``, 64 at most; one that does not come is waited for until ``match_timeout``. What it has
            accumulated is forgotten.
        target_batch_size: samples of all peers together that make an update.
        scheduler: of ``inner``; stepped once an update. One that needs no metric.
        max_grad_norm: the averaged gradient is clipped to this L2 norm, if given.
        max_samples_per_peer: samples after which this peer computes no more until the update, if given: where the
            peers' limits add up to the target, every update is of the same samples.
        overlap: average in the background while the next batches are computed. The update comes up to an update late:
            those batches' gradients are of the parameters before it.
        peers_to_start: peers without which this peer takes no first update; ``config.min_group_size`` if not given.
            Two peers that have started before the others would else go ahead of them.
        sync_timeout: seconds that a call waits at most for the other peers, and then as long again for a round.
        process_group: of ``torch.distributed``, where this peer is several ranks that hold shards of the parameters
            (FSDP): each rank has an averager with its :func:`shard_config`, and all of them update, or none.
        on_update: called after every update, with its report.
        model: of which ``inner`` trains parameters. With it, peers also compare the frozen parameters that ``inner``
            does not have, the running statistics of normalisation layers are averaged with the gradients (the mean
            over the batches of an update), and a buffer that changes and is not averaged is an error. Without it this
            peer knows nothing of frozen parameters outside ``inner``, nor of any buffer.
        buffers: names of ``model``'s buffers to average, instead of the running statistics.
        check_every: updates after which peers compare digests of their parameters; ``None`` or 0 for never.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        inner: Optimizer,
        averager: Averager,
        *,
        target_batch_size: float,
        scheduler: LRScheduler | None = None,
        max_grad_norm: float | None = None,
        max_samples_per_peer: float | None = None,
        overlap: bool = False,
        peers_to_start: int | None = None,
        sync_timeout: float = 600.0,
        process_group: dist.ProcessGroup | None = None,
        on_update: Callable[[StepReport], None] | None = None,
        model: torch.nn.Module | None = None,
        buffers: Collection[str] | None = None,
        check_every: int | None = 10,
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
            # Drawn for every rank by itself: of one batch some shards would count, and some would not.
            raise ValueError("a config with participation cannot be used with a process_group")
        self._overlap = overlap
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
            sync_timeout=sync_timeout,
        )
        averager.declare(self._contribution())

    @property
    def _running(self) -> bool:
        """Whether there is a round of which this peer has not seen the end, also after Ctrl-C."""
        return self._averager.round_state is not None

    def step(self, *, samples: float, metrics: Mapping[str, float] = MappingProxyType({})) -> StepReport:
        """Accumulate the gradients of one batch, and update when it is time.

        Args:
            samples: of the batch, of whose losses the gradients are the mean; with a ``process_group``, of the batches
                of all its ranks together, and the same number on each.
            metrics: what was measured on it, e.g. ``{"loss": loss.item()}``; 15 at most.

        Returns:
            How far peer and run are. With ``updated`` the parameters have changed.

        Raises:
            p2pavg.AccumulateError: a gradient or a metric is not finite, or ``samples`` no number above 0; nothing is
                accumulated. With a ``process_group``, on all of its ranks; where it is not a gradient or ``samples``
                that is wrong, what they had accumulated is forgotten too.
            ValueError: ``inner`` has come to train other parameters, a buffer changes that is not averaged, or the
                parameters are not those of the state that was loaded.
            p2pavg.ClosedError: the averager is closed.
        """
        self._begin()
        self._check_parameters()
        self._parts.mend()
        measured, gradients = self._with_speed(metrics), self._contribution()
        self._ranks.check_batch(gradients, samples)
        try:
            self._ranks.on_all(lambda: self._averager.accumulate(gradients, weight=samples, metrics=measured))
        except P2PAvgError:
            if self._ranks.are_several:
                self._averager.clear()  # what some have accumulated and others have not
            raise
        if self._zeroing is not None:
            self._zeroing.stepped()
        self._together.computed(samples)
        before = self._collect() if self._any_running() else None
        if before is not None and self._any_running():
            return before  # what was accumulated belongs to the next round
        self._together.say(self._averager.weight, waiting=self._averager.weight >= self._limit)
        decision = self._ranks.as_the_first(self._together.decide_when_all_are_ready)
        report = self._average(decision.peers) if isinstance(decision, Average) else self._report()
        return report if before is None or report.updated else before

    def _contribution(self) -> list[torch.Tensor]:
        """The gradients, then the averaged buffers."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return [local_of(tensor) for tensor in (*gradients, *self._parts.averaged)]

    def _any_running(self) -> bool:
        """On any rank of this peer: its ranks take part in each other's collectives, or wait for ever."""
        return not self._ranks.all_agree(not self._running)

    def _average(self, peers: int) -> StepReport:
        if self._overlap:
            self._together.begin_round(peers)
            return self._collect()
        return self._take(self._together.average(peers))

    def _collect(self) -> StepReport:
        """Of the round that runs: waited for when this peer is not to compute any more before it has ended."""
        if not self._running:  # as all ranks of a peer do what one of them has to
            return self._take(Failed(reason="the round of another rank of this peer goes on"))
        must_wait = not self._overlap or self._averager.weight >= self._limit
        return self._take(self._together.average(2) if must_wait else self._together.look())

    def _take(self, result: RoundResult) -> StepReport:
        kinds = set(self._ranks.gather(type(result).__name__))
        goes_on = InProgress.__name__ in kinds
        if Success.__name__ in kinds and len(kinds) > 1:
            self._averager.clear()  # else a later update is of some batches in one shard, of others in the next
        if not isinstance(result, Success):
            return self._report(result, goes_on=goes_on)
        if len(kinds) > 1:
            return self._report(
                goes_on=goes_on,
                result=Failed(reason="another rank of this peer has no result", contribution_used=True),
            )
        assert isinstance(result.averaged, list)
        averaged, numbers = digest_of(result.averaged), hyperparameters(self.inner)
        norm = self._update(result.averaged)
        self._took(result, numbers, averaged, self._parameters)
        self._together.say(self._averager.weight, waiting=False)
        self._step_scheduler()
        return self._updated(self._report(result, norm))

    def _update(self, averaged: list[torch.Tensor]) -> float:
        """Take the averaged gradient and buffers; return the gradient's L2 norm."""
        count = len(self._parameters)
        self._parts.take(averaged[count:])
        for parameter, gradient in zip(self._parameters, averaged[:count], strict=True):
            parameter.grad = spread_like(parameter, gradient)
        norm = _norm_of([cast(torch.Tensor, parameter.grad) for parameter in self._parameters])
        if self._max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, norm)
        self.inner.step()
        self.zero_grad()
        return whole_of(norm)

    def _report(
        self, result: RoundResult | None = None, norm: float | None = None, *, goes_on: bool = False
    ) -> StepReport:
        # While its round goes on, this peer may only be the last to hear of its end.
        behind = None if goes_on else self._ranks.as_the_first(self._together.left_behind)
        return self._checked(report_of(self._together, result, norm, behind))

    def state_dict(self) -> dict[str, Any]:
        """All that another peer needs beside the model's state to go on from here: of ``inner``, the schedule, the run.

        Not while a round of ``overlap`` runs that this peer may still take: what is saved then is from before it.
        """
        return self._saved() | {"parameters": digest_of(self._locals()).hex()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that this peer or another one saved; load the model's beside it, before or after.

        What was accumulated is forgotten: it is of other parameters. The next :meth:`step` checks that the model's
        parameters are those that belong to the state.

        Raises:
            ValueError: not such a state.
        """
        lineage = lineage_of(state)
        origin_of(state)
        check_holds(state, "inner", "parameters")
        check_both("scheduler", state, self.scheduler)
        self._load_inner(state)
        self._goes_on_from(state, lineage)


def _norm_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    # float16 ends at 65504: of large gradients the norm would be infinite.
    return torch.nn.utils.get_total_norm([g.float() if g.dtype == torch.float16 else g for g in gradients])
