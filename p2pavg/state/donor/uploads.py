"""The bytes of states that a peer sends to others, counted for its subscribers. No I/O, no clock.

Bytes are counted in the threads that send them. Once a second, the counts become one report.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from p2pavg.base.limits import LOOK_SECONDS

QUIET_REPORTS = 3
"""After so many reports without a byte, the sending is over, and the count begins anew. It pauses while rounds
exchange."""

OnSent = Callable[[str, int], None]
"""Is told the id of a peer and the number of bytes that were sent to it, in any thread."""


@dataclass(frozen=True, slots=True)
class Upload:
    """One report."""

    done: int
    """Bytes since the sending began."""
    bytes_per_second: float
    peers: int
    """Peers to which bytes were sent since the last report."""
    is_over: bool = False
    """True for the last report, of nothing more."""


class Uploads:
    """Counts what is sent of the states of one run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = 0
        self._peers: set[str] = set()
        self._done = 0
        self._looked_at = 0.0
        self._quiet = 0

    def note(self, peer_id: str, count: int) -> None:
        """Count bytes that were sent to a peer."""
        with self._lock:
            self._sent += count
            self._peers.add(peer_id)

    def report(self, now: float) -> Upload | None:
        """Return what was sent since the last call; ``None`` if nothing was, and that was said before."""
        with self._lock:
            sent, self._sent = self._sent, 0
            peers, self._peers = len(self._peers), set()
        seconds, self._looked_at = now - self._looked_at, now
        if not sent:
            self._quiet += 1
            if not self._done or self._quiet < QUIET_REPORTS:
                return None
            done, self._done = self._done, 0
            return Upload(done, 0.0, 0, is_over=True)
        self._done += sent
        self._quiet = 0
        return Upload(self._done, sent / max(seconds, LOOK_SECONDS / 2), peers)
