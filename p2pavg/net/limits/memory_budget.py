"""How many bytes that others have sent, and that this process has not used yet, it holds in all.

Decides; no I/O. Each stream and each connection has a limit of its own (:mod:`p2pavg.net.libp2p.guards`), but their sum
over 512 connections is far more than a machine has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Protocol

# Unread bytes and unfinished messages of all peers that share no group with this one. The largest message of such a
# peer is a record message of 1 MiB, and an honest one is complete within a second: 64 at once are more than come.
STRANGERS_BYTES = 64 * 1024 * 1024

# Of all peers. A member of a group that sends parts over a stream fills a window of up to 4 MiB; 16 members with two
# such streams each have 128 MiB on the way at most.
TOTAL_BYTES = 256 * 1024 * 1024


class Holder(Protocol):
    """One connection's bytes."""

    @property
    def owner(self) -> str:
        """The peer that sent them."""

    def held(self) -> int:
        """Return how many there are."""

    def shed(self) -> int:
        """Give up the stream that holds most; how many bytes that makes free, 0 when there is nothing to give up."""


class MemoryBudget:
    """The bytes of all connections together.

    Args:
        holders: every connection there is.
        is_companion: whether a peer is in a group with this one, or was.
        strangers_bytes: what all others may hold together.
        total_bytes: what all may.
    """

    def __init__(
        self,
        holders: Callable[[], Iterable[Holder]],
        is_companion: Callable[[str], bool],
        *,
        strangers_bytes: int = STRANGERS_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        self._holders = holders
        self._is_companion = is_companion
        self._limits = {False: strangers_bytes, True: total_bytes}
        self._room = 0  # so many bytes may still come before it has to be counted what there is

    def arrived(self, count: int) -> None:
        """Note that ``count`` bytes have come. The greediest peer loses streams while there are too many."""
        self._room -= count
        if self._room < 0:
            self._room = min(self._shed(companions=False), self._shed(companions=True))

    def held(self) -> int:
        """Return how many bytes there are."""
        return sum(holder.held() for holder in self._holders())

    def _shed(self, *, companions: bool) -> int:
        """Return how much room is left, once the greediest have given up what is too much."""
        by_peer: defaultdict[str, list[Holder]] = defaultdict(list)
        sizes: defaultdict[str, int] = defaultdict(int)
        for holder in self._holders():
            if companions or not self._is_companion(holder.owner):
                by_peer[holder.owner].append(holder)
                sizes[holder.owner] += holder.held()
        total, limit = sum(sizes.values()), self._limits[companions]
        while total > limit:
            greediest = max(sizes, key=sizes.__getitem__)
            freed = max(by_peer[greediest], key=lambda holder: holder.held()).shed()
            if freed == 0:
                del sizes[greediest]
                if not sizes:
                    break
                continue
            sizes[greediest] -= freed
            total -= freed
        # A sixteenth at a time, so that counting costs little also where much is held for long.
        return max(0, min(limit - total, limit // 16))
