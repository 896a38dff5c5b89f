"""Metrics over updates, as each peer reports them. No I/O, no clock."""

from __future__ import annotations

import statistics
from collections import OrderedDict

from p2pavg.telemetry.status import PeerStatus

MAX_SERIES = 512
"""Series of one peer and one metric each. The peer that has most of them loses one first."""
MAX_PER_PEER = 8
"""A peer that reports further metrics loses its own: those that have not changed for longest."""
MAX_POINTS = 192
MAX_SHOWN_METRICS = 8
MAX_SHOWN_PEERS = 12


class Series:
    """The metrics of all peers."""

    def __init__(self) -> None:
        # By peer and metric; both in the order of their last change.
        self._peers: OrderedDict[str, OrderedDict[str, dict[int, float]]] = OrderedDict()

    def receive(self, peer_id: str, status: PeerStatus) -> None:
        """Note the metrics of a status, and its history."""
        at = status.epoch if status.lineage else status.total_rounds
        if status.history_of:
            for epoch, value in status.history:
                if epoch <= at:  # a peer that claims a later update contradicts itself
                    self._add(peer_id, status.history_of, epoch, value, at)
        for name, value in status.metrics[:MAX_PER_PEER]:
            self._add(peer_id, name, at, value, at)

    def _add(self, peer_id: str, name: str, at: int, value: float, now: int) -> None:
        own = self._peers.setdefault(peer_id, OrderedDict())
        points = own.setdefault(name, {})
        if at not in points:
            own.move_to_end(name)
            self._peers.move_to_end(peer_id)
            points[at] = value
        for later in [epoch for epoch in points if epoch > now]:  # the peer went back
            del points[later]
        if len(points) > MAX_POINTS:
            kept = sorted(points)
            own[name] = {epoch: points[epoch] for epoch in (*kept[:-1:2], kept[-1])}
        if len(own) > MAX_PER_PEER:
            own.popitem(last=False)
        while self.count > MAX_SERIES:
            self._forget_one()

    @property
    def count(self) -> int:
        """The number of series."""
        return sum(map(len, self._peers.values()))

    def _forget_one(self) -> None:
        """Forget the oldest series of the peer that has most; of several such peers, the one that changed first."""
        loudest = max(self._peers, key=lambda peer_id: len(self._peers[peer_id]))
        self._peers[loudest].popitem(last=False)
        if not self._peers[loudest]:
            del self._peers[loudest]

    def forget(self, peer_id: str) -> None:
        """Forget the series of a peer."""
        self._peers.pop(peer_id, None)

    def shown(self) -> list[dict[str, object]]:
        """Return the metrics that most peers report: the median of all, and the peers with most points.

        A loss comes first if at least half as many peers report it as the metric that most report.
        """
        by_name: dict[str, dict[str, dict[int, float]]] = {}
        for peer_id, own in self._peers.items():
            for name, points in own.items():
                by_name.setdefault(name, {})[peer_id] = points
        most = max(map(len, by_name.values()), default=0)

        def order(name: str) -> tuple[bool, int, str]:
            peers = len(by_name[name])
            return ("loss" not in name or 2 * peers < most, -peers, name)

        return [_shown(name, by_name[name]) for name in sorted(by_name, key=order)[:MAX_SHOWN_METRICS]]


def _shown(name: str, by_peer: dict[str, dict[int, float]]) -> dict[str, object]:
    values: dict[int, list[float]] = {}
    for points in by_peer.values():
        for at, value in points.items():
            values.setdefault(at, []).append(value)
    kept = sorted(values)
    while len(kept) > MAX_POINTS:
        kept = [*kept[:-1:2], kept[-1]]
    most = sorted(by_peer, key=lambda peer_id: (-len(by_peer[peer_id]), peer_id))[:MAX_SHOWN_PEERS]
    return {
        "name": name,
        "median": [[at, statistics.median(values[at])] for at in kept],
        "peers": {
            peer_id: [[at, by_peer[peer_id][at]] for at in sorted(by_peer[peer_id])] for peer_id in most
        },
    }
