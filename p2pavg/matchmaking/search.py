"""The places in which one attempt looks for other peers, and what it has seen there. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pavg.group.places.levels import Ladder, adapted, level_key


@dataclass(slots=True)
class PlaceSearch:
    """The places of one attempt.

    Args:
        key: of the common place.
        slot: number of the time slot, see :func:`p2pavg.group.places.levels.slot_at`.
    """

    peer_id: str
    key: bytes
    slot: int
    ladder: Ladder
    said: list[bytes] = field(default_factory=list)
    """Keys under which this peer's record is published, in the order of the levels that were tried."""
    seen: int = 0
    """The most other peers that were seen in the first place."""
    full: bool = False
    """True if the last place had no room for the record."""

    def key_on(self, level: int) -> bytes:
        """Return the key of this peer's place on a level."""
        return level_key(self.key, self.peer_id, self.slot, level)


def level_after(search: PlaceSearch, target: int) -> int:
    """Return the level at which the next attempt begins."""
    return adapted(search.ladder.start, search.seen, target)
