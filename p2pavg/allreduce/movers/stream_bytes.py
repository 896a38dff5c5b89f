"""The bytes that one member's parts have taken on streams, in one direction. No I/O, no clock."""

from __future__ import annotations

from collections import Counter

from p2pavg.net.transport import Stream
from p2pavg.telemetry.events import Way


class StreamBytes:
    """Counts bytes by the way of the stream that has carried them."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.relayed: set[str] = set()
        """Ids of members whose streams were relayed."""

    @property
    def total(self) -> int:
        """Bytes on all streams."""
        return self._counts.total()

    def with_lanes(self, count: int) -> dict[str, int]:
        """Return all bytes by :class:`~p2pavg.telemetry.events.Way`; ``count`` is that of direct lanes."""
        return {str(Way.LANE): count, **self._counts}

    def add(self, stream: Stream, count: int) -> None:
        """Count bytes that a stream has carried."""
        self._counts[str(Way.RELAYED if stream.relayed else Way.STREAM)] += count
        if stream.relayed:
            self.relayed.add(stream.remote)
