"""Circuits of a simulated network: the peers that relay for others, and the connections that break with them."""

from __future__ import annotations

from p2pavg.group.reach import Reach
from p2pavg.net.nat.reach.reachability import Kind
from p2pavg.testing.memory.connection import End

DIRECT_KINDS = frozenset(Kind) - {Kind.PUNCHABLE, Kind.RELAYED}
"""The kinds of peers that others can dial."""


def reach_of(kind: Kind) -> Reach:
    """Return the reach of a peer of some kind."""
    if kind in DIRECT_KINDS:
        return Reach.DIALABLE
    return Reach.PUNCHABLE if kind is Kind.PUNCHABLE else Reach.RELAYED


class Circuits:
    """The connections of others that one peer relays."""

    def __init__(self) -> None:
        self._ends: set[End] = set()  # one end of each
        self.full = False
        """True if this peer relays no more connections."""

    def add(self, end: End) -> None:
        """Relay a connection, and forget those that have closed."""
        self._ends = {known for known in self._ends if not known.closed} | {end}

    def break_all(self) -> None:
        """Break every connection that this peer relays, at both ends."""
        for end in self._ends:
            for each in (end, end.other):
                each.close("the relay has gone")
        self._ends.clear()
