"""Which peers have the same parameters, by the lineages that they report. No I/O, no clock.

A lineage's state changes with every update, and statuses come at different times. So peers are compared at the latest
update for which both have reported a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from p2pavg.telemetry.status import PeerStatus

MAX_BRANCHES = 32
"""More are not told apart: invented peers can have any number."""
MAX_KNOWN = 64
"""Updates for which the states of one peer are kept."""


class Reported:
    """The states that one peer has reported, by update."""

    def __init__(self) -> None:
        self._states: dict[int, bytes] = {}

    @property
    def states(self) -> Mapping[int, bytes]:
        """The states of the latest updates, at most 64."""
        return self._states

    def receive(self, status: PeerStatus) -> None:
        """Note a status. Later updates than its own belong to a past that the peer has given up."""
        if not status.lineage:
            self._states.clear()
            return
        found = {epoch: state for epoch, state in self._states.items() if epoch < status.epoch}
        found |= {epoch: state for epoch, state in status.marks if epoch <= status.epoch}
        found[status.epoch] = status.lineage
        self._states = {epoch: found[epoch] for epoch in sorted(found)[-MAX_KNOWN:]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Peers that report the same states."""

    epoch: int
    """The latest update of its peers."""
    state: bytes
    """The first 8 bytes of the state after it."""
    peers: tuple[str, ...]


Compared: TypeAlias = tuple[tuple[Branch, ...], tuple[str, ...]]
"""The branches, the largest first, and the peers that cannot be compared with any other yet."""


class _Cluster:
    """Peers that agree, and all states that they have reported."""

    def __init__(self) -> None:
        self.peers: list[str] = []
        self.states: dict[int, bytes] = {}
        self.is_compared = False
        """True if it was compared with a peer outside, or has several."""

    def add(self, peer_id: str, states: Mapping[int, bytes]) -> None:
        """Add a peer that agrees."""
        self.peers.append(peer_id)
        self._know(states)

    def take(self, other: _Cluster) -> None:
        """Take the peers of another cluster."""
        self.peers += other.peers
        self._know(other.states)

    def _know(self, states: Mapping[int, bytes]) -> None:
        """Add the states of updates that have none yet.

        All are kept: with a bound, a peer that invents later updates would push out the states that honest ones share.
        They are never copied or walked over, because invented peers can make them many.
        """
        for epoch, state in states.items():
            self.states.setdefault(epoch, state)

    @property
    def branch(self) -> Branch:
        """The branch of these peers."""
        epoch = max(self.states, default=0)
        return Branch(epoch=epoch, state=self.states.get(epoch, b""), peers=tuple(sorted(self.peers)))


def branches(reported: Mapping[str, Mapping[int, bytes]]) -> Compared:
    """Return the branches, the largest first, and the peers that cannot be compared with any other yet.

    Args:
        reported: the states of each peer that trains, by update.
    """
    clusters: list[_Cluster] = []
    apart: list[str] = []
    for peer_id in sorted(reported, key=lambda each: (-max(reported[each], default=0), each)):
        states = reported[peer_id]
        verdicts = [_agree(states, cluster.states) for cluster in clusters]
        for cluster, verdict in zip(clusters, verdicts, strict=True):
            cluster.is_compared = cluster.is_compared or verdict is not None
        if True in verdicts:
            first, *more = [
                cluster for cluster, verdict in zip(clusters, verdicts, strict=True) if verdict is True
            ]
            first.add(peer_id, states)
            for other in more:  # this peer has shown that they are one
                if _agree(first.states, other.states) is not False:
                    first.take(other)
                    clusters.remove(other)
        elif len(clusters) < MAX_BRANCHES:
            clusters.append(_Cluster())
            clusters[-1].add(peer_id, states)
            clusters[-1].is_compared = False in verdicts
        else:
            apart.append(peer_id)
    if len(clusters) > 1:
        apart += [cluster.peers[0] for cluster in clusters if not cluster.is_compared]
        clusters = [cluster for cluster in clusters if cluster.is_compared]
    found = (cluster.branch for cluster in clusters)
    return tuple(sorted(found, key=lambda each: (-len(each.peers), -each.epoch, each.state))), tuple(apart)


def _agree(one: Mapping[int, bytes], other: Mapping[int, bytes]) -> bool | None:
    """Return whether two agree at the latest update that both have reported; ``None`` if there is none."""
    fewer, more = (one, other) if len(one) <= len(other) else (other, one)
    last = max((epoch for epoch in fewer if epoch in more), default=None)
    return None if last is None else one[last] == other[last]
