"""Rules of states: when a donor takes a snapshot, and which snapshot and averages a joiner takes. No I/O, no clock.

A snapshot's root proves that its bytes are those that a peer offers, and not that they are the run's. So a joiner takes
the snapshot that most of its *voters* offer. A voter has taken an update, and asks for no state itself. The voters are
the first of the following sets that is not empty:

* in a run with an authority: all peers, since only members can publish;
* peers that took one of the joiner's last updates with it;
* for a newcomer in an open run: the peers through which it joined the network;
* all peers.

The log proves each average by signatures of the group that made it. But any two strangers can make a group. So the
voters also decide which average comes next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2pavg.base.messages import Hash, Message
from p2pavg_dht import ContactError
from p2pavg_dht.identity import check_addresses

# The record in which a peer says what states it offers, and whether it wants one.
#
# A record may come from any stranger: lengths and ranges are checked before anything is compared or dialled.

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


ALIGN_SECONDS = 4.0
"""A donor hears that a snapshot is wanted within this time. All donors take the next snapshot after an update whose
number is a multiple of as many updates as fit into this time, rounded up to a power of two: so most take the same."""
MAX_ALIGN = 16  # a quarter of the averages that one record names
SETTLE_OFFERS_SECONDS = 2 * ALIGN_SECONDS
"""A joiner takes a snapshot that at most half of its voters offer only after it has waited for this long, unless it is
half of them and most peers of the run offer the same one."""
FEW_OFFERS_SECONDS = 60.0
"""While less than half of its voters offer any snapshot, it waits for this long: a donor takes one after its batch, and
the first one that offers one would decide alone."""
MAX_DONORS = 32
"""Donors of one transfer. A few fill any link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorView:
    """The situation of a donor between two updates.

    Args:
        epoch: number of updates that its parameters have taken.
        update_seconds: usual time between two of its updates; 0 before the second one.
        since_update: seconds since the last one.
        wanted: true if a peer of the run wants a snapshot.
        snapshot_epoch: update after which its present snapshot was taken; ``None`` without one.
        log_first: first update after which its log of averages begins: it has all averages that came later.
        log_full: the fraction of the log that the averages since the snapshot take.
        in_use: true if a joiner fetches the present snapshot.
    """

    epoch: int
    update_seconds: float
    since_update: float
    wanted: bool
    snapshot_epoch: int | None
    log_first: int
    log_full: float
    in_use: bool


def alignment(update_seconds: float) -> int:
    """Return the number of updates whose multiples are the updates after which donors take snapshots."""
    if update_seconds <= 0 or update_seconds >= ALIGN_SECONDS:
        return 1
    return min(int(2 ** math.ceil(math.log2(ALIGN_SECONDS / update_seconds))), MAX_ALIGN)


def takes_snapshot(donor: DonorView) -> bool:
    """Return whether a donor takes a snapshot now, between two updates."""
    # A run that stands still may wait for the peer that asks: it comes to no aligned update.
    stands_still = donor.since_update >= 2 * ALIGN_SECONDS
    is_aligned = stands_still or donor.epoch % alignment(donor.update_seconds) == 0
    if not donor.wanted or not is_aligned:
        return False
    if donor.snapshot_epoch is None or donor.snapshot_epoch > donor.epoch:
        return True
    if donor.snapshot_epoch < donor.log_first:
        return True  # its log no longer leads from the snapshot to the present
    return donor.log_full > 0.5 and not donor.in_use


def voters(
    news: Mapping[str, StateNews],
    *,
    members_only: bool,
    companions: Collection[str],
    bootstrap: Collection[str],
) -> frozenset[str]:
    """Return the peers whose offers decide, among those that offer anything, or that could."""
    offering = frozenset(peer_id for peer_id, said in news.items() if said.epoch > 0 and not said.wants)
    if members_only:
        return offering
    return offering & frozenset(companions) or offering & frozenset(bootstrap) or offering


@dataclass(frozen=True, slots=True)
class Chosen:
    """A snapshot to fetch, and its donors; ``offer`` is ``None`` if there is none to take now."""

    offer: SnapshotOffer | None
    donors: tuple[str, ...]
    reason: str


