"""The record in which a peer says what states it offers, and whether it wants one. No I/O, no clock.

A record may come from any stranger: lengths and ranges are checked before anything is compared or dialled.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2pavg.base.messages import Hash, Message
from p2pavg_dht import ContactError
from p2pavg_dht.identity import check_addresses

TOPIC = "state"
MAX_EPOCH = 2**53
MAX_SNAPSHOT_BYTES = 2**50
MAX_LOG = 64
"""Averages of a log that one record names, 32 bytes each: of a record's 4096, addresses may take 1040."""
MAX_ADDRESSES = 4

_Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]


class SnapshotOffer(Message, frozen=True, kw_only=True):
    """A snapshot that a peer offers."""

    epoch: _Epoch
    """Number of updates that its parameters have taken."""
    state: Hash
    """State of the lineage after these updates."""
    root: Hash
    """Root over its chunks (:func:`p2pavg.state.tree.root_of`)."""
    size: Annotated[int, Meta(ge=1, le=MAX_SNAPSHOT_BYTES)]
    """Bytes."""


class StateNews(Message, frozen=True, kw_only=True, tag=2):
    """One peer's record of states."""

    wants: bool
    """True if this peer cannot follow the run, and asks the others for a snapshot."""
    epoch: _Epoch
    """Number of updates that this peer's parameters have taken."""
    snapshot: SnapshotOffer | None = None
    log: Annotated[tuple[Hash, ...], Meta(max_length=MAX_LOG)] = ()
    """Group ids of the last averages that this peer offers, the oldest first. The last one led to ``epoch``."""
    addresses: Annotated[tuple[str, ...], Meta(max_length=MAX_ADDRESSES)] = ()

    def __post_init__(self) -> None:
        if len(self.log) > self.epoch:
            raise ValueError("a log of more averages than updates")
        if self.snapshot is not None and self.snapshot.epoch > self.epoch:
            raise ValueError("a snapshot that is ahead of its peer")
        try:
            check_addresses(self.addresses)
        except ContactError as error:
            raise ValueError(f"states at an invalid address: {error}") from None

    def average(self, epoch: int) -> bytes | None:
        """Return the group id of the offered average that led to an update; ``None`` if it is not offered."""
        index = epoch - (self.epoch - len(self.log)) - 1
        return self.log[index] if 0 <= index < len(self.log) else None

    def offers(self, epoch: int, state: bytes) -> bool:
        """Return whether it offers the snapshot of an update and a state."""
        return self.snapshot is not None and (self.snapshot.epoch, self.snapshot.state) == (epoch, state)

    @property
    def follows(self) -> bool:
        """True if the log leads from the snapshot to ``epoch``."""
        return self.snapshot is not None and self.epoch - self.snapshot.epoch <= len(self.log)
