"""One line in the log for each round, as a sentence."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from p2pavg.base.formats import in_bytes
from p2pavg.telemetry.events import AnyEvent, RoundEnded, RoundKind

logger = logging.getLogger("p2pavg.rounds")

MAX_NAMED = 3
_SHORT_ID = 6  # last characters of an id; the first ones are the same for all peers
_MAX_WHY_CHARS = 120


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


def round_sentence(event: RoundEnded) -> str:
    """Return the one line of a round: group size, duration, bytes, and the members that were lost or clipped."""
    if event.result is RoundKind.NO_PEERS:
        return f"no round after {event.duration:.1f} s: {event.reason}"
    size = len(event.members)
    moved = f"{in_bytes(sum(event.sent.values()))} sent, {in_bytes(sum(event.received.values()))} received"
    if event.result is RoundKind.FAILED:
        return (
            f"the round of {size} members failed after {event.duration:.1f} s ({event.code}): {event.reason}"
        )
    parts = [
        f"averaged {len(event.contributors)} contributions of {size} members in {event.duration:.1f} s",
        moved,
    ]
    if event.lost:
        parts.append(f"lost {lost_members(event.lost)}")
    if event.clipped:
        parts.append(f"clipped {named(event.clipped)}")
    return "; ".join(parts)


def lost_members(lost: Mapping[str, str]) -> str:
    """Name a few lost members with their reasons."""
    found = [
        f"{short(peer_id)} ({_cut(why.removeprefix(f'{peer_id} was lost: '))})"
        for peer_id, why in lost.items()
    ]
    return _few(found)


def named(peers: Sequence[str]) -> str:
    """Name a few peers by the ends of their ids."""
    return _few([short(peer_id) for peer_id in peers])


def short(peer_id: str) -> str:
    """Return the end of a peer's id."""
    return f"…{peer_id[-_SHORT_ID:]}"


def _few(found: Sequence[str]) -> str:
    more = len(found) - MAX_NAMED
    return ", ".join(found[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_WHY_CHARS else f"{text[: _MAX_WHY_CHARS - 1]}…"
