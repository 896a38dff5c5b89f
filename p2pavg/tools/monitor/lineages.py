"""Which peers have the same parameters, by the lineages that they report. No I/O, no clock.

A lineage's state changes with every update, and statuses come at different times. So peers are compared at the latest
update for which both have reported a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from p2pavg.telemetry.status import PeerStatus

MAX_BRANCHES = 32
"""More are not told apart: invented peers can have any number."""
MAX_KNOWN = 64
"""Updates for which the states of one peer are kept."""


class Reported:
    """The states that one peer has reported, by update."""

    def __init__(self) -> None:
        self.states: dict[int, bytes] = {}
        """The states of the latest updates, at most 64."""

    def receive(self, status: PeerStatus) -> None:
        """Note a status. Later updates than its own belong to a past that the peer has given up."""
        if not status.lineage:
            self.states.clear()
            return
        found = {epoch: state for epoch, state in self.states.items() if epoch < status.epoch}
        found |= {epoch: state for epoch, state in status.marks if epoch <= status.epoch}
        found[status.epoch] = status.lineage
        self.states = {epoch: found[epoch] for epoch in sorted(found)[-MAX_KNOWN:]}


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


@dataclass(slots=True)
class _Cluster:
    """Peers that agree, and all states that they have reported."""

    peers: list[str] = field(default_factory=list)
    states: dict[int, bytes] = field(default_factory=dict)
    is_compared: bool = False
    """True if it was compared with a peer outside, or has several."""

    def take(self, peers: Sequence[str], states: Mapping[int, bytes]) -> None:
        """Take peers that agree, and the states of updates that have none yet.

        All are kept: with a bound, a peer that invents later updates would push out the states that honest ones share.
        They are never copied or walked over, because invented peers can make them many.
        """
        self.peers += peers
        for epoch, state in states.items():
            self.states.setdefault(epoch, state)


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
        agreeing = []
        for cluster, verdict in zip(clusters, verdicts, strict=True):
            cluster.is_compared = cluster.is_compared or verdict is not None
            if verdict:
                agreeing.append(cluster)
        if agreeing:
            first, *more = agreeing
            first.take([peer_id], states)
            for other in more:  # this peer has shown that they are one
                if _agree(first.states, other.states) is not False:
                    first.take(other.peers, other.states)
                    clusters.remove(other)
        elif len(clusters) < MAX_BRANCHES:
            clusters.append(_Cluster([peer_id], dict(states), is_compared=False in verdicts))
        else:
            apart.append(peer_id)
    if len(clusters) > 1:
        apart += [cluster.peers[0] for cluster in clusters if not cluster.is_compared]
        clusters = [cluster for cluster in clusters if cluster.is_compared]
    found = []
    for cluster in clusters:
        epoch = max(cluster.states, default=0)
        state = cluster.states.get(epoch, b"")
        found.append(Branch(epoch=epoch, state=state, peers=tuple(sorted(cluster.peers))))
    return tuple(sorted(found, key=lambda each: (-len(each.peers), -each.epoch, each.state))), tuple(apart)


def _agree(one: Mapping[int, bytes], other: Mapping[int, bytes]) -> bool | None:
    """Return whether two agree at the latest update that both have reported; ``None`` if there is none."""
    fewer, more = (one, other) if len(one) <= len(other) else (other, one)
    last = max((epoch for epoch in fewer if epoch in more), default=None)
    return None if last is None else one[last] == other[last]
