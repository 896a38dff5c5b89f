"""States of the processes that share one peer: how far each is, and what the peer says for all. No I/O, no clock.

The processes of one state hold the same bits. So the peer holds one snapshot and one log for all of them, and one of
them takes the snapshots. A process that is behind gets the state from another one of its peer, without a copy, or
through the peer from other peers.

The log for processes has more averages than the log for other peers: those of rounds among the processes alone have no
certificate, which another peer would need.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from p2pavg.state.news import MAX_LOG, SnapshotOffer, StateNews

LOCAL_SECONDS = 10.0
"""A process that wants a state gets it from another process of its peer within this time, or other peers are asked."""
MAX_UNTAKEN = 4
"""Averages of rounds among the processes that no optimizer has taken yet."""


@dataclass(frozen=True, slots=True)
class Stand:
    """The state of one process.

    Args:
        wants: true if it is behind, and asks for a state.
        epoch: number of updates that its parameters have taken.
        since: the moment since which it wants a state.
    """

    wants: bool = False
    epoch: int = 0
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalAverage:
    """The average of a round among the processes of one peer."""

    state: bytes
    """State of the lineage before the update, 32 bytes or fewer."""
    description: bytes
    """The result without its tensors, as :func:`p2pavg.attached.results.encode_success` makes it."""
    vector: torch.Tensor
    """float32, of the vector's length."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.vector.nbytes + len(self.description)


class LocalLog:
    """The last averages, for the processes of this peer. Those with a certificate are in the peer's own log."""

    def __init__(self) -> None:
        self.epoch = 0
        """The update to which the log leads."""
        self._averages: OrderedDict[bytes, LocalAverage | None] = OrderedDict()
        self._untaken: OrderedDict[bytes, LocalAverage] = OrderedDict()

    @property
    def group_ids(self) -> tuple[bytes, ...]:
        """Ids of the averages, the oldest first."""
        return tuple(self._averages)

    @property
    def first(self) -> int:
        """The update after which the log begins."""
        return self.epoch - len(self._averages)

    def get(self, group_id: bytes) -> LocalAverage | None:
        """Return an average of a round among the processes; ``None`` if there is none, or it has a certificate."""
        return self._averages.get(group_id)

    def committed(self, group_id: bytes, average: LocalAverage) -> None:
        """Keep the average of a round among the processes until an optimizer has taken it."""
        self._untaken[group_id] = average
        while len(self._untaken) > MAX_UNTAKEN:
            self._untaken.popitem(last=False)

    def took(self, group_id: bytes, epoch: int, *, certified: bool) -> None:
        """Note that the first process has taken an update; if its average is not known, the log begins anew.

        Args:
            certified: true if the peer's own log has the average.
        """
        local = self._untaken.pop(group_id, None)
        known = certified or local is not None
        if not known or epoch != self.epoch + 1:
            self.begin(epoch)
        if not known:
            return
        self._averages[group_id] = local
        self.epoch = epoch
        if len(self._averages) > MAX_LOG:
            self._averages.popitem(last=False)

    def shorten(self, log_bytes: int, certified: Collection[bytes]) -> None:
        """Drop the oldest averages that the peer's own log has no more, or that take too much memory.

        Args:
            log_bytes: memory of the averages without a certificate; the last one is kept in any case.
            certified: ids of the averages in the peer's own log.
        """
        held = sum(average.nbytes for average in self._averages.values() if average is not None)
        while self._averages:
            oldest = next(iter(self._averages))
            average = self._averages[oldest]
            is_gone = average is None and oldest not in certified
            if not is_gone and (held <= log_bytes or len(self._averages) == 1):
                return
            del self._averages[oldest]
            held -= 0 if average is None else average.nbytes

    def full(self, since: int, log_bytes: int) -> float:
        """Return the fraction of the log that the averages after an update take."""
        later = list(self._averages.values())[max(len(self._averages) - max(self.epoch - since, 0), 0) :]
        taken = sum(average.nbytes for average in later if average is not None)
        return max(taken / max(log_bytes, 1), len(later) / MAX_LOG)

    def begin(self, epoch: int) -> None:
        """Drop everything: the parameters are those after an update to which no average leads."""
        self._averages.clear()
        self.epoch = epoch


@dataclass(frozen=True, slots=True)
class Shelved:
    """The peer's snapshot and log, as a process needs to know them to take the next snapshot.

    Args:
        gives: true for the one process that is to take the snapshots.
        snapshot_epoch: update of the peer's snapshot; -1 without one.
        log_first: the first update after which the log begins.
        log_full: the fraction of the log that the averages since the snapshot take.
        idle_seconds: time since a piece of the snapshot was read, at most an hour.
    """

    gives: bool = False
    snapshot_epoch: int = -1
    log_first: int = 0
    log_full: float = 0.0
    idle_seconds: float = 3600.0

    def fields(self) -> tuple[bool, int, int, float, float]:
        """Return the fields of its message after the channel."""
        return self.gives, self.snapshot_epoch, self.log_first, self.log_full, self.idle_seconds


def joint_stand(stands: Mapping[str, Stand], now: float) -> tuple[bool, int]:
    """Return what the peer says for its processes: whether it wants a state, and its epoch.

    It wants none while one of its processes can give a state to the others, for a while.
    """
    up_to_date = [stand for stand in stands.values() if not stand.wants]
    late = [stand for stand in stands.values() if stand.wants]
    wants = any(not up_to_date or now >= stand.since + LOCAL_SECONDS for stand in late)
    return wants, max((stand.epoch for stand in up_to_date or late), default=0)


def giver(stands: Mapping[str, Stand]) -> str | None:
    """Return the process that takes the snapshots: of those that are furthest, the first by name."""
    able = {name: stand for name, stand in stands.items() if not stand.wants}
    furthest = max((stand.epoch for stand in able.values()), default=0)
    return min((name for name, stand in able.items() if stand.epoch == furthest), default=None)


def shown(stand: Stand, snapshot: SnapshotOffer | None, log: LocalLog) -> StateNews:
    """Return the record of one process, as the other processes of its peer see it."""
    usable = None if stand.wants or snapshot is None or snapshot.epoch > stand.epoch else snapshot
    averages = log.group_ids if log.epoch == stand.epoch and not stand.wants else ()
    return StateNews(wants=stand.wants, epoch=stand.epoch, snapshot=usable, log=averages)
