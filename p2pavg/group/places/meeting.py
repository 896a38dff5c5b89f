"""The places where a peer looks for a group, if not among all peers of its run. No I/O, no clock."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.base.messages import pack

MAX_PLACE_BYTES = 32
_DOMAIN = "p2pavg/place/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlace:
    """Place, peers and time of a search for one group.

    Raises:
        ValueError: a value is out of range.
    """

    place: bytes = b""
    """Name of the place, up to 32 bytes: only peers that look in one place see each other. Empty for the common one."""
    avoid: frozenset[str] = frozenset()
    """Ids of peers with which this peer forms no group now."""
    patience: float | None = None
    """Seconds after which a smaller group will do; ``match_timeout`` if ``None``."""

    def __post_init__(self) -> None:
        if not isinstance(self.place, bytes) or len(self.place) > MAX_PLACE_BYTES:
            raise ValueError(f"place must be at most {MAX_PLACE_BYTES} bytes, got {self.place!r}")
        patience = self.patience
        if patience is not None and not 0 < patience < math.inf:
            raise ValueError(f"patience must be a number of seconds above 0, or None, got {patience!r}")


@dataclass(frozen=True, slots=True)
class SearchStage:
    """One part of a search: a place, and the time after which the next part begins."""

    meeting: SearchPlace
    seconds: float = math.inf
    """Seconds; infinite for the last stage."""


def stages_at(where: SearchPlace | Sequence[SearchStage] | None) -> tuple[SearchStage, ...]:
    """Return the stages of a search: at one place, at several in turn, or among all peers that are ready for ``None``.

    Raises:
        ValueError: there is no stage, or one but the last has no end.
    """
    if where is None or isinstance(where, SearchPlace):
        return (SearchStage(where or EVERYWHERE),)
    stages = tuple(where)
    if not stages or not all(0 < stage.seconds < math.inf for stage in stages[:-1]):
        raise ValueError(f"meeting must have at least one stage, and all but the last an end, got {stages!r}")
    return stages


EVERYWHERE = SearchPlace()
"""Among all peers of a run that are ready."""


def key_at(ready_key: bytes, place: bytes) -> bytes:
    """Return the key of the readiness records of a place; that of the common place is ``ready_key`` itself."""
    return hashlib.sha256(pack(_DOMAIN, ready_key, place)).digest() if place else ready_key
