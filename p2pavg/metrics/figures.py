"""The metrics of one process, as events change them.

Their labels have few values: the runs of this process, and words of this library. No label holds a peer's id, and the
number of names that other peers may choose is bounded.

No I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from itertools import product
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from p2pavg.base.result import FailedCode, NoPeersCode
from p2pavg.base.version import __version__
from p2pavg.telemetry.events import (
    AnyEvent,
    Direction,
    Drifted,
    PeerGone,
    PeerSeen,
    Progressed,
    RoundEnded,
    RoundKind,
    StateMoved,
    UpdateTaken,
    Way,
)

DURATION_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
"""Buckets of durations: a round takes from milliseconds on one machine to ten minutes between homes."""
MAX_NAMES = 32
"""Metrics of training that are kept, of all runs: other peers may send any names. The ones that came last win."""
MAX_PARAMETER_GROUPS = 16


class Figures:
    """Counters, gauges and histograms, in one registry.

    Args:
        runs: ids of the runs that this process takes part in; their series begin at 0.
    """

    def __init__(self, registry: CollectorRegistry, runs: Collection[str] = ()) -> None:
        self._named: OrderedDict[tuple[str, str], None] = OrderedDict()  # run and name, by the last change
        self._moved: dict[tuple[str, str], int] = {}
        Info("p2pavg_build", "Version of p2pavg.", registry=registry).info({"version": __version__})
        plain: list[Any] = []  # the metrics that have no label but the run

        def made(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            metric = kind(f"p2pavg_{name}", text, ["run", *labels], registry=registry, **options)
            if not labels:
                plain.append(metric)
            return metric

        buckets = DURATION_BUCKETS
        self._round_seconds = made(
            Histogram, "round_duration_seconds", "Duration of a round.", "result", buckets=buckets
        )
        self._exchange_seconds = made(
            Histogram, "exchange_duration_seconds", "Duration of an exchange.", buckets=buckets
        )
        self._rounds = made(Counter, "rounds", "Rounds that have ended.", "result")
        self._failures = made(Counter, "round_failures", "Rounds without a result, by cause.", "code")
        self._bytes = made(Counter, "bytes", "Bytes of parts moved in rounds.", "direction", "path")
        self._members = made(Gauge, "round_members", "Members of the last round's group.")
        self._lost = made(Counter, "lost_members", "Members that were lost in rounds.")
        self._clipped = made(Counter, "clipped_contributions", "Contributions that were shortened.")
        self._samples = made(Counter, "samples", "Samples in averages, of all contributors.")
        self._own_samples = made(Counter, "own_samples", "Samples of this peer in averages.")
        self._updates = made(Counter, "updates", "Updates of this peer's parameters.")
        self._epoch = made(Gauge, "epoch", "Updates since the run began.")
        self._speed = made(Gauge, "samples_per_second", "Speed of this peer.")
        self._accumulated = made(Gauge, "accumulated_samples", "Samples since the last update.")
        self._waiting = made(Gauge, "waiting", "1 while this peer has computed enough, and waits.")
        self._behind = made(Gauge, "behind", "1 while this peer catches up with its run.")
        self._norm = made(Gauge, "gradient_norm", "L2 norm of the last averaged gradient.")
        self._rate = made(Gauge, "learning_rate", "Learning rate of a parameter group.", "group")
        self._metric = made(Gauge, "training_metric", "Mean of a metric over the last update.", "name")
        self._drifted = made(Gauge, "drifted", "1 while peers of this lineage report other parameters.")
        self._state_bytes = made(Counter, "state_bytes", "Bytes of states moved.", "direction")
        self._state_done = made(
            Gauge, "state_transfer_ratio", "Part of the transfer that is done.", "direction"
        )
        self._came = made(Counter, "peers_seen", "Peers of the run that have appeared.")
        self._gone = made(Counter, "peers_gone", "Peers of the run that have gone.")
        # Series are made at once, so that a query finds them before the first event.
        for run in runs:
            for kind in RoundKind:
                self._rounds.labels(run, kind.value)
                self._round_seconds.labels(run, kind.value)
            for code in (*NoPeersCode, *FailedCode):
                self._failures.labels(run, code.value)
            for direction, way in product(("sent", "received"), Way):
                self._bytes.labels(run, direction, way.value)
            for direction in get_args(Direction):
                self._state_bytes.labels(run, direction)
                self._state_done.labels(run, direction)
            for metric in plain:
                metric.labels(run)

    def take(self, event: AnyEvent) -> None:
        """Count an event; a subscriber of events."""
        match event:
            case RoundEnded():
                self._round_ended(event)
            case UpdateTaken():
                self._update_taken(event)
            case Progressed():
                run = event.run_id
                self._epoch.labels(run).set(event.epoch)
                self._accumulated.labels(run).set(event.samples)
                self._speed.labels(run).set(event.samples_per_second)
                self._waiting.labels(run).set(event.waiting)
                self._behind.labels(run).set(event.follows)
            case StateMoved():
                self._state_moved(event)
            case Drifted():
                self._drifted.labels(event.run_id).set(bool(event.sentence))
            case PeerSeen():
                self._came.labels(event.run_id).inc()
            case PeerGone():
                self._gone.labels(event.run_id).inc()

    def _round_ended(self, event: RoundEnded) -> None:
        run = event.run_id
        self._rounds.labels(run, event.result.value).inc()
        self._round_seconds.labels(run, event.result.value).observe(event.duration)
        if event.result is not RoundKind.SUCCESS:
            self._failures.labels(run, event.code).inc()
        if not event.members:
            return
        self._members.labels(run).set(len(event.members))
        self._exchange_seconds.labels(run).observe(event.exchange_duration)
        for direction, moved in (("sent", event.sent), ("received", event.received)):
            for path, count in moved.items():
                self._bytes.labels(run, direction, str(path)).inc(count)
        self._lost.labels(run).inc(len(event.lost))
        self._clipped.labels(run).inc(len(event.clipped))
        self._samples.labels(run).inc(event.samples)
        self._own_samples.labels(run).inc(event.own_samples)

    def _update_taken(self, event: UpdateTaken) -> None:
        run = event.run_id
        self._updates.labels(run).inc()
        self._epoch.labels(run).set(event.epoch)
        if event.grad_norm is not None:
            self._norm.labels(run).set(event.grad_norm)
        for group, rate in enumerate(event.learning_rates[:MAX_PARAMETER_GROUPS]):
            self._rate.labels(run, str(group)).set(rate)
        self._take_metrics(run, event.metrics)

    def _take_metrics(self, run: str, metrics: Mapping[str, float]) -> None:
        """Set the metrics of an update; those that are known come before new ones.

        A new one takes the place of the one that has not changed for longest, but of none of the same update. So a
        name that comes with each update stays, whatever else other peers send.
        """
        known = [name for name in metrics if (run, name) in self._named]
        for name in known:
            self._named.move_to_end((run, name))
        new = [name for name in metrics if (run, name) not in self._named][: MAX_NAMES - len(known)]
        for name in new:
            self._named[run, name] = None
        while len(self._named) > MAX_NAMES:
            self._metric.remove(*self._named.popitem(last=False)[0])
        for name in (*known, *new):
            self._metric.labels(run, name).set(metrics[name])

    def _state_moved(self, event: StateMoved) -> None:
        key = (event.run_id, event.direction)
        before = self._moved.get(key, 0)
        # An upload is over when its last event names a total.
        self._moved[key] = 0 if event.direction == "upload" and event.total else event.done
        # A transfer that begins counts from 0 again.
        self._state_bytes.labels(*key).inc(event.done - before if event.done >= before else event.done)
        self._state_done.labels(*key).set(event.done / event.total if event.total else 0.0)
