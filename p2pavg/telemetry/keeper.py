"""Keeps one peer's own status up to date, from its events. No I/O, no clock: events carry the time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from p2pavg.base.limits import (
    CALM_LOOK_SECONDS,
    MAX_GROUP_SIZE,
    MAX_MBPS,
    MAX_MEMBERS,
    MAX_METRIC,
    MAX_METRICS,
    MAX_WEIGHT,
)
from p2pavg.telemetry.events import (
    AnyEvent,
    Drifted,
    Progressed,
    RoundEnded,
    RoundKind,
    StateMoved,
    UpdateTaken,
    Way,
)
from p2pavg.telemetry.status import (
    KEY_BYTES,
    LINEAGE_BYTES,
    MARKS,
    MAX_BYTES,
    MAX_HISTORY,
    MAX_NAMED,
    MAX_REASON_CHARS,
    MAX_ROUNDS,
    MAX_SENTENCE_CHARS,
    MAX_STATUS_SECONDS,
    Activity,
    PeerStatus,
    RoundClaim,
    TransferClaim,
    harmless,
    key_of,
)

# One metric over a whole run in a few points.


class SeriesHistory:
    """Keeps every n-th point of a series; n doubles whenever there are too many, so the points span the whole run.

    Args:
        most: points to keep.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._stride = 1
        self._skipped = 0
        self._points: list[tuple[int, float]] = []
        self._newest: tuple[int, float] | None = None

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """The kept points in order, at most ``most``: the first one, the newest one, and some between them."""
        if self._newest is None or self._points[-1] == self._newest:
            return tuple(self._points)
        return (*self._points, self._newest)

    def add(self, at: int, value: float) -> None:
        """Add a point. If it is not after the newest one, the run went back: points from there on are forgotten."""
        if self._newest is not None and at <= self._newest[0]:
            self._points = [point for point in self._points if point[0] < at]
        self._newest = (at, value)
        self._skipped += 1
        if self._skipped < self._stride and self._points:
            return
        self._skipped = 0
        self._points.append(self._newest)
        if len(self._points) >= self._most:
            self._stride *= 2
            self._points = self._points[::2]


SPEED = "samples_per_second"


