"""Estimate of this peer's bandwidth, learned from rounds. No I/O, no clock: the caller passes the time.

A link's capacity shows only while the link is busy. During a round it is often idle, because other members are slow or
nothing is left to send. So only the busiest half second of a round counts, in each direction.
"""

from __future__ import annotations

from collections import deque

DEFAULT_MBPS = 100.0
"""Mbit/s to assume before the first measurement."""
MIN_MBPS = 0.1
MAX_MEASURED_MBPS = 1000.0
"""Largest rate that is announced, in Mbit/s. Above it the processor is the bottleneck, not the link, and measurement
noise would give equal machines unequal shares."""
WINDOW_SECONDS = 0.5
"""Shortest burst that counts. A shorter one may only fill buffers, and says little about the link."""
NEW_WEIGHT = 0.3
HYSTERESIS = 0.1


class BandwidthMeter:
    """Estimates this peer's upload and download rates from rounds, one at a time.

    Args:
        given_mbps: what the user says that the link carries. It is announced instead of the estimate.
        max_upload_mbps: limit of what this peer sends, in Mbit/s, or ``None``. It never announces more.
        max_download_mbps: limit of what this peer receives, likewise.
    """

    def __init__(
        self,
        *,
        given_mbps: float | None = None,
        max_upload_mbps: float | None = None,
        max_download_mbps: float | None = None,
    ) -> None:
        self._given = given_mbps
        self._limit = min(
            limit for limit in (max_upload_mbps, max_download_mbps, MAX_MEASURED_MBPS) if limit is not None
        )
        self._upload = _Estimate()
        self._download = _Estimate()
        self._round: tuple[_Busiest, _Busiest] | None = None
        self._announced = self._to_announce()

    @property
    def mbps(self) -> float:
        """Mbit/s to announce, for the slower direction. It changes only at the end of a round, by more than 10 %."""
        return self._announced

    @property
    def announced_mbps(self) -> float:
        """Mbit/s for the signed candidate: the user's, or :attr:`mbps`.

        It is 0 as long as rounds have not shown what the link carries. A peer that joins a run whose links are slow
        would otherwise claim the most, and be given the largest share.
        """
        if self._given is not None:
            return self._given
        known = self._upload.is_known and self._download.is_known
        return self._announced if known or self._limit < DEFAULT_MBPS else 0.0

    @property
    def known_mbps(self) -> tuple[float, float]:
        """Measured Mbit/s that this peer can send and receive, each 0 before it is known."""
        measured = (self._upload, self._download)
        up, down = (estimate.mbps if estimate.is_known else 0.0 for estimate in measured)
        return up, down

    def begin(self, now: float, sent: int = 0, received: int = 0) -> None:
        """Begin to measure a round's exchange, and discard one that has not ended.

        Args:
            now: seconds of a monotonic clock.
            sent: total of bytes sent so far.
            received: total of bytes received so far.
        """
        self._round = (_Busiest(now, sent), _Busiest(now, received))

    def sample(self, now: float, sent: int, received: int) -> None:
        """Record the totals at this moment. Call it about every 0.1 s, and once more right before :meth:`end`."""
        if self._round is not None:
            for direction, total in zip(self._round, (sent, received), strict=True):
                direction.sample(now, total)

    def end(self, now: float) -> None:
        """End the measurement of a round's exchange, successful or not."""
        if self._round is None:
            return
        for estimate, direction in zip((self._upload, self._download), self._round, strict=True):
            estimate.learn(direction, now)
        self._round = None
        mbps = self._to_announce()
        if abs(mbps - self._announced) > HYSTERESIS * self._announced:
            self._announced = mbps

    def _to_announce(self) -> float:
        return max(MIN_MBPS, min(self._upload.mbps, self._download.mbps, self._limit))


class _Busiest:
    """Largest rate over any window of :data:`WINDOW_SECONDS` or more, in one direction of one round."""

    def __init__(self, now: float, total: int) -> None:
        self._first = (now, total)
        self._samples = deque([(now, total)])
        self._busy_seconds = 0.0
        self._most: float | None = None

    def sample(self, now: float, total: int) -> None:
        then, before = self._samples[-1]
        if total > before:
            self._busy_seconds += now - then
        self._samples.append((now, total))
        starts = [sample for sample in self._samples if now - sample[0] >= WINDOW_SECONDS]
        if not starts:
            return
        rates = [_mbps(total - before, now - then) for then, before in starts]
        self._most = max(rates if self._most is None else [self._most, *rates])
        # A window that can be cut into two long enough windows is at most as busy as one of them.
        while starts[-1][0] - self._samples[0][0] >= WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def measured(self) -> float | None:
        """Mbit/s, or ``None`` if the link was not busy for long enough to measure its capacity.

        A small vector is sent in a moment, and a member with an empty share sends nothing. The idle rest of such a
        round says nothing about the link.
        """
        return self._most if self._busy_seconds >= WINDOW_SECONDS else None

    def at_least(self, now: float) -> float:
        """Return the Mbit/s that the link has carried, a lower bound of its capacity."""
        if self._most is not None:
            return self._most
        begun, first = self._first
        # Data that arrived before the round began must not count as instantaneous.
        return _mbps(self._samples[-1][1] - first, max(now - begun, WINDOW_SECONDS / 5))


class _Estimate:
    """Estimated rate of one direction, over all rounds."""

    def __init__(self) -> None:
        self.mbps = DEFAULT_MBPS
        self._measured = False

    @property
    def is_known(self) -> bool:
        """True if a round has measured it, or has shown that it is above the default."""
        return self._measured or self.mbps > DEFAULT_MBPS

    def learn(self, busiest: _Busiest, now: float) -> None:
        measured = busiest.measured
        if measured is None:
            self.mbps = max(self.mbps, busiest.at_least(now))
        elif not self._measured:
            self.mbps, self._measured = measured, True
        else:
            # A link can carry what it has carried. If it carried less, other members may have been the cause.
            mean = (1 - NEW_WEIGHT) * self.mbps + NEW_WEIGHT * measured
            self.mbps = max(mean, measured)


def _mbps(count: int, seconds: float) -> float:
    return count * 8 / 1e6 / seconds
