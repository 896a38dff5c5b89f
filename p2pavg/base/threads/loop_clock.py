"""The clock of an event loop that leaves out the time in which the loop could not run.

A training loop may hold Python's lock for seconds: while it tokenises, or in an extension. Its process may be stopped,
or get no processor. All this time the event loop reads nothing, although the answers of other peers may have arrived.
With an ordinary clock, every timeout that was over meanwhile would end at the first moment in which the loop runs
again, before the answers are read, and this peer would take the others for dead.

On this clock, such a standstill counts for :data:`LONGEST_STEP` at most. So a timeout of this process measures the
others, never this process: it is over only if the loop has run, and has read all that arrived, for about as long.

The wall clock goes on meanwhile. What expires at a moment that other peers know, such as a record, is not measured with
this clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trio.abc import Clock

LONGEST_SLEEP_SECONDS = 0.25
"""Longest sleep of the loop. A longer one could not be told from a standstill."""
LONGEST_STEP = 0.5
"""Longest time between two looks at the clock that counts in full: a sleep, and the pause of a busy machine."""


class LoopClock(Clock):
    """Seconds for which an event loop has been able to run.

    Only the loop's thread may call the methods of trio's interface. Any thread may read
    :attr:`stood_still` and call :meth:`behind`.

    Args:
        monotonic: returns seconds of a monotonic clock.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._looked = monotonic()
        self.stood_still = 0.0
        """Seconds that this clock has left out so far."""

    def start_clock(self) -> None:
        """Begin to run. The time between the making of the clock and this is no standstill."""
        self._looked = self._monotonic()

    def current_time(self) -> float:
        """Return the time of this clock, in seconds."""
        now = self._monotonic()
        step, self._looked = now - self._looked, now
        if step > LONGEST_STEP:
            self.stood_still += step - LONGEST_STEP
        return now - self.stood_still

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return the seconds that the loop may sleep."""
        return min(deadline - self.current_time(), LONGEST_SLEEP_SECONDS)

    def behind(self) -> float:
        """Return the seconds for which the loop has stood still in all, up to now."""
        # The sum first: if the loop looks between the two lines, the standstill is counted once, at the next call.
        before = self.stood_still
        return before + max(self._monotonic() - self._looked - LONGEST_STEP, 0.0)
