"""Lists of revoked certificates, signed by a run's authority. No I/O, no clock, no random source.

A list is complete: the one with the highest number replaces all others. An authority leaves out certificates that have
expired, so a list stays short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import checked, pack, unpack
from p2pavg.runs.membership.certificate import AUTHORITY_BYTES, IDENTIFIER_BYTES, SIGNATURE_BYTES

DOMAIN = b"p2pavg-revoked/2\0"
_VERSION = 2  # the lists of version 1 named certificates by serials, which delegates choose
MAX_REVOKED = 200
"""Identifiers of one list; so many fit into one record. With more, the authority begins a new run file."""
MAX_NUMBER = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class RevocationList:
    """The revoked certificates of one run, by identifier."""

    authority: bytes
    number: int
    """Grows with every list; the highest one counts."""
    identifiers: frozenset[bytes]
    signature: bytes = field(default=b"", repr=False)

    @property
    def statement(self) -> bytes:
        """The bytes that are signed."""
        return DOMAIN + self._body

    @property
    def data(self) -> bytes:
        """The list as bytes."""
        return pack(_VERSION, self._body, self.signature)

    @property
    def _body(self) -> bytes:
        return pack(self.authority, self.number, b"".join(sorted(self.identifiers)))


def no_revocations(authority: bytes) -> RevocationList:
    """Return the list of a run in which no certificate was revoked. It has the number 0 and no signature."""
    return RevocationList(authority=authority, number=0, identifiers=frozenset())


class KnownRevocations:
    """The newest list of one authority that this peer has seen. All users of its runs at this peer share one object."""

    def __init__(self, authority: bytes) -> None:
        self.newest = no_revocations(authority)
        self.changed: list[Callable[[], None]] = []
        """Called after a newer list was learned."""

    def learn(self, revocations: RevocationList) -> bool:
        """Take a list, which was checked; return whether it is newer than all others."""
        if revocations.number <= self.newest.number:
            return False
        self.newest = revocations
        for changed in tuple(self.changed):
            changed()
        return True


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
    unsigned = RevocationList(authority=authority, number=number, identifiers=frozenset(identifiers))
    if len(unsigned.identifiers) > MAX_REVOKED:
        raise ValueError(f"a list has at most {MAX_REVOKED} identifiers, not {len(unsigned.identifiers)}")
    if not 0 < number <= MAX_NUMBER:
        raise ValueError(f"number must be from 1 to {MAX_NUMBER}, not {number}")
    return RevocationList(
        authority=authority,
        number=number,
        identifiers=unsigned.identifiers,
        signature=sign(unsigned.statement),
    )


@lru_cache(maxsize=16)  # each member of the run publishes the same list
def read_revocations(data: bytes, authority: bytes) -> RevocationList:
    """Read a list and check its signature.

    Raises:
        RemoteProtocolError: the bytes are no list of this authority.
    """
    version, body, signature = unpack(data, int, bytes, bytes)
    if version != _VERSION or len(signature) != SIGNATURE_BYTES:
        raise RemoteProtocolError("a list of revoked certificates of another version")
    found, number, joined = checked(unpack(body, bytes, int, bytes), (bytes, int, bytes))
    if len(found) != AUTHORITY_BYTES or found != authority:
        raise RemoteProtocolError("a list of revoked certificates of another run")
    if (
        not 0 < number <= MAX_NUMBER
        or len(joined) % IDENTIFIER_BYTES
        or len(joined) > MAX_REVOKED * IDENTIFIER_BYTES
    ):
        raise RemoteProtocolError("a list of revoked certificates with fields out of range")
    identifiers = frozenset(
        joined[start : start + IDENTIFIER_BYTES] for start in range(0, len(joined), IDENTIFIER_BYTES)
    )
    revocations = RevocationList(
        authority=authority, number=number, identifiers=identifiers, signature=signature
    )
    if revocations.data != data:
        raise RemoteProtocolError("a list of revoked certificates that is not in its canonical form")
    try:
        Ed25519PublicKey.from_public_bytes(authority).verify(signature, revocations.statement)
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
    _, body, _ = unpack(data, int, bytes, bytes)
    authority, _, _ = unpack(body, bytes, int, bytes)
    return bytes(authority)
