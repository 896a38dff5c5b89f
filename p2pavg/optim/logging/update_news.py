"""The event of an update, for the subscribers of an optimizer's averager."""

from __future__ import annotations

import time

from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.base.state import Lineage
from p2pavg.telemetry.events import UpdateTaken


def tell_update(averager: Averager, lineage: Lineage, report: StepReport) -> None:
    """Tell of an update: ``report`` is of the step that took it, and ``lineage`` is the one after it."""
    result = report.result if isinstance(report.result, Success) else None
    members = () if result is None else (*result.peers, *result.observers)
    averager.events.emit(
        UpdateTaken(
            time=time.time(),
            run_id=averager.config.run_id,
            epoch=report.epoch,
            lineage=lineage.state,
            group_id="" if result is None else result.group_id,
            peers=(averager.peer_id,) if result is None else result.peers,
            samples=report.samples if result is None else result.total_weight,
            metrics=report.metrics,
            grad_norm=report.grad_norm,
            update_norm=report.update_norm,
            learning_rates=report.learning_rates,
            outer_rate=report.outer_rate,
            replayed=result is not None and averager.peer_id not in members,
            certificate=b"" if result is None else result.certificate,
        )
    )