def choose_snapshot(
    news: Mapping[str, StateNews],
    deciding: Collection[str],
    *,
    at_least: int,
    waited: float,
    refused: Collection[bytes] = (),
) -> Chosen:
    """Choose the snapshot that a joiner fetches.

    Among the offers from which a log leads on: the one of most voters, then of most peers, then of the latest update,
    then the largest root. An update at which less than half of the voters have arrived is not that of the run.

    Other peers count only between offers of as many voters. Without them, a peer that came after the last snapshot and
    takes a newer one could decide, and would be its only donor.

    Args:
        deciding: the voters, see :func:`voters`.
        at_least: the joiner gains nothing from a snapshot of an earlier update.
        waited: seconds since the joiner began to look.
        refused: roots of snapshots that this peer cannot use.
    """
    if not deciding:
        return Chosen(None, (), "no other peer of this run offers a state")
    head = head_of(news, deciding)
    counts = Counter(
        offer
        for peer_id in deciding
        if (offer := news[peer_id].snapshot) is not None
        and news[peer_id].follows
        and at_least <= offer.epoch <= head
        and offer.root not in refused
    )
    if not counts:
        return Chosen(None, (), f"{_peers(len(deciding))} asked for a snapshot, and none offers one yet")
    offering = Counter(said.snapshot for said in news.values() if said.snapshot is not None)
    offer, count = max(
        counts.items(), key=lambda found: (found[1], offering[found[0]], found[0].epoch, found[0].root)
    )
    half_and_most = 2 * count == len(deciding) and 2 * offering[offer] > len(news)
    patience = SETTLE_OFFERS_SECONDS if 2 * counts.total() >= len(deciding) else FEW_OFFERS_SECONDS
    all_offer = counts.total() == len(deciding)  # no other voter is to come
    if 2 * count <= len(deciding) and waited < patience and not (all_offer or half_and_most):
        reason = f"{count} of {len(deciding)} peers offer the snapshot of update {offer.epoch}"
        return Chosen(None, (), f"{reason}; more may follow")
    donors = named_donors((peer_id for peer_id, said in news.items() if said.snapshot == offer), deciding)
    return Chosen(offer, donors, f"{count} of {len(deciding)} peers offer it")


def named_donors(offering: Iterable[str], deciding: Collection[str]) -> tuple[str, ...]:
    """Return the donors to ask: the voters first, :data:`MAX_DONORS` at most.

    Strangers can repeat what others offer, with addresses of victims that every joiner would dial.
    """
    return tuple(sorted(offering, key=lambda peer_id: (peer_id not in deciding, peer_id))[:MAX_DONORS])


def _peers(count: int) -> str:
    return "1 peer was" if count == 1 else f"{count} peers were"


def next_average(
    news: Mapping[str, StateNews], deciding: Collection[str], epoch: int
) -> tuple[bytes, tuple[str, ...]] | None:
    """Return the group id of the average that leads to update ``epoch``, and its donors; ``None`` if none offers it.

    Among different averages: the one of most voters, then the largest id. An update at which less than half of the
    voters have arrived is not there yet: otherwise one voter that names invented averages ahead of all others would
    keep this peer from catching up.
    """
    if epoch > head_of(news, deciding):
        return None
    counts = Counter(found for peer_id in deciding if (found := news[peer_id].average(epoch)) is not None)
    if not counts:
        return None
    group_id, _ = max(counts.items(), key=lambda found: (found[1], found[0]))
    offering = (peer_id for peer_id, said in news.items() if said.average(epoch) == group_id)
    donors = named_donors(offering, deciding)
    return group_id, donors


def head_of(news: Mapping[str, StateNews], deciding: Collection[str]) -> int:
    """Return the update at which most of the run is: the median of the voters' updates; 0 without voters."""
    epochs = sorted(news[peer_id].epoch for peer_id in deciding)
    return epochs[len(epochs) // 2] if epochs else 0


def keeps_up(average_bytes: float, update_seconds: float, bytes_per_second: float) -> bool:
    """Return whether a link carries averages faster than the run makes them."""
    return average_bytes <= update_seconds * bytes_per_second
