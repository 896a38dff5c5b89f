"""The limits of punches and dials that other peers ask for. This module decides; it does no I/O and has no clock."""

from __future__ import annotations

from collections import Counter, OrderedDict

from p2pavg.net.limits.rate import TokenBucket
from p2pavg.net.transport import PeerId

# The tries that one peer may ask for. A peer asks for one connection, and for a lane or two in each direction when a
# group begins. Each may take three tries, after which a peer waits for a minute before it searches for a lane again.
PEER_TRIES = 16
PEER_TRIES_PER_SECOND = 0.25

# The tries that all peers together may ask for. p2pavg.net.limits.dial_policy bounds those that fail at one host.
ALL_TRIES = 128
ALL_TRIES_PER_SECOND = 8.0

# Tries that are under way. Each one occupies up to four sockets for a few seconds.
PEER_AT_ONCE = 4
ALL_AT_ONCE = 32

# The account of the peer that has asked least recently is forgotten. By then, ALL_TRIES was used up many times.
MAX_ACCOUNTS = 4096


class PunchLimits:
    """The accounts of the peers that ask this one to connect to them."""

    def __init__(self) -> None:
        self._all = TokenBucket(ALL_TRIES_PER_SECOND, ALL_TRIES)
        self._peers: OrderedDict[PeerId, TokenBucket] = OrderedDict()
        self._under_way: Counter[PeerId] = Counter()

    def refusal(self, now: float, peer_id: PeerId) -> str:
        """Return the reason for which a peer may ask for no try now; empty if it may."""
        if self._under_way[peer_id] >= PEER_AT_ONCE or self._under_way.total() >= ALL_AT_ONCE:
            return "too many tries are under way"
        account = self._peers.get(peer_id)
        if account is not None and account.level(now) < 1.0:
            return "the peer has asked for too many tries"
        if self._all.level(now) < 1.0:
            return "other peers have asked for too many tries"
        return ""

    def begin(self, now: float, peer_id: PeerId) -> None:
        """Count a try that begins."""
        self._under_way[peer_id] += 1
        self._all.take(now, 1.0)
        if peer_id not in self._peers:
            self._peers[peer_id] = TokenBucket(PEER_TRIES_PER_SECOND, PEER_TRIES)
        self._peers[peer_id].take(now, 1.0)
        self._peers.move_to_end(peer_id)
        while len(self._peers) > MAX_ACCOUNTS:
            self._peers.popitem(last=False)

    def end(self, peer_id: PeerId) -> None:
        """Count a try that has ended."""
        self._under_way[peer_id] -= 1
        self._under_way += Counter()  # drops the peers without a try
