"""How long a call has waited for other peers, and when its user is told. No I/O, no clock: calls are given ``now``."""

from __future__ import annotations

from collections.abc import Sequence

WARN_SECONDS = 10.0  # a user looks at a program that stands still after about as long
MAX_PAUSE_SECONDS = 600.0  # between two warnings: a log of a night shows that it went on all night
MAX_NAMED = 5  # peers; a line of a terminal
SHORT_ID = 6  # last characters of an id: the first ones are the same for all


def named(peers: Sequence[str]) -> str:
    """Name a few peers by the ends of their ids."""
    names = [f"…{peer[-SHORT_ID:]}" for peer in peers[:MAX_NAMED]]
    more = len(peers) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


class GrowingPauses:
    """When something that lasts is said again: at once, and then ever more rarely."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._quiet_until = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether to say it now; then the next pause begins."""
        if self._pause and now < self._quiet_until:
            return False
        self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS) if self._pause else WARN_SECONDS
        self._quiet_until = now + self._pause
        return True

    def reset(self) -> None:
        """It is over: when it comes again, it is news."""
        self._pause = 0.0


class Waiting:
    """The waiting of one optimizer's calls."""

    def __init__(self) -> None:
        self._warnings = GrowingPauses()
        self.begin()

    def begin(self) -> None:
        """A call begins."""
        self.seconds = 0.0
        self.reason: str | None = None
        self.peers: tuple[str, ...] = ()
        self._since: float | None = None

    def waits(self, reason: str, peers: Sequence[str], now: float) -> str | None:
        """The call waits now; return what to warn of, if it is time.

        Args:
            reason: in words.
            peers: ids of those that it waits for, as far as they are known.
            now: seconds of any clock.
        """
        if self._since is None:
            self._since = now - self.seconds  # goes on where an earlier wait of this call ended
        self.seconds, self.reason = now - self._since, reason
        self.peers = tuple(peers) or self.peers
        if self.seconds < WARN_SECONDS or not self._warnings.is_due(now):
            return None
        who = f" (for {named(peers)})" if peers else ""
        return f"has waited {self.seconds:.0f} s for other peers{who}: {reason}"

    def ends(self, now: float) -> None:
        """The call waits no more."""
        if self._since is not None:
            self.seconds, self._since = now - self._since, None

    def updated(self) -> None:
        """An update was taken; after one that came without a long wait, the next long one is news again."""
        if self.seconds < WARN_SECONDS:
            self._warnings.reset()
