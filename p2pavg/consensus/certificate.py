"""Certificates: the proof of a commit in bytes, which any program can check without a network.

A certificate contains the group's roster, the attempt, its members, the digest of the result, and the signatures of the
members that signed that they hold this result. The roster contains what each member signed about itself, its weight
among it, and its SHA-256 is the group id that the signatures name. So peers and weights are those that the members
signed for.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2pavg.base.errors import CertificateError, RemoteProtocolError
from p2pavg.base.limits import MAX_MEMBERS
from p2pavg.base.messages import Hash, Message
from p2pavg.consensus.statements import Statement, is_signed_by
from p2pavg.consensus.votes import Ballot, Members, Position, ResultCommit, Signature
from p2pavg.group.roster import Roster, read_roster

MAX_CERTIFICATE_BYTES = 2**18 + 2**14  # a roster is one control message, of 256 KiB at most

_MAGIC = b"p2pavg-commit/1\0"
_LENGTH = struct.Struct(">I")


class CertifiedCommit(Message, frozen=True):
    """A commit as it stands in a certificate, behind the roster."""

    attempt: Ballot
    members: Annotated[frozenset[Position], Meta(min_length=1, max_length=MAX_MEMBERS)]
    digest: Hash
    signers: Members
    signatures: Annotated[tuple[Signature, ...], Meta(max_length=MAX_MEMBERS)]
    """In the order of ``signers``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCertificate:
    """The content of a certificate that was checked.

    It proves that each of ``signers`` has signed that it holds the result with this digest, as the average of ``peers``
    with these weights. It does not prove that the average is right, that the peers contributed what they should, or
    that they are different people.
    """

    group_id: str
    """Hex of the SHA-256 of the group's roster: :attr:`p2pavg.Success.group_id`."""
    peers: tuple[str, ...]
    """Ids of the peers whose contributions are in the result."""
    weights: Mapping[str, float]
    """The weight that each of ``peers`` has signed, in samples."""
    digest: bytes
    """BLAKE3 digest of the result as it was sent, 32 bytes. All members that hold the same bits have the same one."""
    signers: tuple[str, ...]
    """Ids of the members that signed. A peer that is not among them died, or was lost, after it had contributed, or is
    named by other members without its word."""


def encode_certificate(roster: Roster, commit: ResultCommit) -> bytes:
    """Return the certificate of a commit in a group."""
    packed = roster.pack()
    signatures = tuple(signature for _, signature in commit.signatures)
    rest = CertifiedCommit(commit.attempt, commit.members, commit.digest, commit.signers, signatures).encode()
    return b"".join((_MAGIC, _LENGTH.pack(len(packed)), packed, rest))


def verify_certificate(data: bytes) -> CommitCertificate:
    """Check a certificate (:attr:`p2pavg.Success.certificate`) and return its content. It needs no network.

    Raises:
        CertificateError: the bytes are malformed, or a signature in them is not genuine.
    """
    if not isinstance(data, bytes):
        raise CertificateError(f"a certificate is bytes, not {type(data).__name__}")
    if len(data) > MAX_CERTIFICATE_BYTES:
        raise CertificateError(f"a certificate of {len(data)} bytes; {MAX_CERTIFICATE_BYTES} are the most")
    try:
        roster, commit = verified_commit(data)
    except RemoteProtocolError as error:
        raise CertificateError(f"no certificate of a commit: {error}") from None
    ids = [member.peer_id for member in roster.members]
    contributors = {ids.index(member.peer_id) for member in roster.contributors}
    peers = sorted(contributors & commit.members)
    return CommitCertificate(
        group_id=roster.group_id.hex(),
        peers=tuple(ids[position] for position in peers),
        weights={ids[position]: roster.members[position].weight for position in peers},
        digest=commit.digest,
        signers=tuple(ids[position] for position, _ in commit.signatures),
    )


def verified_commit(data: bytes) -> tuple[Roster, ResultCommit]:
    """Check a certificate; return the roster of the whole group, and the commit that its members signed.

    Raises:
        RemoteProtocolError: the bytes are malformed, too many, or a signature in them is not genuine.
    """
    begin = len(_MAGIC) + _LENGTH.size
    if len(data) > MAX_CERTIFICATE_BYTES:
        raise RemoteProtocolError(f"it has {len(data)} bytes")
    if not data.startswith(_MAGIC) or len(data) < begin:
        raise RemoteProtocolError("it begins with something else")
    (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
    commit = _read_commit(data[begin + length :])
    roster = read_roster(data[begin : begin + length])  # checks what the members signed about themselves
    size = len(roster.members)
    if max(commit.members) >= size:
        raise RemoteProtocolError("it names members that the roster has not")
    ids = [member.peer_id for member in roster.members]
    holders = {position for position, member in enumerate(roster.members) if not member.auxiliary}
    if not commit.signatures or commit.signers - holders:
        raise RemoteProtocolError("no member signed, or one that holds no result")
    if not {ids.index(member.peer_id) for member in roster.contributors} & commit.members:
        raise RemoteProtocolError("no member contributed")
    statement = Statement(roster.group_id, commit.attempt, commit.members, commit.digest)
    for position, signature in commit.signatures:
        if not is_signed_by(ids[position], statement, signature):
            raise RemoteProtocolError(f"the signature of {ids[position]} is not genuine")
    return roster, commit


def _read_commit(packed: bytes) -> ResultCommit:
    said = CertifiedCommit.decode(packed)
    if len(said.signers) != len(said.signatures) or said.signers - said.members:
        raise RemoteProtocolError("its signatures are not those of its members")
    signatures = tuple(zip(sorted(said.signers), said.signatures, strict=True))
    return ResultCommit(said.attempt, said.members, said.digest, signatures)
