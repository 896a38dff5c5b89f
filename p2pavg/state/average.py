"""One average of a run's log: the bytes that all members of a group hold, with the proof. No I/O, no clock.

The *manifest* of an average is its commit certificate, the hyperparameters of the update, and the digests of its parts.
The certificate contains the group's roster, in which each member has signed the state of its lineage before the update.
It also names the digest of the whole result, which follows from the digests of the parts. So any peer can check each
part by itself: members of the run averaged these bytes, from this state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from p2pavg.allreduce.averages import EncodedAverage
from p2pavg.allreduce.reduction import parts_of_share
from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.consensus.certificate import MAX_CERTIFICATE_BYTES, verified_commit
from p2pavg.consensus.statements import result_digest
from p2pavg.consensus.votes import DIGEST_BYTES
from p2pavg.group.candidate import Candidate
from p2pavg.group.roster import Roster, ShareCutter
from p2pavg.group.shares import SharePart
from p2pavg.net.transport import Buffer
from p2pavg.state.values import pack_values, unpack_values
from p2pavg_compression import Codec, CodecError

PART_DIGEST_BYTES = 32
MAX_PARTS = 2**16
MAX_NUMBERS_BYTES = 2**16  # hyperparameters of one update; a group of AdamW has about 100 bytes
MAX_MANIFEST_BYTES = 8 + MAX_CERTIFICATE_BYTES + MAX_NUMBERS_BYTES + MAX_PARTS * PART_DIGEST_BYTES
MIN_TRUSTED_SIGNERS = 2
"""Signers of a certificate that this peer must trust: the members of the smallest group."""

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class LoggedAverage:
    """The average of one round that was committed."""

    state: bytes
    """State of the lineage before the update, which all members signed."""
    group_id: bytes
    """32 bytes: SHA-256 of the group's roster."""
    certificate: bytes
    encoded: EncodedAverage
    numbers: bytes = b""
    """The optimizer's hyperparameters in the update, as plain values; empty if they are none. The members have not
    signed them: the state of the lineage after the update proves them."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory: the parts, their digests, the hyperparameters and the certificate."""
        small = len(self.certificate) + len(self.numbers) + PART_DIGEST_BYTES * len(self.encoded.digests)
        return self.encoded.nbytes + small

    def manifest(self) -> bytes:
        """Return what another peer needs to check the parts."""
        return manifest_of(self.certificate, self.numbers, b"".join(self.encoded.digests))


