"""A daemon's status in words, as JSON and as an exit code, and the progress of its run. No I/O, no clock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median, median_low

from msgspec.structs import asdict

from p2pavg.base.formats import count, in_bytes, in_time
from p2pavg.runs.membership.certificate import date_of
from p2pavg.telemetry.status import Activity, PeerStatus
from p2pavg.tools.control.messages import DaemonStatus


class ExitCode(IntEnum):
    """The exit codes of all commands. ``docs/how-to/run-a-peer.md`` lists them, and unit files depend on them."""

    DONE = 0
    MISTAKE = 1
    """A person must mend something: a file, an option's value, a certificate. The doctor found a fault."""
    USAGE = 2
    """The command line does not exist so."""
    NOT_RUNNING = 3
    ALONE = 4
    """The daemon runs, and no other peer of the network answers it."""
    REFUSED = 5
    """The daemon runs, and other members refuse it, because its certificate has expired or was revoked."""
    BUG = 70
    """An exception that is a bug; the traceback is in the log."""
    TRY_AGAIN = 75
    """The network, a port or another process was in the way. Another try may succeed."""


def exit_code(status: DaemonStatus) -> ExitCode:
    """Return the exit code of ``p2pavg status`` for a daemon that runs."""
    if status.refusal:
        return ExitCode.REFUSED
    return ExitCode.DONE if status.is_connected else ExitCode.ALONE


def as_json(statuses: Sequence[tuple[str, DaemonStatus]]) -> str:
    """Return statuses as a JSON array of objects.

    Args:
        statuses: folder and status of each daemon.
    """
    found = [
        {"home": home, **asdict(status), "connected": status.is_connected, "code": int(exit_code(status))}
        for home, status in statuses
    ]
    return json.dumps(found, indent=2)


def as_lines(home: str, status: DaemonStatus) -> list[str]:
    """Return a status as lines of text."""
    state = f"runs for {in_time(status.uptime)}"
    if status.leaving:
        state = "finishes its rounds, and then ends"
    elif status.refusal:
        state += f"; other members refuse it: {status.refusal}"
    elif not status.is_connected:
        state += ", without other peers"
    roles = f" as {', '.join(status.roles)}" if status.roles else ""
    helped_rounds = helped(status.rounds, status.failed_rounds)
    rows = [
        ("state", state),
        ("run", f"{status.run_id}{roles}" if status.run_id else "none: it keeps the network's records"),
        ("peer id", status.peer_id),
        *(("address" if not i else "", address) for i, address in enumerate(status.addresses)),
        ("reachability", status.reachability),
        ("peers", f"{count(status.peers, 'other peer')} of the network, {status.run_peers} of the run"),
        ("training", status.training),
        ("rounds", "" if status.training else f"{helped_rounds}; reduced {status.elements:,} elements"),
        (
            "traffic",
            f"{in_bytes(status.bytes_sent)} sent, {in_bytes(status.bytes_received)} received in rounds",
        ),
        ("certificate", f"valid until {date_of(expires)}" if (expires := status.certificate_expires) else ""),
        ("version", f"p2pavg {status.version}, process {status.pid}"),
        ("folder", home),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows if text]


def helped(rounds: int, failed: int) -> str:
    """Return how many rounds this peer has helped. Those that failed are no part of that number, here or elsewhere."""
    return f"helped {count(rounds, 'round')}{f', and {failed} failed' if failed else ''}"


# How far a run is, by the statuses that its peers publish.
#
# Statuses are claims of peers. Medians are shown, so that one peer that lies does not decide.


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
