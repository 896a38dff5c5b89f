"""Reach: the way in which other peers can connect to a member. No I/O, no clock, no random source."""

from __future__ import annotations

from enum import IntEnum


class Reach(IntEnum):
    """Way to connect to a peer, as the peer signed it. A smaller number is better."""

    DIALABLE = 0  # every peer can dial it
    PUNCHABLE = 1  # its router keeps ports: another such peer connects to it by hole punching
    RELAYED = 2  # it dials others; peers that it cannot dial reach it through a relay only


def is_direct(one: Reach, other: Reach) -> bool:
    """Return whether two peers can exchange directly, without a relay.

    One of them dials the other one, or both punch.
    """
    return Reach.DIALABLE in (one, other) or (one is other is Reach.PUNCHABLE)
