"""The places at which the many peers of a run leave their records, so that they do not all meet at eight keepers.

Pure: no I/O, no clock, no random source.

Theory of operation
-------------------

A *level* is a number of places: level 0 is the common place of all peers, and each further level divides every place of
the one below into four. A peer's place on a level follows from its id and the time (:data:`SLOT_SECONDS`), so no
coordinator is needed. :func:`level_for` chooses the level on which a place has 20 to 80 of the run's peers, or enough
for a group.

**Peers that see different sizes meet.** A peer that finds too few others in its place climbs: it publishes the same
record in its place on the level below as well, and so on until the common place (:class:`Ladder`). If even that has too
few, it descends: those who see a larger run are further up. A peer keeps what it has published, so in the end it is in
all of its places, and any two peers have the common one. A small run never leaves level 0.

**What an attacker can do.** It can invent identities, and so fill a place, or make a peer believe in a larger network.
Both delay a peer, and neither keeps it away: a peer climbs after :data:`ANYWAY_SECONDS` whatever it has seen, so it is
in the common place after a few seconds. A place that is full sends it on at once. The number of levels is limited, and
so is what a peer publishes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.base.messages import pack

FACTOR = 4
"""Places of a level in each place of the level below."""
LEAST = 20
"""Peers in a place on average, at least: two or three groups of eight. Groups of a place form one after the other, so a
crowded place costs more time than one that is nearly empty."""
MAX_LEVEL = 8
"""65,536 places, enough for a million peers."""
SLOT_SECONDS = 300.0
"""Peers have other neighbours after this time, so that averages spread through the whole run."""
ANYWAY_SECONDS = 2.0
"""A peer without a group goes on after this, however many others it sees: they may be stale, or invented."""

DOUBT = 2
"""The run may be so many times as large as it seems."""

_PLACE = "p2pavg/rung/1"
_NUMBER = "p2pavg/rung/cell/1"


def level_for(peers: int, wanted: int = 0) -> int:
    """Return the level for a number of peers, of which ``wanted`` have to see each other at least."""
    least, level = max(LEAST, wanted), 0
    while level < MAX_LEVEL and peers >= least * FACTOR ** (level + 1):
        level += 1
    return level


def slot_at(now: float) -> int:
    """Return the number of the time slot of a wall-clock time in seconds."""
    return int(now // SLOT_SECONDS)


def place_of(peer_id: str, slot: int, level: int) -> int:
    """Return the place of a peer on a level, from 0 to ``FACTOR**level - 1``. Places of lower levels contain it."""
    digest = hashlib.sha256(pack(_NUMBER, peer_id, slot)).digest()
    return int.from_bytes(digest[:16], "big") * int(FACTOR**level) >> 128


def place_key(key: bytes, slot: int, level: int, place: int) -> bytes:
    """Return the key of the records of one place. The common place has ``key`` itself, at all times."""
    return key if level == 0 else hashlib.sha256(pack(_PLACE, key, slot, level, place)).digest()


def level_key(key: bytes, peer_id: str, slot: int, level: int) -> bytes:
    """Return the key of the records of a peer's place on a level."""
    return place_key(key, slot, level, place_of(peer_id, slot, level))


@dataclass(slots=True)
class Ladder:
    """The order in which a peer without a group tries its levels: its own, those below, those above.

    Times are seconds on any clock.
    """

    start: int
    deepest: int
    """The last level that it tries, for a run that is larger than it seems."""
    left: list[int] = field(init=False)
    """Levels that it has not tried yet, in order."""

    def __post_init__(self) -> None:
        self.left = [*range(self.start - 1, -1, -1), *range(self.start + 1, self.deepest + 1)]

    def patience(self, *, enough: bool, follows: bool, full: bool) -> float:
        """Return the seconds from the last attempted level to the next one; infinite if there is none.

        Args:
            enough: true if this peer sees enough others for a group on the levels that it has tried.
            follows: true if it is in a group that another peer leads.
            full: true if the last place had no room for its record.
        """
        if not self.left:
            return math.inf
        if full:
            return 0.0
        if follows:
            return 2 * ANYWAY_SECONDS  # its leader climbs for the group
        # A peer whose place has too few others waits a moment for more all the same. Others may be about to publish.
        return ANYWAY_SECONDS if enough else GLANCE_SECONDS

    def take(self, *, full: bool) -> int:
        """Return the next level, and count it as tried. From a full place it leads up, as it does for others there."""
        deeper = [level for level in self.left if level > self.start]
        level = deeper[0] if full and deeper else self.left[0]
        self.left.remove(level)
        return level


def ladder_for(network: int, wanted: int = 0, last: int | None = None) -> Ladder:
    """Return the order in which a peer tries its levels.

    Args:
        network: about how many peers the network has: a run has no more.
        wanted: see :func:`level_for`.
        last: the level to which the peer's last search has led; ``None`` for its first.
    """
    deepest = level_for(DOUBT * network, wanted)
    return Ladder(level_for(network, wanted) if last is None else min(last, deepest), deepest)


def adapted(level: int, seen: int, wanted: int) -> int:
    """Return the level at which a peer begins its next search.

    Args:
        level: the one at which it began the last.
        seen: the most other peers that it saw in its place there.
        wanted: see :func:`level_for`.
    """
    if seen + 1 < wanted:
        return max(level - 1, 0)
    return min(level + 1, MAX_LEVEL) if seen + 1 >= FACTOR * max(LEAST, wanted) else level
