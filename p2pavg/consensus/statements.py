"""Statements that members sign about a result, and two statements that contradict each other. No I/O, no clock.

A member that holds the whole result of an attempt signs one statement: the group, the attempt, the attempt's members
and the digest of the whole result. All members that hold the same bits sign the same statement, so the signatures of
several members fit into one message. Members are named by their position in the roster, whose hash is the group id.

A signature binds its member for ever: two statements of one member about one attempt that name different digests are
evidence that any peer can check (:func:`contradiction`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import Hash, Message, pack
from p2pavg.consensus.votes import SIGNATURE_BYTES, Ballot, Members, Signature
from p2pavg_dht.identity import PEER_ID_LENGTH, PeerIdError, public_key_of

RESULT_BYTES = 32
MAX_EVIDENCE_BYTES = 4096

CONTRADICTION = "p2pavg-evidence/1"
"""The first field of evidence that consists of two contradicting statements."""

_HELD_DOMAIN = b"p2pavg-held/1\0"
_RESULT_DOMAIN = b"p2pavg-result/1\0"


def result_digest(digests: Iterable[bytes]) -> bytes:
    """Return the digest of a whole result: BLAKE3 of the digests of its shares, in the members' order."""
    return blake3(_RESULT_DOMAIN + b"".join(digests)).digest(RESULT_BYTES)


@dataclass(frozen=True, slots=True)
class Statement:
    """The sentence that a member signs: it holds this result of this attempt, as a whole."""

    group_id: bytes
    attempt: int
    members: Members
    """Members of the attempt, by their positions in the group's roster."""
    digest: bytes
    """:func:`result_digest` of the result."""

    def signed_bytes(self) -> bytes:
        """Return the bytes that are signed."""
        members = tuple(sorted(self.members))
        return _HELD_DOMAIN + pack(self.group_id, self.attempt, members, self.digest)


def is_signed_by(peer_id: str, statement: Statement, signature: bytes) -> bool:
    """Return whether a peer has signed a statement."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    try:
        public_key_of(peer_id).verify(signature, statement.signed_bytes())
    except (InvalidSignature, PeerIdError):
        return False
    return True


# ---------------------------------------------------------------------- evidence


@dataclass(frozen=True, slots=True)
class Signed:
    """A statement with the signature of one peer. It may be forged: :func:`contradiction` checks it."""

    peer_id: str
    statement: Statement
    signature: bytes


class _HeldResult(Message, frozen=True):
    """One of two contradicting statements, with its signature."""

    members: Members
    digest: Hash
    signature: Signature


class Contradiction(Message, frozen=True, tag=CONTRADICTION):
    """Two contradicting statements of one peer about one attempt, the one with the smaller digest first."""

    peer_id: Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]
    group_id: Hash
    attempt: Ballot
    first: _HeldResult
    second: _HeldResult


def contradiction(a: Signed, b: Signed) -> str:
    """Return why two statements prove that their signer lied; empty if they prove nothing.

    An honest member holds one result of an attempt, and takes part in one attempt of a number. Statements about two
    attempts of a group are no contradiction: a member may hold the first one's result, which no member committed, and
    then the second one's.
    """
    one, other = a.statement, b.statement
    if a.peer_id != b.peer_id or (one.group_id, one.attempt) != (other.group_id, other.attempt):
        return ""
    if one == other or not all(is_signed_by(each.peer_id, each.statement, each.signature) for each in (a, b)):
        return ""
    what = "members" if one.members != other.members else "results"
    group, attempt = one.group_id.hex()[:8], one.attempt
    return f"{a.peer_id} signed that it holds two {what} of attempt {attempt} of group {group}"


def encode_evidence(a: Signed, b: Signed) -> bytes:
    """Return two statements of one peer as bytes, the same for either order.

    Raises:
        ValueError: they prove nothing.
    """
    if not contradiction(a, b):
        raise ValueError("the two statements do not contradict each other")
    statement = a.statement
    held = (_HeldResult(each.statement.members, each.statement.digest, each.signature) for each in (a, b))
    first, second = sorted(held, key=lambda each: (each.digest, sorted(each.members)))
    return Contradiction(a.peer_id, statement.group_id, statement.attempt, first, second).encode()


def read_evidence(data: bytes) -> tuple[Signed, Signed]:
    """Return the two statements in bytes of :func:`encode_evidence`, which prove that their signer lied.

    Raises:
        RemoteProtocolError: the bytes are malformed, not canonical, or prove nothing.
    """
    if len(data) > MAX_EVIDENCE_BYTES:
        raise RemoteProtocolError(f"evidence of {len(data)} bytes")
    said = Contradiction.decode(data)
    first, second = (
        Signed(
            said.peer_id, Statement(said.group_id, said.attempt, held.members, held.digest), held.signature
        )
        for held in (said.first, said.second)
    )
    if not contradiction(first, second):
        raise RemoteProtocolError("two statements that do not contradict each other, or are forged")
    if encode_evidence(first, second) != data:  # in the other order
        raise RemoteProtocolError("evidence that is not canonical")
    return first, second
