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

from p2pavg.base.encoding import checked, pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.runs.membership.certificate import AUTHORITY_BYTES, SERIAL_BYTES, SIGNATURE_BYTES

DOMAIN = b"p2pavg-revoked/1\0"
MAX_REVOKED = 200
"""Serials of one list; so many fit into one record. With more, the authority begins a new run file."""
MAX_NUMBER = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class RevocationList:
    """The revoked certificates of one run, by serial."""

    authority: bytes
    number: int
    """Grows with every list; the highest one counts."""
    serials: frozenset[bytes]
    signature: bytes = field(default=b"", repr=False)

    @property
    def statement(self) -> bytes:
        """The bytes that are signed."""
        return DOMAIN + self._body

    @property
    def data(self) -> bytes:
        """The list as bytes."""
        return pack(1, self._body, self.signature)

    @property
    def _body(self) -> bytes:
        return pack(self.authority, self.number, b"".join(sorted(self.serials)))


def no_revocations(authority: bytes) -> RevocationList:
    """Return the list of a run in which no certificate was revoked. It has the number 0 and no signature."""
    return RevocationList(authority=authority, number=0, serials=frozenset())


def revoke(
    sign: Callable[[bytes], bytes], *, authority: bytes, number: int, serials: Iterable[bytes]
) -> RevocationList:
    """Return a signed list.

    Args:
        sign: returns the Ed25519 signature of the authority.
        number: above the number of every earlier list.
        serials: of all revoked certificates that have not expired, 200 at most.

    Raises:
        ValueError: too many serials, or the number is out of range.
    """
    unsigned = RevocationList(authority=authority, number=number, serials=frozenset(serials))
    if len(unsigned.serials) > MAX_REVOKED:
        raise ValueError(f"a list has at most {MAX_REVOKED} serials, not {len(unsigned.serials)}")
    if not 0 < number <= MAX_NUMBER:
        raise ValueError(f"number must be from 1 to {MAX_NUMBER}, not {number}")
    return RevocationList(
        authority=authority, number=number, serials=unsigned.serials, signature=sign(unsigned.statement)
    )


@lru_cache(maxsize=16)  # each member of the run publishes the same list
def read_revocations(data: bytes, authority: bytes) -> RevocationList:
    """Read a list and check its signature.

    Raises:
        RemoteProtocolError: the bytes are no list of this authority.
    """
    version, body, signature = unpack(data, int, bytes, bytes)
    if version != 1 or len(signature) != SIGNATURE_BYTES:
        raise RemoteProtocolError("a list of revoked certificates of another version")
    found, number, joined = checked(unpack(body, bytes, int, bytes), (bytes, int, bytes))
    if len(found) != AUTHORITY_BYTES or found != authority:
        raise RemoteProtocolError("a list of revoked certificates of another run")
    if not 0 < number <= MAX_NUMBER or len(joined) % SERIAL_BYTES or len(joined) > MAX_REVOKED * SERIAL_BYTES:
        raise RemoteProtocolError("a list of revoked certificates with fields out of range")
    serials = frozenset(joined[start : start + SERIAL_BYTES] for start in range(0, len(joined), SERIAL_BYTES))
    revocations = RevocationList(authority=authority, number=number, serials=serials, signature=signature)
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
