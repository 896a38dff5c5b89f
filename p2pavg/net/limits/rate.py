"""Rate limits: :class:`TokenBucket` decides without a clock, :class:`RateLimit` adds a clock and is thread-safe."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

# Bytes on the link for each byte of payload. A TCP segment of 1448 bytes travels in a packet of 1500 bytes: 20 for IP,
# 20 for TCP, 12 for TCP's timestamps. A TLS 1.3 record of 16384 bytes has 22 more: 5 for the header, 1 for the type, 16
# for the tag. Noise adds 18 bytes to up to 65519, yamux 12 to each frame. 1500/1448 * 16406/16384 = 1.0373, and 1.04
# leaves room for pings and votes. Acknowledgements of the other direction are not counted: at most 52 bytes for two
# segments, which is 2 %, and much less on common network cards.
WIRE_OVERHEAD = 1.04

BURST_SECONDS = 0.05
MIN_BURST_BYTES = 32 * 1024
"""The smallest burst.

A piece of a write goes as a whole anyhow. On a slow link, it makes up for tasks that wake late.
"""

RATE_PIECE_SECONDS = 0.02
MIN_PIECE_BYTES = 64 * 1024
MAX_PIECE_BYTES = 256 * 1024
"""Under a limit, bytes go in pieces: a whole part at once would be a burst. Each pause between them costs processor
time."""


class TokenBucket:
    """A token bucket that may go into debt.

    A sender first takes its bytes and then waits. So it may take more than the bucket holds, and it sends when the debt
    is paid. In any window, the bytes sent are at most ``rate * window`` plus a burst. This burst is ``burst_bytes``, or
    the largest single take if that is more.

    Args:
        rate_bytes_per_second: above 0.
        burst_bytes: the bytes that may go at once after a pause, above 0.
    """

    def __init__(self, rate_bytes_per_second: float, burst_bytes: float) -> None:
        if not rate_bytes_per_second > 0 or not burst_bytes > 0:
            raise ValueError(f"a rate and a burst are above 0, not {rate_bytes_per_second}, {burst_bytes}")
        self._rate = rate_bytes_per_second
        self._burst = burst_bytes
        self._level = float(burst_bytes)  # a negative level is a debt
        self._last: float | None = None

    def take(self, now: float, count: float) -> float:
        """Take ``count`` bytes and return the seconds from now until they may go. They cannot be given back.

        Args:
            now: seconds of a clock that does not run backwards; an earlier moment counts as the last one.
            count: bytes, or another unit that the rate counts; 0 or more.
        """
        self._level = self.level(now) - count
        self._last = now if self._last is None else max(now, self._last)
        return max(0.0, -self._level / self._rate)

    def level(self, now: float) -> float:
        """Return how much may go at once; a negative number is a debt. Takes nothing."""
        last = now if self._last is None else self._last
        return min(self._burst, self._level + self._rate * max(0.0, now - last))


MAX_ACCOUNTS = 4096


class Accounts:
    """Buckets of one rate, one for each name, such as a peer or a host.

    The one that was used least recently is forgotten, and then full again. So another limit has to bound those who use
    many names.

    Args:
        most: buckets that are kept.
    """

    def __init__(self, per_second: float, burst: float, most: int = MAX_ACCOUNTS) -> None:
        self._per_second, self._burst, self._most = per_second, burst, most
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def level(self, now: float, name: str) -> float:
        """Return how much of a name's bucket may go at once. It takes no place: questions push out no other account."""
        return self._buckets[name].level(now) if name in self._buckets else self._burst

    def of(self, name: str) -> TokenBucket:
        """Return the bucket of a name, which is the last one to be forgotten from now on."""
        bucket = self._buckets.pop(name, None) or TokenBucket(self._per_second, self._burst)
        self._buckets[name] = bucket
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return bucket


def take_from_all(now: float, count: float, *buckets: TokenBucket) -> bool:
    """Take from each bucket, and return true; take nothing if one of them holds less."""
    if any(bucket.level(now) < count for bucket in buckets):
        return False
    for bucket in buckets:
        bucket.take(now, count)
    return True


class RateLimit:
    """A limit that all senders, or all receivers, of this process share. Threads and tasks may use it at once.

    Args:
        mbps: Mbit/s on the link, headers included, above 0; ``None`` is without limit.
        clock: returns seconds that do not run backwards.
    """

    def __init__(self, mbps: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bucket: TokenBucket | None = None
        self.piece_bytes = MAX_PIECE_BYTES
        """Bytes of a part between two pauses."""
        if mbps is not None:
            rate = mbps * 1e6 / 8 / WIRE_OVERHEAD
            self.piece_bytes = min(max(int(rate * RATE_PIECE_SECONDS), MIN_PIECE_BYTES), MAX_PIECE_BYTES)
            self._bucket = TokenBucket(rate, max(rate * BURST_SECONDS, MIN_BURST_BYTES))

    @property
    def unlimited(self) -> bool:
        """True if there is no limit."""
        return self._bucket is None

    def delay(self, count: int) -> float:
        """Take ``count`` bytes of payload, and return the seconds to wait before they may go."""
        if self._bucket is None:
            return 0.0
        with self._lock:
            return self._bucket.take(self._clock(), count)


UNLIMITED = RateLimit(None)


# The budget of bandwidth measurements that other peers ask for. A measurement moves bytes that no round needs, so all
# of them together stay far below what a round moves.

BLOCK_BYTES = 16 * 1024
ROUNDS = (1, 2, 4, 8, 16)
"""Blocks of each round. The last one has the bytes of a window of libp2p's streams."""
MAX_BLOCKS = sum(ROUNDS)
"""Blocks of a measurement in each direction: half a MiB, 0.4 s at 10 Mbit/s."""
COST_BYTES = 2 * MAX_BLOCKS * BLOCK_BYTES
"""The cost of a measurement, which is charged when it begins."""

# Two measurements of one peer at once, and one every 31 s. A user who looks for a fault repeats the doctor.
PEER_BURST_BYTES = 2 * COST_BYTES
PEER_BYTES = 32 * 1024
# Eight peers of a prefix at once: identities cost nothing, networks do.
PREFIX_BURST_BYTES = 8 * COST_BYTES
PREFIX_BYTES = 64 * 1024
# For all together, 1 Mbit/s on average. When strangers use it up, the doctor of an honest peer hears "busy".
TOTAL_BURST_BYTES = 16 * COST_BYTES
TOTAL_BYTES = 128 * 1024

MAX_AT_ONCE = 2
"""Measurements at once: more of them would measure each other."""


class BandwidthBudget:
    """Accounts of the peers that ask, of their prefixes, and of all together."""

    def __init__(self) -> None:
        self._total = TokenBucket(TOTAL_BYTES, TOTAL_BURST_BYTES)
        self._peers = Accounts(PEER_BYTES, PEER_BURST_BYTES)
        self._prefixes = Accounts(PREFIX_BYTES, PREFIX_BURST_BYTES)
        self._under_way = 0

    def begin(self, now: float, peer_id: str, prefix: str) -> bool:
        """Begin a measurement, and charge it. Return false, and charge nothing, if a limit is used up.

        Args:
            now: seconds of a clock that does not run backwards.
            prefix: the network of the peer; see :func:`p2pavg.base.hosts.prefix_of`.
        """
        buckets = (self._total, self._peers.of(peer_id), self._prefixes.of(prefix))
        if self._under_way >= MAX_AT_ONCE or not take_from_all(now, COST_BYTES, *buckets):
            return False
        self._under_way += 1
        return True

    def end(self) -> None:
        """End a measurement that :meth:`begin` has begun."""
        self._under_way -= 1
