"""The entries of a history, and how they are chained and sealed. No I/O, no clock, no random source.

A history is a folder of *segments*, one file each. A segment stands alone: it begins with what the run is and with a
snapshot, goes on with the updates since, and ends with a seal. Its bytes are :data:`MAGIC` and then entries:

    length of the body, 4 bytes, big-endian
    hash of the entry before, 32 bytes; zeros for the first entry of an archivist
    body, the message in MessagePack
    payload, as many bytes as the body says

The hash of an entry is SHA-256 over a domain, the hash before and the body. The body names the digests of its payload,
so one hash stands for everything up to its entry. ``docs/reference/history-format.md`` describes the format for other
readers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.base.limits import (
    DAY_SECONDS,
    MAX_AUDIT_CHARS,
    MAX_CODEC_CHARS,
    MAX_ROBUST_CHARS,
    MAX_RULE_CHARS,
    MAX_RUN_ID_CHARS,
    MAX_TOPOLOGY_CHARS,
    MAX_VERSION,
    MAX_WEIGHT,
)
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES as MAX_MEMBERSHIP_BYTES
from p2pavg.base.messages import Hash, Message, Seconds, decoded
from p2pavg.consensus.certificate import MAX_CERTIFICATE_BYTES
from p2pavg.state.average import MAX_NUMBERS_BYTES, MAX_PARTS, PART_DIGEST_BYTES
from p2pavg.state.choice import MAX_EPOCH, MAX_SNAPSHOT_BYTES
from p2pavg.state.layout import MAX_TENSORS
from p2pavg_dht import Signer
from p2pavg_dht.identity import PEER_ID_LENGTH, PeerIdError, public_key_of

MAGIC = b"p2pavg-history/1\n"
FIRST = bytes(32)
"""Stands for the entry before the first one of an archivist."""
MAX_BODY_BYTES = 2**24
"""A run of 131,072 tensors whose names have 100 characters each. A certificate with the digests has 2.4 MiB at most."""
MAX_NOTICE_BYTES = 2**25  # evidence that a member lied has 32 MiB at most
SEGMENT_ENTRIES = 1024
"""Entries of one segment, and so under one seal: a receipt has one leaf and one path for each."""
SEGMENT_SNAPSHOTS = 16
"""A segment ends when its averages weigh as much as so many snapshots: then snapshots are a sixteenth of a history."""
REVOKED = "revoked"
"""Kind of a notice: the list of revoked certificates that the authority has signed."""
EXCLUDED = "excluded"
"""Kind of a notice: evidence that a member lied (:mod:`p2pavg.verification.evidence.accusation`)."""

_ENTRY = b"p2pavg-history-entry/1\0"
_SEAL = b"p2pavg-history-seal/1\0"
_FRAME = struct.Struct(">I32s")
FRAME_BYTES = _FRAME.size

_Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
PeerIdText = Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]
_Shape = Annotated[tuple[Annotated[int, Meta(ge=0, le=2**40)], ...], Meta(max_length=16)]


class SegmentBeginning(Message, frozen=True, kw_only=True, tag="begin"):
    """The first entry of a segment: the run, and the rules by which its averages can be checked."""

    number: Annotated[int, Meta(ge=0, le=2**40)]
    """Of the segment among those of its archivist."""
    time: Seconds
    """By the clock of the archivist, as in all entries."""
    archivist: PeerIdText
    certificate: Annotated[bytes, Meta(max_length=MAX_MEMBERSHIP_BYTES)] = b""
    """Of the archivist's membership; empty in an open run."""
    run_id: Annotated[str, Meta(min_length=1, max_length=MAX_RUN_ID_CHARS)]
    authority: Annotated[bytes, Meta(max_length=32)] = b""
    """Public key of the run's authority, 32 bytes; empty in an open run."""
    codec: Annotated[str, Meta(min_length=1, max_length=MAX_CODEC_CHARS)]
    rule: Annotated[str, Meta(max_length=MAX_RULE_CHARS)] = ""
    """Of participation, and the mark of the strategy."""
    aggregation: Annotated[
        str, Meta(max_length=2 * (MAX_ROBUST_CHARS + MAX_AUDIT_CHARS + MAX_TOPOLOGY_CHARS))
    ]
    """Text of :class:`p2pavg.group.aggregation.Aggregation`."""
    version: Annotated[int, Meta(ge=0, le=MAX_VERSION)] = 0
    """Of the run's program."""
    shapes: Annotated[tuple[_Shape, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
    """Of the averaged tensors, in their order."""
    dtypes: Annotated[tuple[Annotated[str, Meta(max_length=16)], ...], Meta(max_length=MAX_TENSORS)]
    """Of each of them, such as ``float32``."""
    names: Annotated[tuple[Annotated[str, Meta(max_length=1024)], ...], Meta(max_length=MAX_TENSORS)] = ()
    """Of the trained parameters in the program's model, if the archivist knows them."""

    def __post_init__(self) -> None:
        try:
            public_key_of(self.archivist)
        except PeerIdError as error:
            raise ValueError("an archivist that is no peer") from error
        if not self.run_id.isprintable():
            raise ValueError("a run id that is not printable")
        if len(self.shapes) != len(self.dtypes):
            raise ValueError("other numbers of shapes and of dtypes")
        if len(self.authority) not in (0, 32):
            raise ValueError("an authority whose key has no 32 bytes")


class Snapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """The second entry of a segment: the state before its first update, whose bytes are the payload."""

    time: Seconds
    epoch: _Epoch
    state: Hash
    """State of the lineage."""
    root: Hash
    """Root over the payload's chunks of 1 MiB (:func:`p2pavg.state.tree.root_of`)."""
    size: Annotated[int, Meta(ge=1, le=MAX_SNAPSHOT_BYTES)]


class Update(Message, frozen=True, kw_only=True, tag="update"):
    """One update of the run. The payload is the encoded average, part by part."""

    time: Seconds
    epoch: Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
    """Updates since the run began, this one included."""
    before: Hash
    """State of the lineage before the update, which the members have signed in the certificate."""
    after: Hash
    """State of the lineage after it."""
    certificate: Annotated[bytes, Meta(min_length=1, max_length=MAX_CERTIFICATE_BYTES)]
    """Of the round's commit: roster, digest of the average, signatures."""
    digests: Annotated[bytes, Meta(max_length=MAX_PARTS * PART_DIGEST_BYTES)]
    """BLAKE3 digest of each part, 32 bytes each."""
    numbers: Annotated[bytes, Meta(max_length=MAX_NUMBERS_BYTES)]
    """The optimizer's hyperparameters in this update, from :func:`p2pavg.state.average.pack_numbers`."""
    digest: Hash
    """BLAKE3 digest of the payload as a whole, for readers that do not know where its parts begin."""
    size: Annotated[int, Meta(ge=0, le=MAX_SNAPSHOT_BYTES)]


class HistoryNotice(Message, frozen=True, kw_only=True, tag="notice"):
    """Something that the run's members learned between two updates. The payload is its proof."""

    time: Seconds
    kind: Annotated[str, Meta(pattern="^[a-z]{1,16}$")]
    """:data:`REVOKED` or :data:`EXCLUDED`; later versions may have more."""
    digest: Hash
    """BLAKE3 digest of the payload."""
    size: Annotated[int, Meta(ge=1, le=MAX_NOTICE_BYTES)]


class Seal(Message, frozen=True, kw_only=True, tag="seal"):
    """The last entry of a segment: the archivist's signature on everything before it."""

    time: Seconds
    archivist: PeerIdText
    run_id: Annotated[str, Meta(min_length=1, max_length=MAX_RUN_ID_CHARS)]
    number: Annotated[int, Meta(ge=0, le=2**40)]
    entries: Annotated[int, Meta(ge=1, le=2**32)]
    """Entries of the segment before this one."""
    root: Hash
    """Merkle root over the hashes of these entries."""
    credits: Hash
    """Merkle root over the segment's :class:`Credit` of each peer, in the order of their ids."""
    signature: Annotated[bytes, Meta(max_length=64)] = b""

    @property
    def statement(self) -> bytes:
        """The bytes that are signed."""
        return _SEAL + msgspec.structs.replace(self, signature=b"").encode()


Entry: TypeAlias = SegmentBeginning | Snapshot | Update | HistoryNotice | Seal


class DayCredit(Message, frozen=True):
    """The credit of one peer on one day, in UTC."""

    day: Annotated[int, Meta(ge=0, le=2**31)]
    """Days since 1970-01-01."""
    updates: Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
    samples: Annotated[float, Meta(ge=0, le=MAX_WEIGHT * 2**20)]


class Credit(Message, frozen=True, kw_only=True):
    """The contributions of one peer to the updates of one segment, from their signed rosters."""

    peer_id: PeerIdText
    days: Annotated[tuple[DayCredit, ...], Meta(min_length=1, max_length=SEGMENT_ENTRIES)]


def read_entry(body: bytes) -> Entry:
    """Read an entry's body.

    Raises:
        StateError: it is none.
    """
    try:
        entry: Entry = decoded(body, Entry)
    except RemoteProtocolError as error:
        raise StateError(f"no entry of a history: {error}") from None
    return entry


def payload_size(entry: Entry) -> int:
    """Return the number of bytes that follow an entry's body."""
    return entry.size if isinstance(entry, Snapshot | Update | HistoryNotice) else 0


def framed(previous: bytes, body: bytes) -> bytes:
    """Return what stands in a segment before the payload."""
    return _FRAME.pack(len(body), previous) + body


def read_frame(data: bytes) -> tuple[int, bytes]:
    """Return the length of the body and the hash of the entry before, from :data:`FRAME_BYTES` bytes.

    Raises:
        StateError: no body is as long.
    """
    length, previous = _FRAME.unpack(data)
    if not 0 < length <= MAX_BODY_BYTES:
        raise StateError(f"an entry of {length} bytes")
    return length, previous


def hash_of(previous: bytes, body: bytes) -> bytes:
    """Return the hash of an entry, 32 bytes."""
    return hashlib.sha256(b"".join((_ENTRY, previous, body))).digest()


def sealed(signer: Signer, seal: Seal) -> Seal:
    """Return a seal with its archivist's signature."""
    return msgspec.structs.replace(seal, signature=signer.sign(seal.statement))


# Merkle trees, as in certificate transparency (RFC 9162, section 2.1): the root over a list of leaves, and a proof that
# one leaf is in it whose length is the logarithm of their number.


def leaf_hash(leaf: bytes) -> bytes:
    """Return the hash of a leaf."""
    return hashlib.sha256(b"\0" + leaf).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _split(count: int) -> int:
    return 1 << ((count - 1).bit_length() - 1)  # the largest power of two below it


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root over leaves, 32 bytes."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    level = [leaf_hash(leaf) for leaf in leaves]
    while len(level) > 1:
        # A last one without a partner moves up as it is: the same tree as that of the recursive definition.
        paired = [_node(*level[at : at + 2]) for at in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def merkle_proof(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """Return the hashes that prove that a leaf is under the root, from the leaf upwards."""
    if len(leaves) <= 1:
        return ()
    half = _split(len(leaves))
    if index < half:
        return (*merkle_proof(leaves[:half], index), merkle_root(leaves[half:]))
    return (*merkle_proof(leaves[half:], index - half), merkle_root(leaves[:half]))


def proven_root(leaf: bytes, index: int, count: int, proof: Sequence[bytes]) -> bytes:
    """Return the root to which a proof leads.

    Args:
        index: of the leaf, from 0.
        count: of all leaves.

    Raises:
        StateError: a proof of such a leaf has another length.
    """
    if not 0 <= index < count:
        raise StateError(f"a proof of leaf {index} of {count}")
    steps: list[bool] = []
    first, last = index, count
    while last > 1:
        half = _split(last)
        is_left = first < half
        steps.append(is_left)
        first, last = (first, half) if is_left else (first - half, last - half)
    if len(steps) != len(proof):
        raise StateError(f"a proof of {len(proof)} hashes, {len(steps)} are needed")
    found = leaf_hash(leaf)
    for is_left, other in zip(reversed(steps), proof, strict=True):
        found = _node(found, other) if is_left else _node(other, found)
    return found


# Credits of a segment.


class CreditSums:
    """The sums of contributions, by peer and day."""

    def __init__(self) -> None:
        self._days: dict[str, dict[int, tuple[int, float]]] = {}

    def add(self, time: float, samples: Mapping[str, float]) -> None:
        """Add an update: its time, and the samples of each contributor."""
        day = int(time // DAY_SECONDS)
        for peer_id, count in samples.items():
            updates, total = self._days.setdefault(peer_id, {}).get(day, (0, 0.0))
            self._days[peer_id][day] = (updates + 1, total + count)

    def credited(self) -> tuple[Credit, ...]:
        """Return the credit of each peer, in the order of their ids."""
        return tuple(
            Credit(
                peer_id=peer_id,
                days=tuple(
                    DayCredit(day, updates, float(total)) for day, (updates, total) in sorted(days.items())
                ),
            )
            for peer_id, days in sorted(self._days.items())
        )


def credits_of(contributions: Iterable[tuple[float, Mapping[str, float]]]) -> tuple[Credit, ...]:
    """Return the credit of each peer of some updates, each with its time and the samples of its contributors."""
    sums = CreditSums()
    for time, samples in contributions:
        sums.add(time, samples)
    return sums.credited()


def credits_root(found: Sequence[Credit]) -> bytes:
    """Return the Merkle root over credits."""
    return merkle_root([credit.encode() for credit in found])
