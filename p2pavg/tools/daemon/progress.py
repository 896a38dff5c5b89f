"""The progress of a run, by the statuses that its peers publish. No I/O, no clock, no random source.

Statuses are claims of peers. Medians are shown, so that one peer that lies does not decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, median_low

from p2pavg.telemetry.status import Activity, PeerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """The state of a run that trains. Zero peers: none that trains has published its status."""

    peers: int = 0
    """Peers that train."""
    behind: int = 0
    """Those of them that fetch the run's state or last updates."""
    update: int = 0
    """Updates so far, by the median of the peers."""
    samples_per_second: float = 0.0
    """Of all peers: their median, times their number."""
    metric: str = ""
    """Name of the metric that most peers publish a history of."""
    value: float | None = None
    """The median of its last values."""
    history: tuple[float, ...] = ()
    """Its values over the run, by one of the peers at the median update."""


def progress_of(statuses: Iterable[PeerStatus]) -> TrainingProgress:
    """Return how far a run is."""
    training = [status for status in statuses if status.lineage]
    if not training:
        return TrainingProgress()
    update = median_low([status.epoch for status in training])
    names = Counter(status.history_of for status in training if status.history_of)
    name = min(names, key=lambda each: (-names[each], each)) if names else ""
    values = [value for status in training for found, value in status.metrics if name and found == name]
    at_median = [status for status in training if status.epoch == update and status.history_of == name]
    longest = max(at_median, key=lambda status: len(status.history), default=None)
    return TrainingProgress(
        peers=len(training),
        behind=sum(status.activity is Activity.FOLLOWING for status in training),
        update=update,
        samples_per_second=median([status.samples_per_second for status in training]) * len(training),
        metric=name,
        value=median(values) if values else None,
        history=() if longest is None else tuple(value for _, value in longest.history),
    )


def in_words(progress: TrainingProgress) -> str:
    """Return how far a run is in one line."""
    if not progress.peers:
        return "no peer that trains is here, or none has said how far the run is"
    parts = [f"update {progress.update:,}"]
    if progress.samples_per_second:
        parts.append(f"{progress.samples_per_second:,.0f} samples/s")
    if progress.value is not None:
        parts.append(f"{progress.metric} {progress.value:.4g}")
    several = "s train" if progress.peers > 1 else " trains"
    parts.append(
        f"{progress.peers} peer{several}" + (f", {progress.behind} behind" if progress.behind else "")
    )
    return ", ".join(parts)
