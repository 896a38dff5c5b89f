"""Short rounds, whose followers need no streams of votes to each other. No I/O, no clock."""

from __future__ import annotations

QUIET_FOLLOWERS_SECONDS = 1.0
"""For so long, two followers need no stream of votes to each other. A multiple of the pause between two pings."""
QUIET_BYTES = 16_384
"""In a butterfly a member sends and receives about twice the vector, so a link of 1 Mbit/s carries such a round in a
quarter of QUIET_FOLLOWERS_SECONDS. On a link full of parts, a stream that is opened late would wait behind them, and
its pings with it."""


def is_short(vector_bytes: int) -> bool:
    """Return whether even a slow link carries the round of a vector, with so many bytes encoded, in a moment."""
    return vector_bytes <= QUIET_BYTES
