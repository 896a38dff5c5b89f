"""What one peer has itself seen of others, from attempt to attempt. No I/O, no clock, no random source.

Nothing in here comes from what a peer says of another one: a lie could shut out honest peers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

HOLD_SECONDS = 10.0
"""A leader that wasted this peer's time is not asked for so long, and twice as long each time.

Peers leave such a leader within seconds of each other; for as long as all of them hold it off, they find each other.
"""
MAX_HOLD_SECONDS = 600.0
FORGIVE_SECONDS = 600.0  # after this long without another waste of time, half of them are forgotten
MAX_LATE = (
    512  # leaders that are remembered; each cost some seconds of waiting before it could push out another
)
MAX_PROVEN = 256  # peers that are remembered from finished rounds: four groups of the largest size


@dataclass(slots=True)
class _Late:
    until: float
    times: int
    last: float
    most: float  # it is not held off for longer than until then, whatever the others do


class Memory:
    """Leaders that came to nothing, and peers with which a round was finished. Both are bounded."""

    def __init__(self) -> None:
        self._late: OrderedDict[str, _Late] = OrderedDict()
        self._proven: OrderedDict[str, None] = OrderedDict()

    def wasted(self, peer_id: str, now: float, *, most: float = math.inf) -> float:
        """Note that following a peer came to nothing; return until when it is not asked: ``most`` at the latest."""
        self._proven.pop(peer_id, None)
        known = self._late.pop(peer_id, None)
        times = 0 if known is None else known.times >> int(max(0.0, now - known.last) / FORGIVE_SECONDS)
        until = min(now + min(HOLD_SECONDS * 2.0 ** min(times, 10), MAX_HOLD_SECONDS), most)
        # Those that are held off already stay so: otherwise three of them, one after the other, would leave no moment
        # in which this peer is free for the others.
        for late in self._late.values():
            if now < late.until <= now + MAX_HOLD_SECONDS:
                late.until = max(late.until, min(now + HOLD_SECONDS, late.most))
        self._late[peer_id] = _Late(until, times + 1, now, most)
        if len(self._late) > MAX_LATE:
            self._late.popitem(last=False)
        return until

    def held_until(self, peer_id: str, now: float) -> float:
        """Return until when a peer is not asked; not after ``now`` when it may be asked."""
        late = self._late.get(peer_id)
        # A clock that was set back in the meantime must not make it longer.
        return now if late is None or late.until > now + MAX_HOLD_SECONDS else late.until

    def finished_with(self, peer_ids: Iterable[str]) -> None:
        """Note that a round with these peers was finished."""
        for peer_id in peer_ids:
            self._late.pop(peer_id, None)
            self._proven.pop(peer_id, None)
            self._proven[peer_id] = None
            if len(self._proven) > MAX_PROVEN:
                self._proven.popitem(last=False)

    def is_proven(self, peer_id: str) -> bool:
        """Return whether a round with this peer was finished, and it wasted no time since."""
        return peer_id in self._proven
