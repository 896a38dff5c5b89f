"""Statements that members sign about a result, and two statements that contradict each other. No I/O, no clock.

A member that holds the whole result of an attempt signs one statement: the group, the attempt, the attempt's members
and the digest of the whole result. All members that hold the same bits sign the same statement, so the signatures of
several members fit into one message. Members are named by their position in the roster, whose hash is the group id.

A signature binds its member for ever: two statements of one member about one attempt that name different digests are
evidence that any peer can check (:func:`contradiction`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blake3 import blake3
from cryptography.exceptions import InvalidSignature

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_MEMBERS
from p2pavg.base.messages import checked, pack, unpack
from p2pavg.consensus.votes import MAX_BALLOT, SIGNATURE_BYTES, Members
from p2pavg_dht.identity import PEER_ID_LENGTH, PeerIdError, public_key_of

GROUP_ID_BYTES = 32
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
    first, second = sorted((a, b), key=_order)
    group_id, attempt = a.statement.group_id, a.statement.attempt
    return pack(CONTRADICTION, a.peer_id, group_id, attempt, _fields(first), _fields(second))


def read_evidence(data: bytes) -> tuple[Signed, Signed]:
    """Return the two statements in bytes of :func:`encode_evidence`, which prove that their signer lied.

    Raises:
        RemoteProtocolError: the bytes are malformed, not canonical, or prove nothing.
    """
    if len(data) > MAX_EVIDENCE_BYTES:
        raise RemoteProtocolError(f"evidence of {len(data)} bytes")
    kind, peer_id, group_id, attempt, *two = unpack(data, str, str, bytes, int, tuple, tuple)
    if kind != CONTRADICTION or len(peer_id) != PEER_ID_LENGTH or len(group_id) != GROUP_ID_BYTES:
        raise RemoteProtocolError("evidence of another kind, or about no peer or no group")
    if not 0 <= attempt <= MAX_BALLOT:
        raise RemoteProtocolError(f"evidence about attempt {attempt}")
    first, second = (_read(peer_id, group_id, attempt, fields) for fields in two)
    if not contradiction(first, second):
        raise RemoteProtocolError("two statements that do not contradict each other, or are forged")
    if encode_evidence(first, second) != data:
        raise RemoteProtocolError("evidence that is not canonical")
    return first, second


def _fields(signed: Signed) -> tuple[tuple[int, ...], bytes, bytes]:
    return tuple(sorted(signed.statement.members)), signed.statement.digest, signed.signature


def _order(signed: Signed) -> tuple[bytes, Sequence[int]]:
    return signed.statement.digest, sorted(signed.statement.members)


def _read(peer_id: str, group_id: bytes, attempt: int, fields: tuple[object, ...]) -> Signed:
    members, digest, signature = checked(fields, (tuple, bytes, bytes))
    checked(members, (int,) * len(members))
    if len(members) > MAX_MEMBERS or members != tuple(sorted(set(members))):
        raise RemoteProtocolError("evidence whose members are too many, out of order, or named twice")
    if any(not 0 <= member < MAX_MEMBERS for member in members) or len(digest) != RESULT_BYTES:
        raise RemoteProtocolError("evidence about no member, or with a digest of another length")
    return Signed(peer_id, Statement(group_id, attempt, frozenset(members), digest), signature)
