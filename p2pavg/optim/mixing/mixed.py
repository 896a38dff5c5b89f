"""Local updates without a common anchor: in each round a peer averages with another small group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from p2pavg.base.result import Failed, FailedCode, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.model import ModelParts
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.coordination.together import RoundCoordinator
from p2pavg.optim.local.anchor import Anchor, Change, Outer
from p2pavg.optim.local.feedback import ErrorFeedback
from p2pavg.optim.local.local import LocalUpdates
from p2pavg.optim.local.local_options import LocalOptions, SyncEvery
from p2pavg.optim.local.outer_steps import OuterSteps
from p2pavg.optim.mixing.meetings import Meetings
from p2pavg.optim.mixing.mixing import ROUND, checked_mixing, group_size_in
from p2pavg.optim.ranks.shards import Ranks

# The outer steps of a peer that mixes: what it contributes, and its own step from its own anchor.
#
# A peer contributes its parameters. The outer optimizer steps from the peer's own anchor x, and its gradient is the
# anchor minus the group's average c. So with a rate of 1 and no momentum, x becomes c.
#
# With a rate of 1 and Nesterov's momentum, x becomes c + momentum * (c - c'), where c' is the average of the peer's
# last group: Nesterov's acceleration of gossip, with one vector a round. GASLoC (Cagnasso et al. 2026, arXiv
# 2606.11081) has p - p' there, the peer's own parameters, whose noise is larger than that of an average.
#
# NoLoCo's step (Kolehmainen et al. 2025, arXiv 2506.10911) has the pseudo-gradients D = p - x and the anchors in two
# terms,
#
#     d becomes alpha * d + beta * mean(D) - gamma * (x - mean(x)), and x becomes x + d,
#
# and is SGD with lr = beta and momentum = alpha if gamma is beta, as d = -lr * m shows: the two means are then those of
# one vector, p, so a peer sends half of the bytes.

SKETCH = 1024
"""Values of a random projection: the squared distance between two has a relative standard error of sqrt(2 / 1024)."""
_AT_ONCE = 2**20
# Constants of splitmix64 (Steele, Lea and Flood 2014), as signed numbers of 64 bits.
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


@torch.no_grad()
def sketch_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a random projection of tensors to 1,024 values, float32, linear in the tensors.

    Element i is added with a sign that is drawn from i to the value i modulo 1,024. So the expected square of the
    difference of two projections is that of the difference of the tensors (Charikar et al. 2002, count sketch).
    """
    found = torch.zeros(SKETCH, dtype=torch.float32, device="cpu")
    at = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), _AT_ONCE):
            part = flat[start : start + _AT_ONCE].float().cpu()
            first = at % SKETCH
            signed = torch.zeros(
                -(-(first + part.numel()) // SKETCH) * SKETCH, dtype=torch.float32, device="cpu"
            )
            signed[first : first + part.numel()] = part * _signs(at, part.numel())
            found += signed.view(-1, SKETCH).sum(0)
            at += part.numel()
    return found


def _signs(first: int, count: int) -> torch.Tensor:
    """Return the signs of ``count`` elements from the position ``first`` on, by splitmix64."""
    mixed = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device="cpu") * _MIX[0]
    mixed = (mixed ^ _shifted(mixed, 30)) * _MIX[1]
    mixed = (mixed ^ _shifted(mixed, 27)) * _MIX[2]
    return 1.0 - 2.0 * (_shifted(mixed, 31) & 1).float()


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Return int64 values shifted to the right, with zeros from the left."""
    return (values >> by) & ((1 << (64 - by)) - 1)


def check_sketch(sketch: object) -> None:
    """Raise ValueError if this is no projection of a saved state."""
    if not isinstance(sketch, torch.Tensor) or tuple(sketch.shape) != (SKETCH,):
        raise ValueError("state: its projection of the first parameters is malformed")
    if not bool(sketch.isfinite().all()):
        raise ValueError("state: its projection of the first parameters has values that are not finite")


class MixedSteps(OuterSteps):
    """The outer steps of one optimizer that mixes."""

    def __init__(
        self, anchor: Anchor, parts: ModelParts, options: LocalOptions, ranks: Ranks, change: Change
    ) -> None:
        super().__init__(anchor, parts, None, options, ranks, change)
        self._origin: torch.Tensor | None = None
        self._mine = torch.zeros(SKETCH, dtype=torch.float32, device="cpu")
        elements = sum(tensor.numel() for tensor in anchor.tensors)
        # Codecs scale values in blocks, so the projection's are made as large as those of the anchors' changes.
        self._scale = math.sqrt(SKETCH / max(elements, 1))
        self.distance: float | None = None
        """Estimated distance from this peer's anchor to its group's mean anchor, before the last outer step."""
        self.contributed_round = 0.0
        """This peer's round number, as its last contribution has it."""

    @property
    def like(self) -> list[torch.Tensor]:
        """Tensors with the shapes, dtypes and devices of what is averaged beside the buffers."""
        return [*self.anchor.like, torch.zeros(SKETCH, dtype=torch.float32, device="cpu")]

    @property
    def origin(self) -> torch.Tensor:
        """Projection of the anchor with which the run began; the others measure their anchors from the same."""
        return sketch_of(self.anchor.tensors) if self._origin is None else self._origin

    def begin_from(self, origin: torch.Tensor | None) -> None:
        """Set the projection of the run's first anchor; ``None``: that of the anchor at the first contribution."""
        self._origin = None if origin is None else origin.float().clone()

    def contribute(self, fragment: int, now: float) -> tuple[list[torch.Tensor], float, dict[str, float]]:
        """Return what this peer contributes to the next round: tensors, weight and metrics."""
        pseudo, weight, means = super().contribute(fragment, now)
        count = len(self.anchor.tensors)
        points = [anchor - away for anchor, away in zip(self.anchor.tensors, pseudo[:count], strict=True)]
        self._origin = self.origin
        self._mine = (sketch_of(self.anchor.tensors) - self._origin) * self._scale
        self.contributed_round = means.get(ROUND, 0.0)
        return [*points, self._mine, *pseudo[count:]], weight, means

    def _step(self, fragment: int, averaged: list[torch.Tensor]) -> float:
        count = len(self.anchor.tensors)
        self._parts.take(averaged[count + 1 :])
        self.distance = float((self._mine - averaged[count].cpu()).norm()) / self._scale
        gradients = [
            anchor - point for anchor, point in zip(self.anchor.tensors, averaged[:count], strict=True)
        ]
        return self.anchor.step(fragment, gradients, self._change, self._ranks.norm)


