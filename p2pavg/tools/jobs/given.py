"""What this machine has given to a run, as the certificates of the run's updates show it. No I/O, no clock."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pavg.base.errors import ConfigError
from p2pavg.base.formats import count, in_time

KNOWN_UPDATES = 256
"""A program may tell of an update twice. It counts once, as long as not so many came between."""


@dataclass(slots=True)
class GivenWork:
    """The part of one peer in the updates of a run."""

    samples: float = 0.0
    """Of this peer, in the updates that it was in."""
    all_samples: float = 0.0
    """Of all members of these updates."""
    updates: int = 0
    seconds: float = 0.0
    """For which a program has run here."""
    epoch: int = 0
    """Latest update that the program told of."""
    metric: str = ""
    """Name of what the program measures, such as its loss."""
    first: float = 0.0
    """Its first value, of all starts."""
    last: float = 0.0
    _seen: deque[str] = field(default_factory=lambda: deque(maxlen=KNOWN_UPDATES))

    def took(self, peer_id: str, group_id: str, weights: Mapping[str, float]) -> None:
        """Count an update, by what its certificate shows.

        Args:
            peer_id: of this peer.
            weights: samples of each contributor.
        """
        own = weights.get(peer_id)
        if own is None or group_id in self._seen:
            return
        self._seen.append(group_id)
        self.samples += own
        self.all_samples += sum(weights.values())
        self.updates += 1

    def measured(self, epoch: int, metric: str, value: float) -> None:
        """Note what the program has measured: its own word."""
        if metric != self.metric:
            self.metric, self.first = metric, value
        self.epoch, self.last = epoch, value

    @property
    def sentence(self) -> str:
        """What this machine has given, and how the training goes; empty before the first update."""
        if not self.updates:
            return ""
        learns = f", {self.metric} {self.last:.4g} (at first {self.first:.4g})" if self.metric else ""
        return (
            f"update {self.epoch:,}{learns}; this machine gave {self.samples:,.0f} samples in"
            f" {count(self.updates, 'update')}, {self.samples / self.all_samples:.0%} of theirs, in"
            f" {in_time(self.seconds)}"
        )

    @property
    def text(self) -> str:
        """The same for a file; :func:`read_given` reads it back."""
        return json.dumps({name: getattr(self, name) for name in _NAMES})


_NAMES = {"samples": float, "all_samples": float, "updates": int, "seconds": float, "epoch": int} | {
    "metric": str,
    "first": float,
    "last": float,
}


def read_given(text: str) -> GivenWork:
    """Read the text of a file.

    Raises:
        ConfigError: it is none.
    """
    try:
        found = json.loads(text)
        return GivenWork(**{name: kind(found[name]) for name, kind in _NAMES.items()})
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"it is damaged ({error}); remove it to begin again") from None
