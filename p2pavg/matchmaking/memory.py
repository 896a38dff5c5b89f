"""One peer's own observations of others, kept from attempt to attempt. No I/O, no clock, no random source.

A peer's statements about another peer are never stored here: a lie could shut out honest peers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from p2pavg.base.limits import FORGIVE_SECONDS, HOLD_OFF_SECONDS, MAX_BACKOFF_SECONDS
from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.timing import PUT_OFF_SECONDS

MAX_LATE = 512
"""Leaders that are remembered; each of them cost seconds of waiting, so none is pushed out quickly."""
MAX_PUT_OFF = 512  # candidates that are remembered as put off; a forgotten one may be put off again
MAX_PROVEN = 256  # peers that are remembered from finished rounds: four groups of the largest size


@dataclass(slots=True)
class _Late:
    until: float
    times: int
    last: float
    most: float  # latest end of its backoff, even if the backoff of other leaders extends it


class Memory:
    """Leaders that formed no group, candidates that were put off, and peers with which a round was finished.

    All lists are bounded.
    """

    def __init__(self) -> None:
        self._late: OrderedDict[str, _Late] = OrderedDict()
        # The attempt with which each of them was in the last finished round, named by its deadline.
        self._proven: OrderedDict[str, float] = OrderedDict()
        # The attempt in which a candidate was first put off, and the time.
        self._put_off: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wasted(self, peer_id: str, now: float, *, most: float = math.inf) -> float:
        """Note that a followed leader formed no group; return the end of its backoff, ``most`` at the latest."""
        self._proven.pop(peer_id, None)
        known = self._late.pop(peer_id, None)
        times = 0 if known is None else known.times >> int(max(0.0, now - known.last) / FORGIVE_SECONDS)
        until = min(now + min(HOLD_OFF_SECONDS * 2.0 ** min(times, 10), MAX_BACKOFF_SECONDS), most)
        # Leaders that are already held off stay so. Otherwise three of them, one after the other, would leave no time
        # in which this peer is free for other leaders.
        for late in self._late.values():
            if now < late.until <= now + MAX_BACKOFF_SECONDS:
                late.until = max(late.until, min(now + HOLD_OFF_SECONDS, late.most))
        self._late[peer_id] = _Late(until, times + 1, now, most)
        if len(self._late) > MAX_LATE:
            self._late.popitem(last=False)
        return until

    def held_until(self, peer_id: str, now: float) -> float:
        """Return the end of a peer's backoff. If it is not after ``now``, the peer may be asked."""
        late = self._late.get(peer_id)
        # If the clock was set back meanwhile, the backoff must not become longer.
        return now if late is None or late.until > now + MAX_BACKOFF_SECONDS else late.until

    def finished_with(self, members: Iterable[Candidate]) -> None:
        """Note that a round with these members was finished."""
        for member in members:
            peer_id = member.peer_id
            self._late.pop(peer_id, None)
            self._put_off.pop(peer_id, None)
            self._proven.pop(peer_id, None)
            self._proven[peer_id] = member.deadline
            if len(self._proven) > MAX_PROVEN:
                self._proven.popitem(last=False)

    def may_put_off(self, peer_id: str, attempt: float, now: float) -> bool:
        """Return whether a candidate may be put off for better ones, and remember that it was.

        It may for :data:`PUT_OFF_SECONDS` in one attempt, and in another one only after a round that was finished with
        it. So a candidate that is always ready together with better ones is in every second round at least.

        Args:
            attempt: deadline of this peer's attempt.
        """
        before = self._put_off.setdefault(peer_id, (attempt, now))
        if len(self._put_off) > MAX_PUT_OFF:
            self._put_off.popitem(last=False)
        return before[0] == attempt and before[1] <= now < before[1] + PUT_OFF_SECONDS

    def is_proven(self, peer_id: str) -> bool:
        """Return whether a round with this peer was finished and it has wasted no time since."""
        return peer_id in self._proven

    def is_spent(self, candidate: Candidate) -> bool:
        """Return whether a round was finished with this very attempt of a peer. Its record may still be read.

        An honest leader's group has only members that accepted it, and their attempts are over. A liar can put a peer
        into a roster that never heard of it. So only records are left out because of this, not what the peer itself
        sends.
        """
        return self._proven.get(candidate.peer_id) == candidate.deadline