def manifest_of(certificate: bytes, numbers: bytes, digests: bytes) -> bytes:
    """Return the manifest of an average; ``digests`` are those of its parts, 32 bytes each, one after the other."""
    return b"".join(
        (_LENGTH.pack(len(certificate)), certificate, _LENGTH.pack(len(numbers)), numbers, digests)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """An average that a peer can check.

    Args:
        group_id: 32 bytes; ``None`` for any group.
        key: ready key of the run, which names the run, the tensors and the rules of averaging.
        codec: of the run.
        elements: length of the vector.
        robust: true if the run has a robust rule.
        cutter: cuts the vector among any members, as in a round.
        trusts: returns whether a member's signature counts.
    """

    group_id: bytes | None
    key: bytes
    codec: Codec
    elements: int
    robust: bool
    cutter: ShareCutter
    trusts: Callable[[Candidate], bool]


@dataclass(frozen=True, slots=True)
class ProvenAverage:
    """An average whose certificate was checked: the parts that belong to it."""

    roster: Roster
    """Of the attempt that was committed, with its shares."""
    group_id: bytes
    certificate: bytes
    parts: tuple[SharePart, ...]
    sizes: tuple[int, ...]
    """Bytes of each part."""
    digests: tuple[bytes, ...]
    """BLAKE3 digest of each part, 32 bytes."""
    robust: bool
    """True if a robust rule combined the contributions, and so their metrics too."""
    signers: frozenset[str]
    """Ids of the members that have signed that they hold the result."""
    numbers: bytes
    """The hyperparameters that came with it; see :attr:`LoggedAverage.numbers`. A donor may have made them up."""

    @property
    def state(self) -> bytes:
        """State of the lineage before the update, which all holders have signed."""
        return self.roster.holders[0].state


class FewSignersError(StateError):
    """Too few of the members that this peer trusts today have signed: another donor may have more signatures."""


def read_manifest(data: bytes, expected: Expected) -> ProvenAverage:
    """Check a manifest.

    Raises:
        RemoteProtocolError: it is malformed, not genuine, or the manifest of another average than the expected one.
        FewSignersError: this peer trusts too few of those that have signed. A certificate may have ended since.
        StateError: it is that of the expected group, whose tensors or rules are not this peer's. Its sender has done no
            wrong: it was asked for this group.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise RemoteProtocolError(f"a manifest of {len(data)} bytes")
    certificate, rest = _taken(data)
    numbers, rest = _taken(rest)
    if len(numbers) > MAX_NUMBERS_BYTES:
        raise RemoteProtocolError(f"hyperparameters of {len(numbers)} bytes")
    whole, commit = verified_commit(certificate)
    _check_group(whole, expected)
    signers = [whole.members[position] for position, _ in commit.signatures]
    trusted = sum(expected.trusts(member) for member in signers)
    if trusted < MIN_TRUSTED_SIGNERS:
        raise FewSignersError(
            f"an average that {trusted} members of the run have signed, {MIN_TRUSTED_SIGNERS} are needed"
        )
    if sum(whole.shares) != expected.elements:
        raise RemoteProtocolError(f"an average of {sum(whole.shares)} elements")
    granularity = expected.codec.granularity
    roster = whole.among(commit.attempt, commit.members, expected.cutter)
    by_share = [parts_of_share(roster, position, granularity) for position in range(len(roster.members))]
    parts = tuple(part for of_share in by_share for part in of_share)
    digests = _cut(rest)
    if len(digests) != len(parts):
        raise RemoteProtocolError(f"digests of {len(digests)} parts, not {len(parts)}")
    if _result_digest(digests, [len(of_share) for of_share in by_share]) != commit.digest:
        raise RemoteProtocolError("digests of other parts than the members signed")
    sizes = tuple(expected.codec.averages.encoded_nbytes(part.elements) for part in parts)
    return ProvenAverage(
        roster,
        whole.group_id,
        certificate,
        parts,
        sizes,
        digests,
        expected.robust,
        frozenset(member.peer_id for member in signers),
        numbers,
    )


def _taken(data: bytes) -> tuple[bytes, bytes]:
    """Return what stands behind its length, and the rest."""
    if len(data) < _LENGTH.size:
        raise RemoteProtocolError("a manifest that ends too early")
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if end > len(data):
        raise RemoteProtocolError("a manifest that ends too early")
    return data[_LENGTH.size : end], data[end:]


def _check_group(roster: Roster, expected: Expected) -> None:
    if expected.group_id not in (None, roster.group_id):
        raise RemoteProtocolError("the certificate of another group")
    leader = roster.members[0]
    if leader.record.key != expected.key:
        raise StateError("the average is that of a group with other tensors or rules than this peer's")
    if leader.codec != expected.codec.name:
        raise StateError(
            f"the average is that of a group with the codec {leader.codec}, and this peer's is {expected.codec.name}"
        )


def _result_digest(digests: Sequence[bytes], counts: Iterable[int]) -> bytes:
    """Return the digest that members sign, from the digests of the parts and the number of parts of each share."""
    at, shares = 0, []
    for count in counts:
        shares.append(blake3(b"".join(digests[at : at + count])).digest(DIGEST_BYTES))
        at += count
    return result_digest(shares)


def _cut(digests: bytes) -> tuple[bytes, ...]:
    if len(digests) % PART_DIGEST_BYTES:
        raise RemoteProtocolError("digests of an impossible length")
    starts = range(0, len(digests), PART_DIGEST_BYTES)
    return tuple(digests[start : start + PART_DIGEST_BYTES] for start in starts)


def pack_numbers(settings: Iterable[tuple[str, Any]]) -> bytes:
    """Return the hyperparameters of an update as bytes.

    Raises:
        StateError: one of them is no plain value; the message names it.
    """
    packed = pack_values({"numbers": [[name, value] for name, value in settings]})
    if len(packed) > MAX_NUMBERS_BYTES:
        raise StateError(
            f"the optimizer's hyperparameters have {len(packed)} bytes, {MAX_NUMBERS_BYTES} is the most"
        )
    return packed


def read_numbers(packed: bytes) -> tuple[tuple[str, Any], ...]:
    """Return what :func:`pack_numbers` has packed.

    Raises:
        StateError: the bytes are no such values.
    """
    pairs = unpack_values(packed).get("numbers")
    if type(pairs) is not list or any(
        type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str for pair in pairs
    ):
        raise StateError("hyperparameters that are no pairs of a name and a value")
    return tuple((name, value) for name, value in pairs)


def decode(proven: ProvenAverage, payloads: Sequence[Buffer], codec: Codec, out: torch.Tensor) -> None:
    """Decode an average into ``out``, float32 on the CPU, of the vector's length.

    Args:
        payloads: the encoded parts, whose digests were checked.
        codec: of the run.

    Raises:
        RemoteProtocolError: a part does not decode.
    """
    for part, payload in zip(proven.parts, payloads, strict=True):
        try:
            codec.averages.decode(payload, part.elements, out[part.start : part.stop])
        except CodecError as error:
            raise RemoteProtocolError(f"an averaged part does not decode: {error}") from None
