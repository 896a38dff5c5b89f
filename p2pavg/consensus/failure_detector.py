"""How long a member may be silent before it is given up. No I/O, no clock: who uses it says what time it is.

A member that is there says so every :data:`PING_SECONDS` when it has nothing else to say. Over a slow link a ping waits
behind data, whose arrival is as good a sign of life. How long a link is silent between two arrivals depends on its
pace, so the wait is several times what a part takes at the pace that was measured in this round.
"""

from __future__ import annotations

PING_SECONDS = 0.5
FLOOR_SECONDS = 1.5
PARTS = 4.0
"""How many parts' time a member may be silent."""
STALLS = 3.0
"""How many such waits a member that is there may send nothing of what it owes."""
FIRST_CONTACT_SECONDS = 4.0
"""As long as no pace is known, until a part's worth of bytes has come: a connection takes four round trips to come
about and, on a busy machine, its time; and over a slow link a piece of a part, of 32 KiB, takes its own."""


class Pace:
    """What one member's bytes arrive at, and what silence is therefore too long.

    Args:
        now: when the member was first waited for, in seconds of a clock that does not jump.
        part_bytes: of the largest part.
        limit: the longest silence, in seconds.
        prior: seconds that a part should take, until one has been measured.
    """

    def __init__(self, now: float, part_bytes: int, limit: float, prior: float = 0.0) -> None:
        self._part_bytes = part_bytes
        self._limit = limit
        self._prior = prior
        self._last = now
        self._owed: float | None = None
        self._doubted = False
        self._heard = self._voted = False
        self._bytes = 0
        self._seconds = 0.0

    def arrived(self, now: float, count: int, *, data: bool) -> None:
        """So many bytes have come; ``data``: of a part, which is what a link carries at its own pace."""
        if self._heard and data:
            # Pauses in which nothing was sent would make a fast link look slow: only so much of each counts.
            # And after an excuse the last arrival may lie ahead.
            self._seconds += max(0.0, min(now - self._last, FLOOR_SECONDS))
            self._bytes += count
        if data and self._owed is not None:
            self._owed = now
        self._voted |= not data
        self._heard, self._last = True, now

    def owes(self, now: float, yes: bool) -> None:
        """From now on the member has to send something and waits for nobody, or no longer has to."""
        self._owed = now if yes else None

    def doubt(self) -> None:
        """Another member has given this one up: it has half the time for what it owes."""
        self._doubted = True

    def part_seconds(self) -> float:
        """What a part takes, as far as is known."""
        measured = self._seconds * self._part_bytes / self._bytes if self._bytes else 0.0
        return measured if self._bytes >= self._part_bytes else max(measured, self._prior)

    def overdue(self, now: float) -> str | None:
        """Why the member is to be given up, or ``None``."""
        # Votes may come late for the first time, on a stream that is opened while both sides send parts already.
        known = self._voted and self._bytes >= self._part_bytes
        floor = FLOOR_SECONDS if known else FIRST_CONTACT_SECONDS
        pace = max(floor, PARTS * self.part_seconds())
        silence = min(pace, self._limit)
        if now - self._last >= silence:
            return f"silent for {now - self._last:.1f} s"
        stall = STALLS * max(FLOOR_SECONDS, PARTS * self.part_seconds())
        if self._owed is not None and now - self._owed >= min(stall, self._limit) / (1 + self._doubted):
            return f"sent nothing of its contribution for {now - self._owed:.1f} s"
        return None

    @property
    def heard(self) -> bool:
        """Whether anything has come yet."""
        return self._heard

    def excuse(self, seconds: float) -> None:
        """This process itself was held up for so long, and may not have read what came."""
        self._last += seconds
        if self._owed is not None:
            self._owed += seconds
