"""The budget of bandwidth measurements that other peers ask for.

This module decides; it does no I/O and has no clock. A measurement moves bytes that no round needs, so all of them
together stay far below what a round moves.
"""

from __future__ import annotations

from collections import OrderedDict

from p2pavg.net.limits.rate import TokenBucket

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
MAX_ACCOUNTS = 1024
"""Accounts of peers and prefixes. One that is forgotten is full again; then the limit for all still holds."""


class BandwidthBudget:
    """Accounts of the peers that ask, of their prefixes, and of all together."""

    def __init__(self) -> None:
        self._total = TokenBucket(TOTAL_BYTES, TOTAL_BURST_BYTES)
        self._accounts: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()
        self._under_way = 0

    def begin(self, now: float, peer_id: str, prefix: str) -> bool:
        """Begin a measurement, and charge it. Return false, and charge nothing, if a limit is used up.

        Args:
            now: seconds of a clock that does not run backwards.
            prefix: the network of the peer; see :func:`p2pavg.net.limits.sources.prefix_of`.
        """
        buckets = [
            self._total,
            self._account("peer", peer_id, PEER_BYTES, PEER_BURST_BYTES),
            self._account("prefix", prefix, PREFIX_BYTES, PREFIX_BURST_BYTES),
        ]
        while len(self._accounts) > MAX_ACCOUNTS:
            self._accounts.popitem(last=False)
        if self._under_way >= MAX_AT_ONCE or any(bucket.level(now) < COST_BYTES for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.take(now, COST_BYTES)
        self._under_way += 1
        return True

    def end(self) -> None:
        """End a measurement that :meth:`begin` has begun."""
        self._under_way -= 1

    def _account(self, kind: str, name: str, rate: float, burst: float) -> TokenBucket:
        key = (kind, name)
        if key not in self._accounts:
            self._accounts[key] = TokenBucket(rate, burst)
        self._accounts.move_to_end(key)
        return self._accounts[key]
