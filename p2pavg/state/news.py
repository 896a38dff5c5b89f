"""The record in which a peer says what states it offers, and whether it wants one. No I/O, no clock.

A record may come from any stranger: lengths and ranges are checked before anything is compared or dialled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import checked, pack, unpack
from p2pavg_dht import ContactError
from p2pavg_dht.contact import check_addresses

TOPIC = "state"
MAX_EPOCH = 2**53
MAX_SNAPSHOT_BYTES = 2**50
DIGEST_BYTES = 32
MAX_LOG = 64
"""Averages of a log that one record names, 32 bytes each: of a record's 4096, addresses may take 1040."""
MAX_ADDRESSES = 4

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOffer:
    """A snapshot that a peer offers.

    Raises:
        RemoteProtocolError: a field is out of range.
    """

    epoch: int
    """Number of updates that its parameters have taken."""
    state: bytes
    """State of the lineage after these updates, 32 bytes."""
    root: bytes
    """Root over its chunks, 32 bytes (:func:`p2pavg.state.tree.root_of`)."""
    size: int
    """Bytes."""

    def __post_init__(self) -> None:
        if not 0 <= self.epoch <= MAX_EPOCH or not 0 < self.size <= MAX_SNAPSHOT_BYTES:
            raise RemoteProtocolError("a snapshot with numbers out of range")
        if len(self.state) != DIGEST_BYTES or len(self.root) != DIGEST_BYTES:
            raise RemoteProtocolError("a snapshot with a digest of another length")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNews:
    """One peer's record of states.

    Raises:
        RemoteProtocolError: a field is out of range.
    """

    wants: bool
    """True if this peer cannot follow the run, and asks the others for a snapshot."""
    epoch: int
    """Number of updates that this peer's parameters have taken."""
    snapshot: SnapshotOffer | None = None
    log: tuple[bytes, ...] = ()
    """Group ids of the last averages that this peer offers, the oldest first. The last one led to ``epoch``."""
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.epoch <= MAX_EPOCH or len(self.log) > min(MAX_LOG, self.epoch):
            raise RemoteProtocolError("states with numbers out of range")
        if any(len(group_id) != DIGEST_BYTES for group_id in self.log):
            raise RemoteProtocolError("a log with a group id of another length")
        if self.snapshot is not None and self.snapshot.epoch > self.epoch:
            raise RemoteProtocolError("a snapshot that is ahead of its peer")
        if len(self.addresses) > MAX_ADDRESSES:
            raise RemoteProtocolError("states at too many addresses")

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


def encode_news(news: StateNews) -> bytes:
    """Return the bytes that a peer publishes on the board."""
    offer = news.snapshot
    packed = () if offer is None else (offer.epoch, offer.state, offer.root, offer.size)
    return pack(_VERSION, news.wants, news.epoch, packed, news.log, news.addresses)


def read_news(value: bytes) -> StateNews:
    """Read a record; raise RemoteProtocolError for anything that :func:`encode_news` does not make."""
    version, wants, epoch, packed, log, addresses = unpack(value, int, bool, int, tuple, tuple, tuple)
    if version != _VERSION:
        raise RemoteProtocolError(f"states of version {version}")
    try:
        check_addresses(checked(addresses, (str,) * len(addresses)))
    except ContactError as error:
        raise RemoteProtocolError(f"states at an invalid address: {error}") from None
    return StateNews(
        wants=wants,
        epoch=epoch,
        snapshot=_offer(packed),
        log=checked(log, (bytes,) * len(log)),
        addresses=addresses,
    )


def _offer(packed: tuple[object, ...]) -> SnapshotOffer | None:
    if not packed:
        return None
    epoch, state, root, size = checked(packed, (int, bytes, bytes, int))
    return SnapshotOffer(epoch=epoch, state=state, root=root, size=size)


def read_all(said: Mapping[str, bytes]) -> dict[str, StateNews]:
    """Return each peer's record; leave out malformed ones."""
    found = {}
    for peer_id, value in said.items():
        try:
            found[peer_id] = read_news(value)
        except RemoteProtocolError:
            continue
    return found
