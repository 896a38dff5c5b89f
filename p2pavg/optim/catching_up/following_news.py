"""The news of a peer that follows its run: the run's pace, failed attempts, and progress for the user."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from p2pavg.base.limits import LOOK_SECONDS, RETRY_SECONDS
from p2pavg.optim.coordination.ending import GrowingPauses
from p2pavg.state.choice import keeps_up
from p2pavg.state.joiner.transfers import AverageTransfer, SnapshotTransfer
from p2pavg.state.progress import StateProgress, cannot_keep_up, span
from p2pavg.state.sharing import StateSharing

logger = logging.getLogger(__name__)

FOLLOWING_RETRY_SECONDS = 2.0  # doubled with each failure in a row
PACE_UPDATES = 8  # updates of the run over which their usual time is measured


class UpdatePace:
    """The usual time between two updates of the run, from the epochs that its peers report."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=PACE_UPDATES)

    def note(self, epoch: int, now: float) -> None:
        """Note the update at which the run is."""
        if not self._seen or epoch > self._seen[-1][0]:
            self._seen.append((epoch, now))
        elif epoch < self._seen[-1][0]:
            self._seen.clear()

    @property
    def update_seconds(self) -> float:
        """Seconds for one update; 0 before two were seen."""
        if len(self._seen) < 2:
            return 0.0
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        return (ended - began) / (last - first)


class Attempts:
    """Failed attempts in a row to fetch a state, and the pause after each. No clock: calls are given ``now``."""

    def __init__(self) -> None:
        self.failure = ""
        """Reason of the last failure; empty before the first one."""
        self.count = 0
        """Number of failures."""
        self._not_before = 0.0

    def failed(self, reason: str, now: float) -> None:
        """Note a failure."""
        self.failure = reason
        self._not_before = now + min(FOLLOWING_RETRY_SECONDS * 2.0 ** min(self.count, 8), RETRY_SECONDS)
        self.count += 1

    def pauses(self, now: float) -> str:
        """Return the reason why there is no attempt now; empty if there may be one."""
        if now >= self._not_before:
            return ""
        return f"{self.failure}; the next attempt is in {span(self._not_before - now)}"


class ProgressReporter:
    """Tells the user how far a peer is that follows."""

    def __init__(self, sharing: StateSharing, on_progress: Callable[[StateProgress], None] | None) -> None:
        self._sharing = sharing
        self._on_progress = on_progress
        self._pauses = GrowingPauses()
        self._told_at = 0.0

    def tell(
        self,
        reason: str,
        epoch: int,
        head: int,
        transfer: SnapshotTransfer | AverageTransfer | None,
        pace: UpdatePace,
        now: float,
    ) -> str:
        """Log and report the progress; return it as a sentence."""
        progress = StateProgress(reason=reason, epoch=epoch, target=head)
        if transfer is not None and not transfer.ended:
            progress = transfer.progress(progress)
        if not progress.reason:
            return ""
        if self._on_progress is not None and now >= self._told_at + LOOK_SECONDS:
            self._told_at = now
            self._on_progress(progress)
        if self._pauses.is_due(now):
            logger.info("%s", progress.reason)
            self._warn_of_the_link(progress, pace)
        return progress.reason

    def _warn_of_the_link(self, progress: StateProgress, pace: UpdatePace) -> None:
        size, seconds = self._sharing.average_bytes, pace.update_seconds
        if not size or not seconds or not progress.bytes_per_second or progress.seconds_left is None:
            return
        if not keeps_up(size, seconds, progress.bytes_per_second):
            logger.warning("%s", cannot_keep_up(size, seconds, progress.bytes_per_second))
