"""The places in which one attempt looks for other peers, and what it has seen there. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pavg.group.rungs import Ladder, adapted, rung_for, rung_key

DOUBT = 2
"""The run may be so many times as large as it seems."""


@dataclass(slots=True)
class Search:
    """The places of one attempt.

    Args:
        key: of the common place.
        slot: number of the time slot, see :func:`p2pavg.group.rungs.slot_at`.
    """

    peer_id: str
    key: bytes
    slot: int
    ladder: Ladder
    said: list[bytes] = field(default_factory=list)
    """Keys under which this peer's record is published, in the order of the rungs that were tried."""
    seen: int = 0
    """The most other peers that were seen in the first place."""
    full: bool = False
    """True if the last place had no room for the record."""

    def key_on(self, rung: int) -> bytes:
        """Return the key of this peer's place on a rung."""
        return rung_key(self.key, self.peer_id, self.slot, rung)


def ladder_for(network: int, target: int, last: int | None) -> Ladder:
    """Return the rungs of an attempt.

    Args:
        network: about how many peers the network has: a run has no more.
        target: number of members of a group.
        last: the rung that the attempt before has led to; ``None`` for the first attempt.
    """
    deepest = rung_for(DOUBT * network, target)
    start = rung_for(network, target) if last is None else min(last, deepest)
    return Ladder(start, deepest)


def rung_after(search: Search, target: int) -> int:
    """Return the rung at which the next attempt begins."""
    return adapted(search.ladder.start, search.seen, target)
