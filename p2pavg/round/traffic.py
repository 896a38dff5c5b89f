"""The bytes that one member moves in an exchange, over all of its attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import trio

from p2pavg.allreduce.attempt import Attempt
from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.group.bandwidth import BandwidthMeter


class Traffic:
    """Bytes that have left this member, and that have come, in all attempts of an exchange."""

    def __init__(self, meter: BandwidthMeter) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes of ended attempts, by :class:`~p2pavg.telemetry.events.Way`."""
        self.received: Counter[str] = Counter()
        self._meter = meter

    async def measure(self, current: Callable[[], Attempt | None]) -> None:
        """Measure the link, and note which members have shown a sign of life, until cancelled."""
        self._meter.begin(trio.current_time())
        while True:
            await trio.sleep(GLANCE_SECONDS)
            attempt = current()
            if attempt is not None:
                attempt.note_arrivals()
            self.sample(attempt)

    def sample(self, attempt: Attempt | None) -> None:
        """Tell the meter how much has been moved, the attempt that runs included."""
        sent, received = self.sent.total(), self.received.total()
        if attempt is not None:
            sent, received = sent + attempt.bytes_left, received + attempt.bytes_arrived
        self._meter.sample(trio.current_time(), sent, received)

    def end(self) -> None:
        """End the measurement."""
        self._meter.end(trio.current_time())

    def add(self, attempt: Attempt) -> None:
        """Count an attempt that has ended."""
        self.sent.update(attempt.sender.bytes_by_way)
        self.received.update(attempt.receiver.bytes_by_way)
