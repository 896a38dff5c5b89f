"""Accusations: evidence that one peer lied, which every peer can verify by itself. No I/O, no clock.

Evidence is a message whose first field names its kind. :data:`KINDS` says how each kind is read; another kind is one
more entry. Evidence proves by signatures of the accused peer itself that it lied, so it does not matter which peer
shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from blake3 import blake3
from msgspec import Meta

from p2pavg.allreduce import proofs
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import Hash, Message, first_text
from p2pavg.consensus import statements
from p2pavg.verification.audit import evidence as false_average

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
