"""The donors of one blob: how fast each one is, and when it may be tried again. No I/O, no clock.

A donor that fails is left alone for a pause, which doubles with each failure. While other donors are there the pause
is longer, because they can do its work. A donor that sent a wrong piece is excluded for good.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from p2pavg.base.limits import ASK_AGAIN_SECONDS, REPLY_SECONDS

RATE_SECONDS = 3.0
"""A rate is a mean in which what was measured so long ago counts 1/e."""
MAX_DONOR_PAUSE_SECONDS = 30.0
AMONG_OTHERS = 8.0
"""A pause is so many times as long while other donors are there."""
STALLED_SECONDS = 3.0
"""The pieces of a donor that sends no byte for so long are taken over by any donor that has nothing to do."""
DONOR_PIECE_SECONDS = 120.0
"""A donor that completes no piece for so long has failed, even if bytes come: 70 kbit/s for a piece of 1 MiB."""
TRUSTED_FAILURES = 3
"""After so many failures in a row, a donor counts as usable only when it has sent something that was right."""


class Meter:
    """A rate in bytes per second, as a mean of the last seconds."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second; 0 if nothing was measured."""
        return self._bytes / self._seconds if self._seconds > 0.0 else 0.0

    def note(self, count: int, seconds: float) -> None:
        """Note bytes that came within some seconds."""
        keep = math.exp(-seconds / RATE_SECONDS)
        self._bytes = self._bytes * keep + count
        self._seconds = self._seconds * keep + seconds


@dataclass(eq=False, slots=True)
class Range:
    """Consecutive pieces that one donor was asked for."""

    first: int
    count: int
    left: list[int]
    """Pieces that the donor has not sent yet, in the order in which it sends them."""


@dataclass(eq=False, slots=True)
class Donor:
    """One donor, as its joiner sees it."""

    peer_id: str
    active: bool = False
    """True while a session with it is used."""
    ranges: list[Range] = field(default_factory=list)
    asked_manifest: bool = False
    meter: Meter = field(default_factory=Meter)
    failures: int = 0
    """In a row."""
    failed_at: float = -math.inf
    reason: str = ""
    """Of its last failure, or of its exclusion."""
    excluded: bool = False
    received: int = 0
    """Bytes that its session had received when it was observed last."""
    observed_at: float = 0.0
    heard_at: float = 0.0
    """The last byte, or the moment in which something was asked of it."""
    useful_at: float = 0.0
    """The last piece, or the moment in which something was asked of it."""

    @property
    def is_busy(self) -> bool:
        """True if something is asked of it."""
        return bool(self.ranges) or self.asked_manifest

    @property
    def is_usable(self) -> bool:
        """True if it can be expected to send something soon."""
        return self.active and self.failures < TRUSTED_FAILURES

    def begin(self, received: int, now: float) -> None:
        """Begin to use a session of it, which has received so many bytes before."""
        self.active = True
        self.received = received
        self.observed_at = self.heard_at = self.useful_at = now

    def observe(self, received: int, now: float) -> None:
        """Note how many bytes its session has received in all."""
        count = received - self.received
        if self.is_busy:
            self.meter.note(count, max(0.0, now - self.observed_at))
        if count:
            self.heard_at = now
        self.received, self.observed_at = received, now

    def ask(self, now: float) -> None:
        """Note that something is asked of it."""
        if not self.is_busy:
            self.observed_at = self.heard_at = self.useful_at = now

    def was_useful(self, now: float) -> None:
        """Note that it sent something that was right."""
        self.failures = 0
        self.useful_at = self.heard_at = now

    def fail(self, now: float, reason: str) -> None:
        """Note that its session is of no use any more."""
        self.active, self.asked_manifest = False, False
        self.ranges.clear()
        self.failures += 1
        self.failed_at, self.reason = now, reason

    def pause(self, among_others: bool) -> float:
        """Return the seconds for which it is left alone after its last failure."""
        doubled = ASK_AGAIN_SECONDS * 2.0 ** min(self.failures - 1, 16)
        return min(MAX_DONOR_PAUSE_SECONDS, doubled) * (AMONG_OTHERS if among_others else 1.0)

    def is_stalled(self, now: float) -> bool:
        """Return whether its pieces are to be taken over."""
        return self.is_busy and now - self.heard_at > STALLED_SECONDS

    def too_slow(self, now: float) -> str:
        """Return the reason for which it has failed although its session lives; empty if it has not."""
        if not self.is_busy:
            return ""
        if now - self.heard_at >= REPLY_SECONDS:
            return f"it sent nothing for {REPLY_SECONDS:.0f} s"
        if now - self.useful_at >= DONOR_PIECE_SECONDS:
            return f"it completed no piece within {DONOR_PIECE_SECONDS:.0f} s"
        return ""