class MixedUpdates(LocalUpdates):
    """Takes inner steps locally and, after every ``sync_every`` of them, an outer step with a few other peers.

    Each round is with another small group, so a run may have any number of peers, and no peer waits for the slowest.
    The anchors of the peers differ: :attr:`StepReport.consensus_distance` says how far. A group averages the members'
    parameters, weighted by samples. The outer optimizer takes a step from this peer's own anchor, with the anchor minus
    the average as its gradient. :func:`noloco` and :func:`gossip` are this class with the outer optimizers of the
    literature.

    Peers meet that began with the same parameters and settings, whatever updates they have taken since: there is no
    common lineage, nothing to compare (:attr:`StepReport.drifted` is ``None``) and no log to replay.
    :attr:`epoch` counts the outer steps, and is about the same on all peers. A peer that is more than ``max_lag`` of
    them behind does not average any more, and :attr:`StepReport.behind` says so: load the saved state of any other
    peer then.

    A peer looks for a partner for ``partner_timeout`` seconds at the end of its interval. Then it goes on with its
    inner steps, and the search goes on in the background until the end of the next interval, where it begins anew with
    the newer parameters. An average that comes late is applied as with ``delay``: no inner step is lost.

    Beside the parameters it keeps the vectors of :class:`LocalUpdates`.

    Args:
        inner, outer, averager, sync_every, delay, alpha, offload, scheduler, proximal, sync_timeout, on_update, model,
            buffers, batch_size, samples_of, accumulate, measure_updates: see :class:`LocalUpdates`. The averager's
            codec must not be sparse: whole parameters are averaged, which have no small part that matters most.
        group_size: number of peers that average together, 2 to 64. If not given, 2, or what the topology of the
            averager says if that is :class:`p2pavg.Gossip`.
        partner_timeout: seconds for which a call waits for partners.
        peers_to_start: number of peers that this peer waits for before its first outer step, for ``sync_timeout`` at
            most; 1, itself, if not given.
        max_lag: number of outer steps by which peers that average may be apart.

    One of the 16 metrics of a contribution is ``outer_step``, so a caller has one metric less.

    Raises:
        ValueError: an argument is out of range, or an option of :class:`LocalUpdates` is given that needs a common
            anchor; the message names it.
    """

    _is_mixed = True
    _together: Meetings
    _outer_steps: MixedSteps

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        outer: Outer,
        averager: Averager,
        *,
        sync_every: SyncEvery,
        group_size: int | None = None,
        partner_timeout: float = 5.0,
        max_lag: int = 32,
        **options: Any,
    ) -> None:
        config = averager.config
        _check_company(averager, options)
        self._mixing = checked_mixing(
            group_size=group_size_in(config, group_size),
            partner_timeout=partner_timeout,
            max_lag=max_lag,
            least=config.min_group_size,
        )
        # No other peer has this one's anchor, so there is no state to share.
        given = {"peers_to_start": 1, **options, "check_every": None, "state": False}
        super().__init__(inner, outer, averager, sync_every=sync_every, **given)

    def _join(self, **given: Any) -> None:
        super()._join(**{**given, "rules": (*given["rules"], *self._mixing.rules)})
        self._training.compares = False

    def _coordination(self, **options: Any) -> RoundCoordinator:
        return Meetings(self._averager, self._locals(), mixing=self._mixing, **options)

    def _make_outer_steps(self, feedback: ErrorFeedback | None) -> OuterSteps:
        assert feedback is None  # sparse codecs are refused
        common = (self._anchor, self._parts, self._options, self._ranks, self._change)
        return MixedSteps(*common)

    # ------------------------------------------------------------------ steps

    def _take_batch(self, samples: float, metrics: Mapping[str, float]) -> StepReport:
        return super()._take_batch(samples, {**metrics, ROUND: float(self.epoch)})

    def _collect(self, *, due: bool) -> StepReport:
        if due and self._together.is_looking:
            # The contribution is an interval old: begin again, with the present one.
            result = self._together.stop_looking("this peer has newer parameters")
            if result is not None:
                self._outer_steps.missed(result)
                return self._attempt()
        return super()._collect(due=due)

    def _take(self, result: RoundResult) -> StepReport:
        if isinstance(result, Success):
            why = self._together.too_far(result, self._outer_steps.contributed_round)
            if why:
                failed = Failed(reason=why, code=FailedCode.TOO_FAR_APART, contribution_used=False)
                return super()._take(failed)
        return super()._take(result)

    def _updated(self, report: StepReport, rates: tuple[float, ...]) -> StepReport:
        return super()._updated(replace(report, consensus_distance=self._outer_steps.distance), rates)

    # ------------------------------------------------------------------ saved states

    def _state_dict(self) -> dict[str, Any]:
        return super()._state_dict() | {"origin_projection": self._outer_steps.origin.clone()}

    @torch.no_grad()
    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        origin = state.get("origin_projection")
        check_sketch(origin)
        super()._load_state_dict(state)
        # A state without an outer step belongs to no parameters: the run may begin with others.
        self._outer_steps.begin_from(origin if self.epoch else None)


def _check_company(averager: Averager, options: Mapping[str, Any]) -> None:
    """Raise ValueError for options, or an averager, that need a common anchor."""
    for name in ("fragments", "feedback", "process_group", "grace", "state", "min_peers", "check_every"):
        if options.get(name) not in (None, False, 1 if name == "fragments" else None):
            raise ValueError(f"{name} needs an anchor that all peers share, and peers that mix have none")
    if averager.config.codec.needs_feedback:
        raise ValueError(
            f"the codec {averager.config.codec.name} is too coarse: peers that mix average whole parameters."
            ' Use compression="bf16", "fp16" or None'
        )
    if averager.config.participation is not None:
        raise ValueError(
            "a config with participation cannot be used by peers that mix: all of a group contribute"
        )
