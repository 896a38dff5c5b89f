"""How much may be sent or received in a time.

:class:`TokenBucket` decides and knows no clock; :class:`RateLimit` asks one, and is for threads and tasks at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# What travels for each byte of payload. A segment of 1448 bytes is a packet of 1500: 20 bytes of IP, 20 of TCP, 12 of
# TCP's timestamps. A TLS 1.3 record of 16384 bytes takes 22 more: 5 of header, 1 of type, 16 of tag. Noise takes 18 of
# up to 65519, yamux 12 of a frame. 1500/1448 * 16406/16384 = 1.0373, and 1.04 leaves room for pings and votes.
# What acknowledges the other direction is not in it: at most 52 bytes for two segments of that, 2 %, and on common
# network cards much less.
WIRE_OVERHEAD = 1.04

BURST_SECONDS = 0.05
MIN_BURST_BYTES = 32 * 1024
"""A write's piece goes as a whole anyhow. On a slow link this makes up for tasks that wake up late."""


class TokenBucket:
    """When bytes may go so that their rate is kept.

    Whoever wants to send takes first and waits afterwards. So what is taken may be more than the bucket holds, and goes
    when it has been earned: in any window at most ``rate * window`` and the larger of the burst and the largest that
    was taken at once.

    Args:
        rate_bytes_per_second: above 0.
        burst_bytes: what may go at once after a pause, above 0.
    """

    def __init__(self, rate_bytes_per_second: float, burst_bytes: float) -> None:
        if not rate_bytes_per_second > 0 or not burst_bytes > 0:
            raise ValueError(f"a rate and a burst are above 0, not {rate_bytes_per_second}, {burst_bytes}")
        self._rate = rate_bytes_per_second
        self._burst = burst_bytes
        self._level = float(burst_bytes)  # below 0: taken, and not yet earned
        self._last: float | None = None

    def take(self, now: float, count: float) -> float:
        """Seconds from now until these bytes may go. They are taken, even when they never go.

        Args:
            now: seconds of a clock that does not run backwards; an earlier moment counts as the last one.
            count: bytes, or what else the rate counts; 0 or more.
        """
        self._level = self.level(now) - count
        self._last = now if self._last is None else max(now, self._last)
        return max(0.0, -self._level / self._rate)

    def level(self, now: float) -> float:
        """Return how much may go at once; below 0 what was taken and is not earned yet. Takes nothing."""
        last = now if self._last is None else self._last
        return min(self._burst, self._level + self._rate * max(0.0, now - last))


class RateLimit:
    """A limit that all who send, or all who receive, share. For any threads and tasks at once.

    Args:
        mbps: Mbit/s on the link, headers included, above 0; ``None`` is without limit.
        clock: seconds that do not run backwards.
    """

    def __init__(self, mbps: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bucket: TokenBucket | None = None
        if mbps is not None:
            rate = mbps * 1e6 / 8 / WIRE_OVERHEAD
            self._bucket = TokenBucket(rate, max(rate * BURST_SECONDS, MIN_BURST_BYTES))

    @property
    def unlimited(self) -> bool:
        """Whether there is no limit."""
        return self._bucket is None

    def delay(self, count: int) -> float:
        """Seconds to wait before so many bytes of payload may go; they are taken from the limit already."""
        if self._bucket is None:
            return 0.0
        with self._lock:
            return self._bucket.take(self._clock(), count)


UNLIMITED = RateLimit(None)
