"""Local updates: peers train separately for a while, and then take a common step from their common starting point."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.blocking import Averager
from p2pavg.optim.digest import digest_of
from p2pavg.optim.feedback import ErrorFeedback
from p2pavg.optim.progress import Average
from p2pavg.optim.recipe import hyperparameters
from p2pavg.optim.report import StepReport
from p2pavg.optim.run_state import RunState
from p2pavg.optim.state import (
    check_both,
    check_holds,
    checked_amount,
    checked_count,
    lineage_of,
    origin_of,
)
from p2pavg.optim.wrapper import PeerOptimizer
from p2pavg.result import InProgress, RoundResult, Success
from p2pavg.vector.metrics import MetricMeans, checked_metrics

logger = logging.getLogger(__name__)

MAX_SCHEDULE_STEPS = 10**7
"""Steps that an inner schedule is advanced at once, in about a minute. A state from a stranger may claim any update."""
MAX_RESTORED = 3  # consecutive destroyed steps, after which the others stop waiting for this peer

Outer = Callable[[list[torch.Tensor]], Optimizer]
"""Factory of the outer optimizer for the anchor's tensors, e.g. ``functools.partial(torch.optim.SGD, lr=1.0)``."""


class LocalUpdates(PeerOptimizer):
    """Takes inner steps locally and, after every ``sync_every`` of them, an outer step with all peers of the run.

    Each peer keeps the *anchor*: the parameters after the last outer step, the same bits for all peers. After
    ``sync_every`` inner steps the *pseudo-gradients* (anchor - parameters) are averaged, weighted by samples. The outer
    optimizer takes a step from the anchor with that average as its gradient, and all peers continue from the result.
    The inner optimizer keeps its state. With SGD of rate 1 as the outer one this is FedAvg; :mod:`p2pavg.optim.recipes`
    has others. The scheme is algorithm 1 of Reddi et al. 2021 ("Adaptive Federated Optimization").

    A round that fails loses nothing: the peer trains on, and its next pseudo-gradient covers everything since the
    anchor. A peer whose anchor differs from most peers' cannot follow: :attr:`StepReport.behind` says so, until the
    peer loads a state. If a parameter is NaN or infinite after an inner step, this peer returns to the anchor, with a
    cleaned inner optimizer state. Its work since the last outer step is lost, and :attr:`StepReport.restored` says so.

    Beside the parameters it keeps float32 vectors on their device: the anchor, and the outer optimizer's state (one
    vector of momentum, for DiLoCo). The averager keeps one for the contribution. While a round is late and the peer
    trains on, there is one more.

    Args:
        inner: any torch optimizer of this peer's parameters that needs no closure.
        outer: factory of the outer optimizer. It is given the anchor: float32 copies of the parameters, on their
            devices.
        averager: averager of a run that averages nothing else. A round includes all peers with the same anchor, at most
            64, whatever its ``group_size``. It waits for a peer that does not come until ``match_timeout``.
        sync_every: number of inner steps between two outer steps, H; the same for all peers.
        scheduler: learning-rate scheduler of ``inner`` that needs no metric; stepped with every inner step.
        proximal: mu of FedProx: adds ``mu * (parameter - anchor)`` to each gradient before an inner step (Li et al.
            2020, "Federated Optimization in Heterogeneous Networks", equation 2). 0 adds nothing.
        feedback: compensates the error of a lossy codec in the pseudo-gradients.
        peers_to_start: number of peers that this peer waits for before its first outer step; ``config.min_group_size``
            if not given.
        sync_timeout: seconds that a call waits at most for the other peers, and then at most for the round.
        on_update: called after every outer step, with its report.
        model, buffers, check_every, state: see :class:`AveragedOptimizer`; the running statistics are averaged at the
            outer steps, and the anchors are compared. ``feedback`` cannot be combined with averaged buffers. A peer
            that fetches the run's state begins at the anchor, with its own inner optimizer.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(
        self,
        inner: Optimizer,
        outer: Outer,
        averager: Averager,
        *,
        sync_every: int,
        scheduler: LRScheduler | None = None,
        proximal: float = 0.0,
        feedback: ErrorFeedback | None = None,
        peers_to_start: int | None = None,
        sync_timeout: float = 600.0,
        on_update: Callable[[StepReport], None] | None = None,
        model: torch.nn.Module | None = None,
        buffers: Collection[str] | None = None,
        check_every: int | None = 10,
        state: RunState | None = None,
    ) -> None:
        super().__init__(
            inner,
            averager,
            scheduler=scheduler,
            on_update=on_update,
            model=model,
            buffers=buffers,
            check_every=check_every,
            state=state,
        )
        if (
            isinstance(proximal, bool)
            or not isinstance(proximal, int | float)
            or not 0 <= proximal < math.inf
        ):
            raise ValueError(f"proximal must be a number, 0 or more, got {proximal!r}")
        self._anchor = [p.detach().clone().float() for p in self._parameters]
        self.outer = outer(self._anchor)
        stepped = [p for group in self.outer.param_groups for p in group["params"]]
        if [id(tensor) for tensor in stepped] != [id(tensor) for tensor in self._anchor]:
            raise ValueError("outer must make an optimizer of exactly the tensors that it is given")
        self._sync_every = checked_count("sync_every", sync_every)
        self._proximal = float(proximal)
        self._feedback = feedback
        if feedback is not None and self._parts.averaged:
            raise ValueError("feedback cannot be combined with averaged buffers of a model; give buffers=[]")
        self._join(
            rules=(
                ("sync_every", self._sync_every),
                ("proximal", self._proximal),
                ("outer", _name_of(self.outer)),
            ),
            outer=self.outer,
            target=math.inf,
            peers_to_start=peers_to_start,
            sync_timeout=sync_timeout,
        )
        self._steps = 0
        """Inner steps since the last outer step, or since the last attempt at one."""
        self._samples = 0.0
        self._contributed = 0.0
        """Samples behind the last contribution."""
        self._given: list[torch.Tensor] | None = None
        """The contributed pseudo-gradients, without the compensation by ``feedback``. They are kept only while a round
        is late; empty after a return to the anchor, because the parameters no longer contain them."""
        self._restored = 0
        """Inner steps since the last one that was not destroyed."""
        self._fills_at_first_step = not inner.state
        self._metrics = MetricMeans()
        averager.declare([*self._anchor, *self._parts.averaged])
        self._share_states("anchor/", self._anchor, self.outer, None)

    @property
    def anchor(self) -> list[torch.Tensor]:
        """A copy of the parameters after the last outer step: float32, in the order of ``inner``'s parameters."""
        return [tensor.clone() for tensor in self._anchor]

    def step(self, *, samples: float, metrics: Mapping[str, float] = MappingProxyType({})) -> StepReport:
        """Take an inner step with the present gradients, and an outer step if it is due.

        Args:
            samples: size of the batch behind the gradients. The sum since the last outer step is this peer's weight.
            metrics: measurements on the batch, e.g. ``{"loss": loss.item()}``; 15 at most.

        Returns:
            Progress of this peer and its run. If ``updated`` is true, an outer step was taken.

        Raises:
            ValueError: ``samples`` is not a number above 0, a metric is not a finite number, or a buffer changes
                without being averaged. Nothing has changed then.
            p2pavg.ClosedError: the averager is closed.
        """
        weight, measured = checked_amount("samples", samples), checked_metrics(metrics)
        self._metrics.check_room(self._training.with_speed(measured))
        if self._training.begin():
            self._set_anchor()
        self._check_parameters()
        if self._is_following():
            return self._catch_up()
        report = self._step(weight, measured)
        return self._catch_up() if self._must_follow(report) else report

    def _step(self, weight: float, measured: Mapping[str, float]) -> StepReport:
        if self._running and self._given is None:
            self._given = self._pseudo_gradients()  # the parameters have not changed since the round began
        self._pull_to_anchor()
        self.inner.step()
        if self._zeroing is not None:
            self._zeroing.stepped()
        if not self._is_finite():
            return self._restore()
        self._restored = 0
        self._steps += 1
        self._samples += weight
        self._metrics.add(measured, weight)
        self._together.computed(weight)
        due = self._steps >= self._sync_every or self._together.run.is_called
        self._together.run.say(self._samples, waiting=due)
        self._step_scheduler()
        if self._running:  # its call ended early, by sync_timeout or Ctrl-C
            return self._take(self._together.average(2) if due else self._together.look())
        if not due:
            return self._training.report(goes_on=self._running)
        decision = self._together.decide_when_all_are_ready()
        if not isinstance(decision, Average):
            return self._training.report(goes_on=self._running)
        self._contribute()
        return self._take(self._together.average(decision.peers))

    @torch.no_grad()
    def _set_anchor(self) -> None:
        for anchor, parameter in zip(self._anchor, self._parameters, strict=True):
            anchor.copy_(parameter)

    @torch.no_grad()
    def _is_finite(self) -> bool:
        # One pass and one synchronisation; a maximum propagates NaN.
        filled = [parameter for parameter in self._parameters if parameter.numel()]
        largest = torch.nn.utils.get_total_norm(filled, norm_type=math.inf)
        return bool(torch.isfinite(largest))

    @torch.no_grad()
    def _restore(self) -> StepReport:
        """Return to the anchor after an inner step that made a parameter NaN or infinite."""
        for parameter, anchor in zip(self._parameters, self._anchor, strict=True):
            parameter.copy_(anchor)
        self._parts.restore()
        self._mend_inner()
        lost, self._samples, self._metrics = self._samples, 0.0, MetricMeans()
        self._contributed, self._given = 0.0, None if self._given is None else []
        self._restored += 1
        reason = (
            "a parameter was NaN or infinite after an inner step: this peer is back at the anchor, and"
            f" {lost:g} samples since the last outer step are lost"
        )
        logger.warning("%s", reason)
        if self._restored < MAX_RESTORED:
            self._together.run.say(0.0, waiting=False)
        else:
            self._together.run.leave()  # until a step succeeds, no other peer should wait for this one
        self._step_scheduler()
        return replace(self._training.report(goes_on=self._running), restored=reason)

    @torch.no_grad()
    def _mend_inner(self) -> None:
        """Remove NaN and infinity from the inner optimizer's state."""
        wrong = [tensor for tensor in _tensors_of(self.inner) if not bool(tensor.isfinite().all())]
        if wrong and self._fills_at_first_step:
            self.inner.state.clear()  # as before its first step
            return
        for tensor in wrong:  # a state made at construction, e.g. Adagrad's, is not made again if cleared
            tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    @torch.no_grad()
    def _pull_to_anchor(self) -> None:
        if not self._proximal:
            return
        for parameter, anchor in zip(self._parameters, self._anchor, strict=True):
            if parameter.grad is not None:
                pull = parameter.float() - anchor
                parameter.grad.add_(pull.to(parameter.grad.dtype), alpha=self._proximal)

    def _take(self, result: RoundResult) -> StepReport:
        if self._steps >= self._sync_every or not isinstance(result, InProgress):
            self._steps = 0  # after a failure, the next attempt follows after as many steps
        if not isinstance(result, Success):
            if not isinstance(result, InProgress):
                self._given = None
            return self._training.report(result, goes_on=self._running)
        assert isinstance(result.averaged, list)
        averaged, numbers = digest_of(result.averaged), hyperparameters(self.outer)
        norm = self._update(result, result.averaged)
        self._training.took(result, numbers, averaged, self._anchor)
        self._together.run.say(self._samples, waiting=False)
        report = self._updated(self._training.report(result, norm, goes_on=self._running))
        self._took(result)
        return report

    def _contribute(self) -> None:
        self._parts.mend()
        pseudo: Sequence[torch.Tensor] = self._pseudo_gradients()
        if self._feedback is not None:
            pseudo = self._feedback.compensate(pseudo)
        self._averager.clear()  # drops a failed round's contribution: the new pseudo-gradients contain it
        self._averager.accumulate(
            [*pseudo, *self._parts.averaged],
            weight=self._samples,
            metrics=self._training.with_speed(self._metrics.means),
        )
        self._contributed, self._given = self._samples, None

    @torch.no_grad()
    def _pseudo_gradients(self) -> list[torch.Tensor]:
        # Relative to the anchor in the parameters' dtype: its rounding error is not progress.
        return [
            anchor.to(parameter.dtype).float() - parameter.float()
            for anchor, parameter in zip(self._anchor, self._parameters, strict=True)
        ]

    @torch.no_grad()
    def _later(self, *, contributed: bool) -> list[torch.Tensor]:
        """Return the pseudo-gradients for a later round.

        For a peer that only observed they are all of its pseudo-gradients; for others, the part since the
        contribution.
        """
        if contributed and self._samples == self._contributed:
            return []  # the usual case
        now = self._pseudo_gradients()
        if not contributed or not self._given:
            return now
        return [pseudo - before for pseudo, before in zip(now, self._given, strict=True)]

    @torch.no_grad()
    def _update(self, success: Success, averaged: list[torch.Tensor]) -> float:
        """Take the outer step; return the averaged pseudo-gradient's L2 norm."""
        contributed = self._averager.peer_id in success.peers
        later = self._later(contributed=contributed)
        self._given = None
        norm = self._step_outer(averaged)
        for position, (parameter, anchor) in enumerate(zip(self._parameters, self._anchor, strict=True)):
            parameter.copy_(anchor - later[position] if later else anchor)
        if contributed:
            self._samples -= self._contributed
            self._metrics = MetricMeans()
            if self._feedback is not None:
                self._feedback.delivered(*success.share)
        return norm

    def _step_outer(self, averaged: list[torch.Tensor]) -> float:
        """Step the anchor and the averaged buffers; return the averaged pseudo-gradient's L2 norm."""
        count = len(self._anchor)
        self._parts.take(averaged[count:])
        for anchor, average in zip(self._anchor, averaged[:count], strict=True):
            anchor.grad = average
        norm = torch.nn.utils.get_total_norm(averaged[:count])
        self.outer.step()
        self.outer.zero_grad()
        return float(norm)

    # ------------------------------------------------------------------ states of other peers

    def adopted(self) -> None:
        """See :class:`~p2pavg.optim.following.Replays`."""
        self._averager.clear()
        self._begin_at_anchor()

    @torch.no_grad()
    def replay(self, averaged: list[torch.Tensor], success: Success) -> None:
        """See :class:`~p2pavg.optim.following.Replays`."""
        digest, numbers = digest_of(averaged), hyperparameters(self.outer)
        norm = self._step_outer(averaged)
        self._begin_at_anchor()
        self._training.replayed(success.group_id, numbers, digest, self._anchor)
        self._updated(self._training.report(success, norm, goes_on=True))

    @torch.no_grad()
    def _begin_at_anchor(self) -> None:
        """Drop the inner steps since the last outer step. The inner schedule goes on where the run's is."""
        for parameter, anchor in zip(self._parameters, self._anchor, strict=True):
            parameter.copy_(anchor)
        self._steps, self._samples, self._contributed = 0, 0.0, 0.0
        self._metrics, self._given = MetricMeans(), None
        if self.scheduler is None:
            return
        behind = self.epoch * self._sync_every - self.scheduler.last_epoch
        if behind > MAX_SCHEDULE_STEPS:
            logger.warning("the inner schedule stays where it is: the run is %d steps ahead of it", behind)
            return
        with warnings.catch_warnings():  # torch warns of a schedule that goes on before the first step
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for _ in range(behind):
                self.scheduler.step()

    def own_state(self) -> dict[str, Any]:
        """See :class:`~p2pavg.optim.states.Owner`."""
        saved = self.state_dict()
        names = ("inner", "scheduler", "feedback", "steps", "samples")
        return {name: saved[name] for name in names} | {
            "parameters": [parameter.detach() for parameter in self._parameters]
        }

    @torch.no_grad()
    def load_own(self, saved: Mapping[str, Any]) -> None:
        """See :class:`~p2pavg.optim.states.Owner`."""
        check_both("scheduler", saved, self.scheduler)
        check_both("feedback", saved, self._feedback)
        if [tuple(t.shape) for t in saved["parameters"]] != [tuple(p.shape) for p in self._parameters]:
            raise ValueError("it has other parameters")
        if self._feedback is not None:
            self._feedback.load_state_dict(saved["feedback"])
        self._load_inner(saved)
        for parameter, kept in zip(self._parameters, saved["parameters"], strict=True):
            parameter.copy_(kept)
        self._steps, self._samples, self._metrics = saved["steps"], saved["samples"], MetricMeans()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a peer needs beside the model's state to continue from here.

        Another peer that loads it begins at the anchor: this peer's later local steps are left out.
        """
        return self._saved() | {
            "peer_id": self._averager.peer_id,
            "outer": self.outer.state_dict(),
            "anchor": self.anchor,
            "feedback": None if self._feedback is None else self._feedback.state_dict(),
            "steps": self._steps,
            "samples": self._samples,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that this or another peer saved; load the model's state before it.

        From another peer's state, the local steps since the last outer step are left out: the parameters become the
        anchor. A peer without an identity file has a new id at each start, so its own state counts as another peer's.

        Raises:
            ValueError: ``state`` is malformed.
        """
        lineage = lineage_of(state)
        origin_of(state)
        check_holds(state, "inner", "outer", "anchor", "steps", "samples", "peer_id")
        check_both("scheduler", state, self.scheduler)
        check_both("feedback", state, self._feedback)
        anchor, is_mine = state["anchor"], state["peer_id"] == self._averager.peer_id
        steps, samples = (int(state["steps"]), float(state["samples"])) if is_mine else (0, 0.0)
        if [tuple(t.shape) for t in anchor] != [tuple(t.shape) for t in self._anchor]:
            raise ValueError("state: its anchor is of other parameters")
        # Loads that may raise come first, before the anchor and the lineage change.
        if is_mine and self._feedback is not None:
            self._feedback.load_state_dict(state["feedback"])
        self._load_inner(state)
        self.outer.load_state_dict(state["outer"])
        for mine, saved in zip(self._anchor, anchor, strict=True):
            mine.copy_(saved)
        self._steps, self._samples, self._metrics = steps, samples, MetricMeans()
        if not is_mine:
            for parameter, kept in zip(self._parameters, self._anchor, strict=True):
                parameter.copy_(kept)
        self._given = None
        self._training.load(state, lineage)


def _name_of(optimizer: Optimizer) -> str:
    return type(optimizer).__qualname__


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    kept = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in kept if isinstance(value, torch.Tensor) and value.is_floating_point()]
