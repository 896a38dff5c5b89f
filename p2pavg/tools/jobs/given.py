"""The work that this machine has given to a run, as the certificates of its updates show it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pavg.base.errors import ConfigError
from p2pavg.base.formats import PeerText, count, in_time

KNOWN_UPDATES = 64
"""A program may tell of an update twice. It counts once, as long as not so many came between."""
MAX_GIVEN_BYTES = 16 * 1024
_Amount = Annotated[float, Meta(ge=0.0, le=1e18)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class GivenWork(msgspec.Struct, forbid_unknown_fields=True):
    """The part of one peer in the updates of a run."""

    samples: _Amount = 0.0
    """Of this peer, in the updates that it was in."""
    all_samples: _Amount = 0.0
    """Of all members of these updates."""
    updates: _Number = 0
    seconds: _Amount = 0.0
    """For which a program has run here."""
    epoch: _Number = 0
    """Latest update that the program told of."""
    metric: Annotated[str, Meta(max_length=64)] = ""
    """Name of the measurement, such as the loss."""
    first: float = 0.0
    """Its first value, of all starts."""
    last: float = 0.0
    seen: Annotated[list[str], Meta(max_length=KNOWN_UPDATES)] = []  # msgspec copies it for each object
    """Ids of the last groups that were counted."""

    def took(self, peer_id: str, group_id: str, weights: Mapping[str, float]) -> None:
        """Count an update, by what its certificate shows.

        Args:
            peer_id: of this peer.
            weights: samples of each contributor.
        """
        own = weights.get(peer_id)
        if own is None or group_id in self.seen:
            return
        self.seen = [*self.seen, group_id][-KNOWN_UPDATES:]
        self.samples += own
        self.all_samples += sum(weights.values())
        self.updates += 1

    def measured(self, epoch: int, metric: str, value: float) -> None:
        """Note the program's measurement: its own word."""
        metric = str(PeerText(metric))  # a plain one, which the file takes
        if metric != self.metric:
            self.metric, self.first = metric, value
        self.epoch, self.last = epoch, value

    @property
    def sentence(self) -> str:
        """The work, and the state of the training, for the user; empty before the first update."""
        if not self.all_samples:
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
        return msgspec.json.encode(self).decode()


def read_given(text: str) -> GivenWork:
    """Read the text of a file.

    Raises:
        ConfigError: it is none.
    """
    try:
        return msgspec.json.decode(text, type=GivenWork)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"it is damaged ({error}); remove it to begin again") from None