class StatusKeeper:
    """Makes a status of events. All methods may be called from any thread.

    Args:
        begins: the parts of the status that stay as they are.
    """

    def __init__(self, begins: PeerStatus) -> None:
        self._lock = threading.Lock()
        self._status = begins
        self._version = 0
        self._rounds: deque[RoundClaim] = deque(maxlen=MAX_ROUNDS)
        self._history = SeriesHistory(MAX_HISTORY)
        self._marks: dict[int, tuple[int, bytes]] = {}
        # One transfer for each direction, so that the status stays small.
        self._moved: dict[str, StateMoved] = {}

    @property
    def version(self) -> int:
        """A number that grows whenever the status changes by an event."""
        return self._version

    def take(self, event: AnyEvent) -> None:
        """Note an event."""
        with self._lock:
            changes = self._changes(event)
            if changes is not None:
                self._status = replace(self._status, **changes)
                self._version += 1

    def status(
        self, *, now: float, uptime: float, reach: tuple[str, str], mbps: tuple[float, float]
    ) -> PeerStatus:
        """Return the present status.

        Args:
            now: wall clock, seconds.
            uptime: seconds since the averager was opened.
            reach: kind and sentence of the peer's reachability.
            mbps: measured Mbit/s that the peer can send and receive; 0 if that is not known.
        """
        with self._lock:
            # A transfer that was given up tells no end.
            # A transfer that has not moved for this long is over.
            since = now - CALM_LOOK_SECONDS
            moving = {way: moved for way, moved in self._moved.items() if moved.time > since}
            self._moved = moving
            return replace(
                self._status,
                uptime=_within(uptime, MAX_STATUS_SECONDS),
                reach=reach[0],
                # Other peers refuse a status with text or numbers out of range, and would not see this peer
                # at all.
                reach_sentence=harmless(reach[1], MAX_SENTENCE_CHARS),
                upload_mbps=_within(mbps[0], MAX_MBPS),
                download_mbps=_within(mbps[1], MAX_MBPS),
                rounds=tuple(self._rounds),
                history=self._history.points,
                transfers=tuple(_transfer(moved) for moved in moving.values()),
            )

    def _changes(self, event: AnyEvent) -> dict[str, Any] | None:
        """Return the fields that an event changes; ``None`` if it changes nothing."""
        match event:
            case RoundEnded():
                return self._ended(event)
            case UpdateTaken():
                return self._updated(event)
            case Progressed():
                activity = Activity.WAITING if event.waiting else Activity.COMPUTING
                return {
                    "epoch": event.epoch,
                    "lineage": event.lineage[:LINEAGE_BYTES],
                    "samples": _within(event.samples, MAX_WEIGHT),
                    "samples_per_second": _within(event.samples_per_second, MAX_WEIGHT),
                    "activity": Activity.FOLLOWING if event.follows else activity,
                }
            case StateMoved():
                self._moved[event.direction] = event
                # No field changes, but the version does: `status` has the transfer in it.
                return {}
            case Drifted():
                return {"drift": harmless(event.sentence, MAX_SENTENCE_CHARS)}
        return None

    def _ended(self, event: RoundEnded) -> dict[str, Any]:
        self._rounds.appendleft(_claim(event))
        before, succeeded = self._status, event.result is RoundKind.SUCCESS
        changes: dict[str, Any] = {
            "total_rounds": before.total_rounds + succeeded,
            "total_failures": before.total_failures + (event.result is RoundKind.FAILED),
            "total_sent": min(before.total_sent + sum(event.sent.values()), MAX_BYTES),
            "total_received": min(before.total_received + sum(event.received.values()), MAX_BYTES),
            "total_samples": _within(before.total_samples + event.own_samples, MAX_WEIGHT),
            "excluded": _keys(event.excluded, MAX_NAMED),
        }
        # A round that failed shows no ways that hold: some lanes may never have been opened.
        if succeeded:
            for name, way in (("lanes", Way.LANE), ("streams", Way.STREAM), ("relayed", Way.RELAYED)):
                partners = (peer_id for peer_id, its in event.ways.items() if its == way)
                changes[name] = _keys(partners, MAX_MEMBERS)
        if succeeded and not before.lineage:  # without an optimizer, rounds are all there is
            changes |= self._measured(before.total_rounds + 1, event.metrics)
        return changes

    def _updated(self, event: UpdateTaken) -> dict[str, Any]:
        lineage = event.lineage[:LINEAGE_BYTES]
        # The newest update of each distance. With them, others see from which update on two lineages differ.
        self._marks |= {every: (event.epoch, lineage) for every in MARKS if event.epoch % every == 0}
        # A peer that has loaded an earlier state has taken no later update any more.
        earlier = {epoch: state for epoch, state in self._marks.values() if epoch <= event.epoch}
        return {
            "epoch": event.epoch,
            "lineage": lineage,
            "marks": tuple(sorted(earlier.items())),
            "grad_norm": _within(event.grad_norm or 0.0, MAX_METRIC),
            "learning_rate": _within(next(iter(event.learning_rates), 0.0), MAX_METRIC),
            **self._measured(event.epoch, event.metrics),
        }

    def _measured(self, epoch: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Note the metrics of an update. The history has the loss, or else the first metric."""
        # NaN compares as false, so it is left out, too.
        found = [(name, value) for name, value in metrics.items() if abs(value) <= MAX_METRIC][:MAX_METRICS]
        names = [name for name, _ in found if name != SPEED]
        # Chosen once: a curve of several metrics in turn would show nothing.
        name = self._status.history_of or next((n for n in names if "loss" in n), next(iter(names), ""))
        value = dict(found).get(name)
        if value is not None:
            self._history.add(epoch, value)
        return {"metrics": tuple(found), "history_of": name}


def _claim(event: RoundEnded) -> RoundClaim:
    return RoundClaim(
        group=bytes.fromhex(event.group_id)[:KEY_BYTES],
        result=event.result,
        ended=_within(event.time, MAX_STATUS_SECONDS),
        duration=_within(event.duration, MAX_STATUS_SECONDS),
        exchange_duration=_within(event.exchange_duration, MAX_STATUS_SECONDS),
        sent=min(sum(event.sent.values()), MAX_BYTES),
        received=min(sum(event.received.values()), MAX_BYTES),
        members=min(len(event.members), MAX_MEMBERS),
        contributors=min(len(event.contributors), MAX_GROUP_SIZE),
        clipped=min(len(event.clipped), MAX_GROUP_SIZE),
        lost=_keys(event.lost, MAX_NAMED),
        reason=harmless(event.reason, MAX_REASON_CHARS),
    )


def _transfer(moved: StateMoved) -> TransferClaim:
    return TransferClaim(
        is_upload=moved.direction == "upload",
        done=min(moved.done, MAX_BYTES),
        total=min(moved.total, MAX_BYTES),
        bytes_per_second=_within(moved.bytes_per_second, MAX_BYTES),
        peers=min(moved.peers, MAX_MEMBERS),
    )


def _keys(peer_ids: Iterable[str], most: int) -> tuple[bytes, ...]:
    return tuple(key_of(peer_id) for peer_id in peer_ids)[:most]


def _within(value: float, most: float) -> float:
    """Return a number from 0 to ``most``: other peers refuse a status with another one. NaN becomes 0."""
    return min(float(value), most) if value > 0 else 0.0
