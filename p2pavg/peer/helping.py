"""The rounds that an auxiliary helps: those that run, and the totals of those that have ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio

from p2pavg.peer.statuses import HeardStatuses
from p2pavg.round.exchange import ExchangeOutcome
from p2pavg.round.round import Round

LEAVES = "this peer leaves"


class HelpedRounds:
    """An auxiliary's rounds of one run, as its owner sees them.

    Args:
        peer_id: this peer's id.
    """

    def __init__(self, peer_id: str) -> None:
        self.rounds = 0
        """Rounds that ended with a result."""
        self.failed_rounds = 0
        self.elements = 0
        """Elements that this peer has reduced, in all rounds together."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.round_peers: tuple[str, ...] = ()
        """Ids of the other members of the last round."""
        self.run_peers: frozenset[str] = frozenset()
        """Ids of the other peers that have published an entry of the run."""
        self.heards: HeardStatuses | None = None
        """The statuses that peers of the run publish; ``None`` until the run was joined."""
        self.looked = trio.Event()
        """Is set when :attr:`run_peers` is known."""
        self._peer_id = peer_id
        self._running: set[Round[Any]] = set()
        self._leaving = trio.Event()
        self._changed = trio.Event()

    @property
    def is_exchanging(self) -> bool:
        """True while a round that runs has its group."""
        return any(each.is_exchanging for each in self._running)

    @property
    def is_leaving(self) -> bool:
        """True if no further round begins."""
        return self._leaving.is_set()

    def leave(self) -> None:
        """Begin no further round, and end those that have no group yet."""
        self._leaving.set()
        for each in tuple(self._running):
            each.leave(LEAVES)

    async def left(self) -> None:
        """Wait until :meth:`leave` was called and no round runs any more."""
        await self._leaving.wait()
        while self._running:
            await self._changed.wait()

    @contextmanager
    def running(self, begun: Round[Any]) -> Iterator[None]:
        """Count a round as running until the end of the block."""
        self._running.add(begun)
        try:
            yield
        finally:
            self._running.discard(begun)
            self._changed.set()
            self._changed = trio.Event()

    def ended(self, outcome: ExchangeOutcome) -> None:
        """Add a round to the totals."""
        roster = outcome.roster
        self.bytes_sent += outcome.bytes_sent
        self.bytes_received += outcome.bytes_received
        self.round_peers = tuple(m.peer_id for m in roster.members if m.peer_id != self._peer_id)
        if outcome.verdict is not None:
            self.failed_rounds += 1
            return
        self.rounds += 1
        self.elements += roster.shares[roster.position(self._peer_id)]
