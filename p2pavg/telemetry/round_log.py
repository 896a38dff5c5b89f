"""One line in the log for each round."""

from __future__ import annotations

import logging

from p2pavg.telemetry.events import AnyEvent, RoundEnded
from p2pavg.telemetry.words import round_sentence

logger = logging.getLogger("p2pavg.rounds")


def log_round(event: AnyEvent) -> None:
    """Log the end of a round at INFO; a subscriber of events."""
    if isinstance(event, RoundEnded) and logger.isEnabledFor(logging.INFO):
        logger.info(
            "%s",
            round_sentence(event),
            extra={
                "run": event.run_id,
                "round": event.group_id[:8] or None,
                "result": event.result.value,
                "seconds": round(event.duration, 3),
                "members": len(event.members),
                "bytes_sent": sum(event.sent.values()),
                "bytes_received": sum(event.received.values()),
            },
        )
