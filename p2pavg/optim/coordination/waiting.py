"""Waiting for other peers: its duration, and warnings to the user. No I/O, no clock: calls are given ``now``."""

from __future__ import annotations

from collections.abc import Sequence

from p2pavg.base.limits import LOOK_SECONDS, MAX_BACKOFF_SECONDS, WARN_WAIT_SECONDS

MAX_NAMED = 5  # peers; they fit on a line of a terminal
SHORT_ID = 6  # last characters of an id; the first ones are the same for all peers


def named(peers: Sequence[str]) -> str:
    """Name a few peers by the ends of their ids."""
    names = [f"…{peer[-SHORT_ID:]}" for peer in peers[:MAX_NAMED]]
    more = len(peers) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


class GrowingPauses:
    """Schedule of repeated warnings: the first at once, the next ones after doubling pauses."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._quiet_until = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether to warn now; if so, the next pause begins."""
        if self._pause and now < self._quiet_until:
            return False
        self._pause = min(2 * self._pause, MAX_BACKOFF_SECONDS) if self._pause else WARN_WAIT_SECONDS
        self._quiet_until = now + self._pause
        return True

    def reset(self) -> None:
        """Note that the cause has ended: the next warning is due at once."""
        self._pause = 0.0


class Waiting:
    """Waiting times of one optimizer's calls."""

    def __init__(self) -> None:
        self._warnings = GrowingPauses()
        self.begin()

    def begin(self) -> None:
        """Note that a call begins."""
        self.seconds = 0.0
        self.reason: str | None = None
        self.peers: tuple[str, ...] = ()
        self._since: float | None = None
        self._told_at = -LOOK_SECONDS

    def is_to_be_told(self, now: float) -> bool:
        """Return whether subscribers are to hear of the wait again; if so, the next time is later."""
        if now < self._told_at + LOOK_SECONDS:
            return False
        self._told_at = now
        return True

    def waits(self, reason: str, peers: Sequence[str], now: float) -> str | None:
        """Note that the call waits; return a warning if one is due.

        Args:
            reason: the reason, in words.
            peers: ids of the peers that it waits for, as far as they are known.
            now: seconds of any clock.
        """
        if self._since is None:
            self._since = now - self.seconds  # continues an earlier wait of this call
        self.seconds, self.reason = now - self._since, reason
        self.peers = tuple(peers) or self.peers
        if self.seconds < WARN_WAIT_SECONDS or not self._warnings.is_due(now):
            return None
        missing = f" (for {named(peers)})" if peers else ""
        return f"has waited {self.seconds:.0f} s for other peers{missing}: {reason}"

    def ends(self, now: float) -> None:
        """Note that the call has stopped waiting."""
        if self._since is not None:
            self.seconds, self._since = now - self._since, None

    def updated(self) -> None:
        """Note an update; after one without a long wait, the next long wait is warned of at once."""
        if self.seconds < WARN_WAIT_SECONDS:
            self._warnings.reset()
