"""Progress of a peer that fetches the state of its run. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StateProgress:
    """The transfer that runs, or the reason why none does."""

    reason: str
    """The whole as a sentence."""
    epoch: int
    """Update of this peer's parameters."""
    target: int
    """Update at which most of the run is, as far as it is known."""
    bytes_done: int = 0
    """Bytes of the snapshot, or of the average, that are here and verified."""
    bytes_total: int = 0
    bytes_per_second: float = 0.0
    seconds_left: float | None = None
    """``None`` while no rate is known."""
    donors: int = 0
    """Peers that send."""


def amount(count: float) -> str:
    """Return a number of bytes as readable text."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def span(seconds: float) -> str:
    """Return seconds as readable text."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def cannot_keep_up(average_bytes: float, update_seconds: float, bytes_per_second: float) -> str:
    """Return the sentence for a link that carries averages more slowly than the run makes them."""
    return (
        f"updates are {amount(average_bytes / update_seconds)}/s, this link carries {amount(bytes_per_second)}/s:"
        " a larger target_batch_size or sync_every, a codec with fewer bytes, or a faster link would help"
    )
