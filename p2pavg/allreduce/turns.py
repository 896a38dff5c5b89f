"""The order in which lanes that send at the same time take turns, piece by piece.

Where links are the bottleneck, free competition wastes them: of several connections that share a link some get more of
it and are done early, and at the end some links carry little while others are still full. If each member sends to the
others in turn, beginning with the one after it, every member receives from one other at a time, and all links are busy
until the last byte. That is the schedule of a pairwise exchange; Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005, section 4.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

HOLD_LANE_SECONDS = 0.25
"""Time that one lane may take for its piece while others wait. A member that has stopped delays them no longer."""

Rank: TypeAlias = tuple[int, ...]
"""Order of lanes: contributions before averages, because other members wait for contributions; then the lane that has
sent least; then the member that comes first after this one. No two waiting lanes have the same rank."""


class Turns:
    """Lets one thread send at a time. Safe to use from any thread.

    Args:
        clock: seconds that do not run backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[Rank] = []
        self._holder: object = None
        self._until = 0.0

    @contextmanager
    def turn(self, rank: Rank) -> Iterator[None]:
        """Wait for this thread's turn, and have it for the block, or until others have waited for too long."""
        me = object()
        with self._changed:
            heapq.heappush(self._waiting, rank)
            while self._holder is not None or self._waiting[0] != rank:
                left = self._until - self._clock() if self._holder is not None else None
                if left is not None and left <= 0:
                    self._holder = None
                    self._changed.notify_all()
                    continue
                self._changed.wait(left)
            heapq.heappop(self._waiting)
            self._holder, self._until = me, self._clock() + HOLD_LANE_SECONDS
        try:
            yield
        finally:
            with self._changed:
                if self._holder is me:
                    self._holder = None
                if self._waiting:
                    self._changed.notify_all()
