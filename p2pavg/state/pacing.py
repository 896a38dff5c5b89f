"""The pace at which a donor sends states over a slow link.

Bytes that fill a link wait in a queue in front of it, and so does every other message of the peer. A group is formed
with messages that answer each other: if each waits a tenth of a second for bytes of a state, the run forms its groups a
second later, and all its members have waited for one that joins. So a donor fills a slow link in part only, in small
steps, as long as one round follows another. Several donors fill the joiner's link together.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from p2pavg.net.limits.rate import WIRE_OVERHEAD, TokenBucket

SLOW_MBPS = 100.0
"""A faster link empties its queue in a few milliseconds. Its measurement may be far too low, too."""
PART = 0.75
"""The part of a slow link that states fill. More makes the queue long, and less the transfer."""
LATELY_SECONDS = 10.0
"""After a round, for which the messages of the next one may come at any time."""
STEP_BYTES = 16 * 1024
"""Bytes that are sent at once at a pace, or under a limit: 26 ms of 5 Mbit/s. More would be a burst, and look like
silence to joiners."""


class Pace:
    """The pace of all that one peer sends of states in one run. Threads and tasks may use it at once.

    Args:
        bandwidth: returns what this peer's link carries, in Mbit/s; 0 if it is not known. It may be too low, if the
            other members were slow; so nothing is held back when no round was near.
        in_round: returns true while this peer is in a round, or looks for its group.
        clock: returns seconds that do not run backwards.
    """

    def __init__(
        self,
        bandwidth: Callable[[], float],
        in_round: Callable[[], bool],
        *,
        clock: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        self._bandwidth = bandwidth
        self._in_round = in_round
        self._clock = clock
        self._lock = threading.Lock()
        self._mbps = 0.0
        self._until = -math.inf
        self._bucket: TokenBucket | None = None

    @property
    def is_free(self) -> bool:
        """True if there is never a pace to keep: the link is fast, or has not been measured."""
        return not 0 < self._bandwidth() < SLOW_MBPS

    def delay(self, count: int) -> float:
        """Take ``count`` bytes, and return the seconds to wait before they may go."""
        mbps = self._bandwidth()
        with self._lock:
            now = self._clock()
            if self._in_round():
                self._until = now + LATELY_SECONDS
            if not 0 < mbps < SLOW_MBPS or now >= self._until:
                self._bucket = None
                return 0.0
            if self._bucket is None or mbps != self._mbps:
                self._mbps = mbps
                self._bucket = TokenBucket(PART * mbps * 1e6 / 8 / WIRE_OVERHEAD, STEP_BYTES)
            return self._bucket.take(now, count)
