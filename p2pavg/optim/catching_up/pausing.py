"""Pauses that a peer alone in its run, or its processes alone, make for peers that join. No I/O, no clock.

A peer that takes updates alone has no log of averages that others could replay, since no group signed them. A peer that
joins therefore has to fetch its state and compute a batch between two of its updates. Without a pause, it would be late
each time.
"""

from __future__ import annotations

import math

LONGEST_PAUSE_SECONDS = 30.0
"""Longest pause: a state of 1 GB at 300 Mbit/s. After it this peer goes on, and the next pause is that of a new try."""
REST = 9.0
"""After a pause, no other one for this many times its length: strangers that ask for ever cost a tenth of the time."""


class Pausing:
    """Decides if a peer alone waits before its next update."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._rests_until = -math.inf

    def is_due(self, wanted: bool, now: float) -> bool:
        """Return whether to wait now.

        Args:
            wanted: true if another peer fetches this peer's state, or has it and has computed nothing yet.
            now: seconds of any clock.
        """
        if self._since is None:
            if not wanted or now < self._rests_until:
                return False
            self._since = now
        if wanted and now < self._since + LONGEST_PAUSE_SECONDS:
            return True
        self._rests_until = now + REST * min(now - self._since, LONGEST_PAUSE_SECONDS)
        self._since = None
        return False
