"""The memory budget: a limit of all bytes that other peers have sent and that this process has not used yet.

This module decides; it does no I/O. Each stream and each connection has its own limit
(:mod:`p2pavg.net.libp2p.guarded_yamux`). But the sum of these limits over 512 connections is more than a machine has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Protocol

from p2pavg.net.limits.admission import Acquaintances, TrustClass

# Unread bytes and unfinished messages of all peers that share no group with this one. Their largest message is a record
# message of 1 MiB. An honest one is complete within a second, so 64 of them at once are more than ever occur.
STRANGERS_BYTES = 64 * 1024 * 1024

# The same of all peers. A member of a group that sends parts over a stream fills a window of up to 4 MiB. 16 members
# with two such streams each have at most 128 MiB on the way.
TOTAL_BYTES = 256 * 1024 * 1024


class Holder(Protocol):
    """The bytes that one connection holds."""

    @property
    def owner(self) -> str:
        """The peer that sent them."""

    def held(self) -> int:
        """Return the number of bytes that the connection holds."""

    def shed(self) -> int:
        """Give up the stream that holds the most bytes.

        Return the number of bytes freed; 0 if there is no such stream.
        """


class MemoryBudget:
    """The bytes of all connections together.

    Args:
        holders: every connection, as its owner keeps them.
        acquaintances: tells which peers are companions.
        strangers_bytes: the limit of all peers that are not companions.
        total_bytes: the limit of all peers.
    """

    def __init__(
        self,
        holders: Collection[Holder],
        acquaintances: Acquaintances,
        *,
        strangers_bytes: int = STRANGERS_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        self._holders = holders
        self._acquaintances = acquaintances
        self._limits = {False: strangers_bytes, True: total_bytes}
        self._room = 0  # bytes that may still arrive before all holders must be counted again

    def arrived(self, count: int) -> None:
        """Note that ``count`` bytes have arrived. While there are too many, the greediest peer loses streams."""
        self._room -= count
        if self._room < 0:
            self._room = min(self._shed(companions=False), self._shed(companions=True))

    def held(self) -> int:
        """Return the number of bytes that all connections hold."""
        return sum(holder.held() for holder in self._holders)

    def _shed(self, *, companions: bool) -> int:
        """Let the greediest peers give up streams until the limit is kept. Return the room that is left."""
        by_peer: defaultdict[str, list[Holder]] = defaultdict(list)
        sizes: defaultdict[str, int] = defaultdict(int)
        for holder in self._holders:
            is_companion = self._acquaintances.standing_of(holder.owner) is TrustClass.COMPANION
            if companions or not is_companion:
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
        # Count again after a sixteenth of the limit at the latest. So counting is cheap even if the budget stays nearly
        # full.
        return max(0, min(limit - total, limit // 16))
