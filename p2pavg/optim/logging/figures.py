"""Figures of updates and rounds by name, for loggers. No I/O, no clock."""

from __future__ import annotations

from p2pavg.base.result import Success
from p2pavg.optim.base.report import StepReport
from p2pavg.telemetry.events import RoundEnded, UpdateTaken


def figures_of_report(report: StepReport) -> dict[str, float]:
    """Return the figures of an update's report; empty for a report without an update."""
    result = report.result
    if not isinstance(result, Success):
        return {}
    found: dict[str, float] = {f"metrics/{name}": value for name, value in report.metrics.items()}
    if report.grad_norm is not None:
        found["grad_norm"] = report.grad_norm
    if report.update_norm is not None:
        found["update_norm"] = report.update_norm
    found |= _rates(report.learning_rates)
    found["round/peers"] = len(result.peers)
    found["round/samples"] = result.total_weight
    found["round/seconds"] = result.duration
    found["round/bytes_sent"] = result.bytes_sent
    found["round/bytes_received"] = result.bytes_received
    return found


def figures_of_update(update: UpdateTaken) -> dict[str, float]:
    """Return the figures of an update's event."""
    found: dict[str, float] = {f"metrics/{name}": value for name, value in update.metrics.items()}
    if update.grad_norm is not None:
        found["grad_norm"] = update.grad_norm
    if update.update_norm is not None:
        found["update_norm"] = update.update_norm
    return found | _rates(update.learning_rates)


def figures_of_round(event: RoundEnded) -> dict[str, float]:
    """Return the figures of a round that succeeded."""
    return {
        "round/peers": len(event.contributors),
        "round/samples": event.samples,
        "round/seconds": event.duration,
        "round/bytes_sent": sum(event.sent.values()),
        "round/bytes_received": sum(event.received.values()),
        "round/lost": len(event.lost),
        "round/clipped": len(event.clipped),
    }


def _rates(rates: tuple[float, ...]) -> dict[str, float]:
    if len(rates) == 1:
        return {"learning_rate": rates[0]}
    return {f"learning_rate/{group}": rate for group, rate in enumerate(rates)}
