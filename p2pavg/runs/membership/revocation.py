"""Lists of revoked certificates, signed by a run's authority. No I/O, no clock, no random source.

A list is complete: the one with the highest number replaces all others. An authority leaves out certificates that have
expired, so a list stays short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Annotated, Generic, Protocol, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta
from msgspec.structs import replace

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import Hash, Message
from p2pavg.runs.membership.certificate import IDENTIFIER_BYTES, SIGNATURE_BYTES

# Notices: what a run's authority signs after the run has begun.
#
# A notice is complete: of one kind, the one with the highest number replaces all others.


class SignedNotice(Protocol):
    """A message that an authority has signed."""

    @property
    def number(self) -> int:
        """Grows with every notice of its kind."""
        ...

    def encode(self) -> bytes:
        """Return the notice as bytes."""
        ...


N = TypeVar("N", bound=SignedNotice)


class NewestNotice(Generic[N]):
    """The newest notice of one kind that this peer has seen. All of its users at this peer share one object.

    Args:
        first: the one that is known from the beginning.
    """

    def __init__(self, first: N) -> None:
        self.newest = first
        self.changed: list[Callable[[], None]] = []
        """Called after a newer one was learned."""

    def learn(self, notice: N) -> bool:
        """Take a notice, which was checked; return whether it is newer than all others."""
        if notice.number <= self.newest.number:
            return False
        self.newest = notice
        for changed in tuple(self.changed):
            changed()
        return True


DOMAIN = b"p2pavg-revoked/3\0"
MAX_REVOKED = 200
"""Identifiers of one list; so many fit into one record. With more, the authority begins a new run file."""
MAX_NUMBER = 2**53


class RevocationList(Message, frozen=True, kw_only=True, tag=3):
    """The revoked certificates of one run, by identifier."""

    authority: Hash
    """Its public key."""
    number: Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
    """Grows with every list; the highest one counts."""
    joined: Annotated[bytes, Meta(max_length=MAX_REVOKED * IDENTIFIER_BYTES)] = b""
    """The identifiers in ascending order, one after another: a list would not fit into a record."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""

    def __post_init__(self) -> None:
        if len(self.joined) % IDENTIFIER_BYTES or _joined(self.identifiers) != self.joined:
            raise ValueError("identifiers that are out of order, or of another length")

    @property
    def identifiers(self) -> frozenset[bytes]:
        """The identifiers of all revoked certificates."""
        return _identifiers(self.joined)

    @property
    def statement(self) -> bytes:
        """The bytes that are signed: the list without its signature."""
        return DOMAIN + replace(self, signature=b"").encode()


def _joined(identifiers: Iterable[bytes]) -> bytes:
    return b"".join(sorted(identifiers))


@lru_cache(maxsize=16)  # it is asked for with every record of a member
def _identifiers(joined: bytes) -> frozenset[bytes]:
    starts = range(0, len(joined), IDENTIFIER_BYTES)
    return frozenset(joined[start : start + IDENTIFIER_BYTES] for start in starts)


def no_revocations(authority: bytes) -> RevocationList:
    """Return the list of a run in which no certificate was revoked. It has the number 0 and no signature."""
    return RevocationList(authority=authority, number=0)


def known_revocations(authority: bytes) -> NewestNotice[RevocationList]:
    """Return the newest list that a peer knows when it begins: the one that revokes nothing."""
    return NewestNotice(no_revocations(authority))


def revoke(
    sign: Callable[[bytes], bytes], *, authority: bytes, number: int, identifiers: Iterable[bytes]
) -> RevocationList:
    """Return a signed list.

    Args:
        sign: returns the Ed25519 signature of the authority.
        number: above the number of every earlier list.
        identifiers: of all revoked certificates that have not expired, 200 at most.

    Raises:
        ValueError: too many identifiers, or the number is out of range.
    """
    named = frozenset(identifiers)
    if len(named) > MAX_REVOKED:
        raise ValueError(f"a list has at most {MAX_REVOKED} identifiers, not {len(named)}")
    if not 0 < number <= MAX_NUMBER:
        raise ValueError(f"number must be from 1 to {MAX_NUMBER}, not {number}")
    unsigned = RevocationList(authority=authority, number=number, joined=_joined(named))
    return replace(unsigned, signature=sign(unsigned.statement))


@lru_cache(maxsize=16)  # each member of the run publishes the same list
def read_revocations(data: bytes, authority: bytes) -> RevocationList:
    """Read a list and check its signature.

    Raises:
        RemoteProtocolError: the bytes are no list of this authority.
    """
    revocations = RevocationList.decode(data)
    if revocations.authority != authority or not revocations.number:
        raise RemoteProtocolError("a list of revoked certificates of another run")
    try:
        Ed25519PublicKey.from_public_bytes(authority).verify(revocations.signature, revocations.statement)
    except (InvalidSignature, ValueError):
        raise RemoteProtocolError(
            "a list of revoked certificates that the authority has not signed"
        ) from None
    return revocations


def authority_of(data: bytes) -> bytes:
    """Return the authority that a list names. :func:`read_revocations` checks whether it has signed the list.

    Raises:
        RemoteProtocolError: the bytes are no list.
    """
    return RevocationList.decode(data).authority
