"""What this peer's link carries, learned from rounds. No I/O, no clock: who uses it says what time it is.

How much a link can carry shows while it is busy. In a round it is idle again and again, because others are slow or
nothing is left to send, so what counts of a round is its best half second, in either direction.
"""

from __future__ import annotations

from collections import deque

DEFAULT_MBPS = 100.0
"""Mbit/s that are announced until something is known."""
MIN_MBPS = 0.1
MAX_MEASURED_MBPS = 1000.0
"""Mbit/s of which no more is announced: from there on the processor is the bottleneck, not the link, and the noise of
measuring would tilt the shares of machines that are equals."""
WINDOW_SECONDS = 0.5
"""Shorter bursts may be of buffers that fill, and say little of the link."""
LEAST_SECONDS = 0.1
"""A shorter round counts as one of this length: what had arrived before it began must not count as instantaneous."""
NEW_WEIGHT = 0.3
HYSTERESIS = 0.1


class BandwidthMeter:
    """Estimates from rounds, one at a time, what this peer can send and receive.

    Args:
        max_upload_mbps: Mbit/s that this peer may send, ``None`` without limit. No more is announced.
        max_download_mbps: likewise, of what it may receive.
    """

    def __init__(
        self, *, max_upload_mbps: float | None = None, max_download_mbps: float | None = None
    ) -> None:
        self._limit = min(
            limit for limit in (max_upload_mbps, max_download_mbps, MAX_MEASURED_MBPS) if limit is not None
        )
        self._upload = _Estimate()
        self._download = _Estimate()
        self._round: tuple[_Busiest, _Busiest] | None = None
        self._announced = self._to_announce()

    @property
    def mbps(self) -> float:
        """Mbit/s to announce, of the slower direction; changes at the end of a round, by more than 10 % or not."""
        return self._announced

    @property
    def upload_mbps(self) -> float:
        """Mbit/s that this peer can send, as far as is known."""
        return self._upload.mbps

    @property
    def download_mbps(self) -> float:
        """Mbit/s that this peer can receive, as far as is known."""
        return self._download.mbps

    def begin(self, now: float, sent: int = 0, received: int = 0) -> None:
        """A round's exchange begins; one that has not ended is forgotten.

        Args:
            now: seconds of a clock that does not jump.
            sent: the total of bytes that had left before.
            received: the total of bytes that had arrived before.
        """
        self._round = (_Busiest(now, sent), _Busiest(now, received))

    def sample(self, now: float, sent: int, received: int) -> None:
        """The totals at this moment: about every 0.1 s, and once more right before :meth:`end`."""
        if self._round is not None:
            for direction, total in zip(self._round, (sent, received), strict=True):
                direction.sample(now, total)

    def end(self, now: float) -> None:
        """The round's exchange is over, whatever came of it."""
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
    """The largest rate, in one direction of one round, over any window of :data:`WINDOW_SECONDS` or more."""

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
        # A window that can be cut into two that are long enough is not busier than both of them.
        while starts[-1][0] - self._samples[0][0] >= WINDOW_SECONDS:
            self._samples.popleft()

    @property
    def measured(self) -> float | None:
        """Mbit/s; ``None`` when the link was not busy for long enough to tell what it carries at most.

        A small vector is through in a moment, and a member whose share is empty sends nothing: that the rest of the
        round was idle says nothing of the link.
        """
        return self._most if self._busy_seconds >= WINDOW_SECONDS else None

    def at_least(self, now: float) -> float:
        """Mbit/s that the link did carry."""
        if self._most is not None:
            return self._most
        begun, first = self._first
        return _mbps(self._samples[-1][1] - first, max(now - begun, LEAST_SECONDS))


class _Estimate:
    """What one direction carries, over rounds."""

    def __init__(self) -> None:
        self.mbps = DEFAULT_MBPS
        self._measured = False

    def learn(self, busiest: _Busiest, now: float) -> None:
        measured = busiest.measured
        if measured is None:
            self.mbps = max(self.mbps, busiest.at_least(now))
        elif not self._measured:
            self.mbps, self._measured = measured, True
        else:
            # What it has carried it can carry; that it carried less may be the others' doing.
            mean = (1 - NEW_WEIGHT) * self.mbps + NEW_WEIGHT * measured
            self.mbps = max(mean, measured)


def _mbps(count: int, seconds: float) -> float:
    return count * 8 / 1e6 / seconds
