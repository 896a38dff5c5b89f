"""Local updates without a common anchor: in each round a peer averages with another small group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from p2pavg.base.codes import FailedCode
from p2pavg.base.result import Failed, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.coordination.together import RoundCoordinator
from p2pavg.optim.local.anchor import Outer
from p2pavg.optim.local.feedback import ErrorFeedback
from p2pavg.optim.local.local import LocalUpdates
from p2pavg.optim.local.local_options import SyncEvery
from p2pavg.optim.local.outer_steps import OuterSteps
from p2pavg.optim.mixing.meetings import Meetings
from p2pavg.optim.mixing.mixed_steps import MixedSteps, check_sketch
from p2pavg.optim.mixing.mixing import ROUND, checked_mixing, group_size_in


class MixedUpdates(LocalUpdates):
    """Takes inner steps locally and, after every ``sync_every`` of them, an outer step with a few other peers.

    Each round is with another small group, so a run may have any number of peers, and no peer waits for the slowest.
    The anchors of the peers differ: :attr:`StepReport.consensus_distance` says how far. A group averages the members'
    points, ``anchor + ahead * (parameters - anchor)``, weighted by samples. The outer optimizer takes a step from this
    peer's own anchor, with the anchor minus the average point as its gradient. :func:`noloco` and :func:`gossip` are
    this class with the outer optimizers of the literature.

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
        ahead: multiple of this peer's progress since its anchor that it contributes.
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
        ahead: float = 1.0,
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
            ahead=ahead,
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
        return MixedSteps(*common, ahead=self._mixing.ahead)

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
    if averager.config.codec.is_sparse:
        raise ValueError(
            f"the codec {averager.config.codec.name} is sparse: peers that mix average whole parameters."
            ' Use compression="bf16", "fp16" or None'
        )
    if averager.config.participation is not None:
        raise ValueError(
            "a config with participation cannot be used by peers that mix: all of a group contribute"
        )
