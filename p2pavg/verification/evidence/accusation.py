"""Accusations: evidence that one peer lied, which every peer can verify by itself. No I/O, no clock.

Evidence is a message whose first field names its kind. :data:`KINDS` says how each kind is read; another kind is one
more entry. Evidence proves by signatures of the accused peer itself that it lied, so it does not matter which peer
shows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from p2pavg.allreduce import proofs
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES
from p2pavg.base.messages import Hash, Message, cut, first_text, pack
from p2pavg.consensus import statements
from p2pavg.verification.audit import evidence as false_average
from p2pavg_dht.identity import PeerIdError, check_addresses, public_key_of

MAX_EVIDENCE_BYTES = 32 * 1024 * 1024
"""Evidence of any kind: the signed inputs and outputs of a reducer can have some MiB."""
DIGEST_BYTES = 32
MAX_KIND_CHARS = 32


def digest_of(evidence: bytes) -> bytes:
    """Return the name of evidence: its BLAKE3 digest, 32 bytes."""
    return blake3(evidence).digest(DIGEST_BYTES)


class Named(Message, frozen=True):
    """The name of a piece of evidence, and what it is said to be."""

    digest: Hash
    """:func:`digest_of` the evidence."""
    size: Annotated[int, Meta(gt=0, le=MAX_EVIDENCE_BYTES)]
    """Bytes of the evidence."""
    peer_id: str
    """Id of the peer that it accuses."""
    kind: Annotated[str, Meta(min_length=1, max_length=MAX_KIND_CHARS)]
    """A key of :data:`KINDS`, or a kind of a newer version."""

    def __post_init__(self) -> None:
        if not self.kind.isascii() or not self.kind.isprintable():
            raise ValueError("evidence of a kind that is no short text")


@dataclass(frozen=True, slots=True)
class Accusation:
    """Evidence that was verified. Only :func:`read_accusation` makes one."""

    peer_id: str
    """Id of the peer that lied."""
    reason: str
    """The lie, as a sentence about "it"."""
    kind: str
    digest: bytes
    evidence: bytes = field(repr=False)

    @property
    def named(self) -> Named:
        """The evidence's name."""
        return Named(self.digest, len(self.evidence), self.peer_id, self.kind)


@dataclass(frozen=True, slots=True)
class EvidenceKind:
    """One kind of evidence.

    Args:
        max_bytes: size of the largest evidence of this kind.
        read: verifies evidence, and returns the id of the peer that lied and the lie as a sentence about "it". It
            raises RemoteProtocolError for bytes that prove nothing. It runs in a worker thread.
    """

    max_bytes: int
    read: Callable[[bytes], tuple[str, str]]


def _read_contradiction(data: bytes) -> tuple[str, str]:
    first, second = statements.read_evidence(data)
    what = "members" if first.statement.members != second.statement.members else "results"
    group, attempt = first.statement.group_id.hex()[:8], first.statement.attempt
    return first.peer_id, f"it signed that it holds two {what} of attempt {attempt} of group {group}"


def _read_false_average(data: bytes) -> tuple[str, str]:
    found = false_average.read_false_average(data)
    why = found.why()
    if not why:
        raise RemoteProtocolError("evidence about an average that is right")
    subject = found.share.subject
    return (
        found.share.reducer,
        f"it sent a false average in attempt {subject.attempt} of group {subject.group_id.hex()[:8]}: {why}",
    )


def _read_two_averages(data: bytes) -> tuple[str, str]:
    reducer, subject = proofs.read_two_averages(data)
    group = subject.group_id.hex()[:8]
    return reducer, f"it signed two averages of its share in attempt {subject.attempt} of group {group}"


KINDS: Mapping[str, EvidenceKind] = MappingProxyType(
    {
        statements.CONTRADICTION: EvidenceKind(statements.MAX_EVIDENCE_BYTES, _read_contradiction),
        false_average.FALSE_AVERAGE: EvidenceKind(false_average.MAX_EVIDENCE_BYTES, _read_false_average),
        proofs.TWO_AVERAGES: EvidenceKind(proofs.MAX_EVIDENCE_BYTES, _read_two_averages),
    }
)
"""The kinds of evidence that this version verifies, by the first field of their bytes."""


def is_readable(named: Named) -> bool:
    """Return whether this version can verify evidence of this kind and size."""
    kind = KINDS.get(named.kind)
    return kind is not None and 0 < named.size <= kind.max_bytes


def read_accusation(data: bytes) -> Accusation:
    """Verify evidence of any kind.

    Raises:
        RemoteProtocolError: the bytes are of no known kind, too many, malformed, or prove nothing.
    """
    name = first_text(data)
    kind = KINDS.get(name)
    if kind is None:
        raise RemoteProtocolError(f"evidence of an unknown kind {name!r}")
    if len(data) > min(kind.max_bytes, MAX_EVIDENCE_BYTES):
        raise RemoteProtocolError(f"evidence of {len(data)} bytes")
    peer_id, reason = kind.read(data)
    return Accusation(peer_id, reason, name, digest_of(data), data)


def read_named(data: bytes, named: Named) -> Accusation:
    """Verify evidence that another peer has named before.

    Raises:
        RemoteProtocolError: as :func:`read_accusation`; also if the evidence is not what the name says.
    """
    if len(data) != named.size or digest_of(data) != named.digest:
        raise RemoteProtocolError("evidence that does not have the announced digest")
    accusation = read_accusation(data)
    if accusation.named != named:
        raise RemoteProtocolError("evidence of another kind or against another peer than announced")
    return accusation


# The record in which a peer names evidence, and the messages with which another one fetches it.

PROTOCOL = "/p2pavg/evidence/1"
MAX_NAMED = 16
"""Pieces of evidence that one record names: 2 KiB."""
MAX_ADDRESSES = 4
"""Addresses of the publisher in its record: at most 1 KiB."""
MAX_REQUEST_BYTES = MAX_CERTIFICATE_BYTES + 128
MAX_ANSWER_BYTES = 1024
_MAX_REASON_CHARS = 200
_KEY_DOMAIN = "p2pavg/accusations/1"


def accusations_key(run_id: str) -> bytes:
    """Return the key under which the peers of a run name evidence."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id)).digest()


class Notice(Message, frozen=True, tag=1):
    """One peer's record: the evidence that it can show, and where it can be reached."""

    addresses: Annotated[tuple[str, ...], Meta(max_length=MAX_ADDRESSES)]
    """Of the publisher."""
    named: Annotated[tuple[Named, ...], Meta(min_length=1, max_length=MAX_NAMED)]
    """The most important ones first."""

    def __post_init__(self) -> None:
        check_addresses(self.addresses)


def read_notice(value: bytes) -> Notice:
    """Read the value of a record. Raises RemoteProtocolError if it is no notice, or names no peer."""
    notice = Notice.decode(value)
    try:
        for each in notice.named:
            public_key_of(each.peer_id)
    except PeerIdError as error:
        raise RemoteProtocolError(str(error)) from None
    return notice


class EvidenceRequest(Message, frozen=True, tag=1):
    """The first message of a stream: a peer of a run asks for evidence."""

    key: Hash
    """Key of the run's notices, as they are stored."""
    digest: Hash
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
    """Of the peer that asks; empty if the run is open to anybody."""


class EvidenceAnswer(Message, frozen=True, tag=1):
    """The answer to a request."""

    refusal: str
    """The reason for which the evidence is not sent. If it is empty, the evidence follows."""

    def __post_init__(self) -> None:
        cut(self, refusal=_MAX_REASON_CHARS)
