"""Certificates: statements that a run's authority admits one peer. No I/O, no clock, no random source.

A certificate names a peer id, the roles that the peer may take, the largest weight of its contributions, and the time
for which it holds. The authority of the run signs it with its Ed25519 key, or a *delegate* does: a peer whose own
certificate has the role ``delegate``. A delegate's certificates carry the delegate's own one and grant no more than it
does. Delegates cannot make other peers delegates, so a chain has two certificates at most.

The format is canonical: a certificate has one encoding. Its signature covers everything but itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import CLOCK_SKEW_SECONDS, DAY_SECONDS, MAX_CERTIFICATE_BYTES, MAX_WEIGHT
from p2pavg.base.messages import Hash, Message, pack
from p2pavg_dht.identity import PeerIdError, public_key_of

DOMAIN = b"p2pavg-member/1\0"
AUTHORITY_BYTES = 32
SERIAL_BYTES = 16
IDENTIFIER_BYTES = 16
_IDENTIFIER_DOMAIN = b"p2pavg-certificate/1\0"
SIGNATURE_BYTES = 64
MAX_TIME = 253402300799.0  # the last second of the year 9999
EXPIRES_SOON_SECONDS = 7 * DAY_SECONDS
"""Before its end, a certificate's peer is warned for so long: a person has to make another one."""


class Role(StrEnum):
    """The roles that a certificate can grant."""

    CONTRIBUTOR = "contributor"
    """Contribute to averages, and everything that an observer may do."""
    OBSERVER = "observer"
    """Hold the average without contributing."""
    AUXILIARY = "auxiliary"
    """Reduce a share without holding the average."""
    SOURCE = "source"
    """Give its parameters to peers that begin."""
    DELEGATE = "delegate"
    """Sign certificates of other peers."""


class MemberCertificateError(RemoteProtocolError):
    """A certificate that is malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """One peer's certificate. :func:`read_certificate` and :func:`issue` make it; :func:`refusal` checks it.

    ``not_before`` and ``expires`` are wall clock, seconds since 1970.
    """

    authority: bytes
    """Ed25519 public key of the run's authority: 32 bytes."""
    peer_id: str
    roles: frozenset[Role]
    max_weight: float
    """Largest weight of one contribution, in samples."""
    not_before: float
    expires: float
    serial: bytes
    """16 bytes that tell this certificate from others of the same issuer for the same peer."""
    issuer: Certificate | None = None
    """The certificate of the delegate that signed this one; ``None``: the authority signed it."""
    signature: bytes = field(default=b"", repr=False)

    @property
    def statement(self) -> bytes:
        """The bytes that are signed."""
        # The domain keeps this signature from counting as one of another kind. The issuer's certificate is signed
        # along, so that no other one can take its place.
        return DOMAIN + _pack_body(self) + (b"" if self.issuer is None else self.issuer.data)

    @property
    def data(self) -> bytes:
        """The certificate as bytes, at most :data:`~p2pavg.base.limits.MAX_CERTIFICATE_BYTES`."""
        issuer = b"" if self.issuer is None else self.issuer.data
        return SignedCertificate(_pack_body(self), self.signature, issuer).encode()

    @property
    def identifier(self) -> bytes:
        """16 bytes that name this certificate, for its revocation: a digest of its issuer, its peer and its serial.

        The issuer chooses the serial, so a serial alone may be that of another certificate: revoking one would revoke
        the other. With the issuer and the peer in the digest, no delegate can give the identifier of another peer's
        certificate. Times and weight are not in it: a peer that uses its invitation link again, after the delegate's
        own certificate was renewed, gets a certificate with the same identifier, which stays revoked.
        """
        issuer = "" if self.issuer is None else self.issuer.peer_id
        packed = pack(self.authority, issuer, self.peer_id, self.serial)
        return hashlib.sha256(_IDENTIFIER_DOMAIN + packed).digest()[:IDENTIFIER_BYTES]

    @property
    def identifiers(self) -> tuple[bytes, ...]:
        """The certificates on which this one depends: itself, and the delegate's certificate."""
        return (self.identifier,) if self.issuer is None else (self.identifier, self.issuer.identifier)


class CertificateBody(Message, frozen=True):
    """The signed fields of a certificate."""

    authority: Hash
    peer_id: str
    roles: Annotated[frozenset[Role], Meta(min_length=1, max_length=len(Role))]
    max_weight: Annotated[float, Meta(ge=0.0, le=MAX_WEIGHT)]
    not_before: Annotated[float, Meta(ge=0.0, le=MAX_TIME)]
    expires: Annotated[float, Meta(ge=0.0, le=MAX_TIME)]
    serial: Annotated[bytes, Meta(min_length=SERIAL_BYTES, max_length=SERIAL_BYTES)]


class SignedCertificate(Message, frozen=True, tag=1):
    """A certificate as it is sent."""

    body: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
    signature: Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    issuer: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
    """The delegate's certificate; empty if the authority has signed this one."""


def _pack_body(certificate: Certificate) -> bytes:
    return CertificateBody(
        certificate.authority,
        certificate.peer_id,
        certificate.roles,
        float(certificate.max_weight),
        float(certificate.not_before),
        float(certificate.expires),
        certificate.serial,
    ).encode()


def issue(
    sign: Callable[[bytes], bytes],
    *,
    authority: bytes,
    peer_id: str,
    roles: Iterable[Role],
    max_weight: float,
    not_before: float,
    expires: float,
    serial: bytes,
    issuer: Certificate | None = None,
) -> Certificate:
    """Return a signed certificate.

    Args:
        sign: returns the Ed25519 signature of the authority, or of the delegate that ``issuer`` names.
        serial: 16 random bytes.

    Raises:
        MemberCertificateError: a field is out of range, or the delegate's certificate does not grant as much.
    """
    unsigned = Certificate(
        authority=authority,
        peer_id=peer_id,
        roles=frozenset(roles),
        max_weight=max_weight,
        not_before=not_before,
        expires=expires,
        serial=serial,
        issuer=issuer,
    )
    # The same checks as in reading: what is signed here is accepted everywhere.
    _check_fields(unsigned)
    if (wrong := _exceeds(unsigned)) is not None:
        raise MemberCertificateError(wrong)
    values = {name: getattr(unsigned, name) for name in Certificate.__slots__ if name != "signature"}
    return Certificate(**values, signature=sign(unsigned.statement))


@lru_cache(maxsize=4096)  # at most 640 bytes each; the same certificate comes with every record and roster
def read_certificate(data: bytes) -> Certificate:
    """Read a certificate. Its signatures are checked by :func:`refusal`.

    Raises:
        MemberCertificateError: the bytes are no certificate in its canonical form.
    """
    return _read(data, depth=0)


def _read(data: bytes, depth: int) -> Certificate:
    # Checked before anything is unpacked, since any stranger can send these bytes.
    if len(data) > MAX_CERTIFICATE_BYTES:
        raise MemberCertificateError(
            f"a certificate of {len(data)} bytes; {MAX_CERTIFICATE_BYTES} are allowed"
        )
    try:
        signed = SignedCertificate.decode(data)
        body = CertificateBody.decode(signed.body)
    except RemoteProtocolError as error:
        raise MemberCertificateError(f"not a certificate: {error}") from None
    # Refused before it is read, so the nesting of a hostile certificate costs nothing.
    if signed.issuer and depth:
        raise MemberCertificateError("a delegate's certificate that another delegate has signed")
    certificate = Certificate(
        authority=body.authority,
        peer_id=body.peer_id,
        roles=body.roles,
        max_weight=body.max_weight,
        not_before=body.not_before,
        expires=body.expires,
        serial=body.serial,
        issuer=_read(signed.issuer, depth + 1) if signed.issuer else None,
        signature=signed.signature,
    )
    _check_fields(certificate)
    return certificate


def _check_fields(certificate: Certificate) -> None:
    if len(certificate.authority) != AUTHORITY_BYTES or len(certificate.serial) != SERIAL_BYTES:
        raise MemberCertificateError("a certificate whose authority or serial has the wrong length")
    if not certificate.roles:
        raise MemberCertificateError("a certificate without a role")
    # Written so that NaN is refused as well: each comparison with it is false.
    if not 0 < certificate.max_weight <= MAX_WEIGHT:
        raise MemberCertificateError(
            f"a certificate with a max_weight of {certificate.max_weight:g}; "
            f"it must be above 0 and at most {MAX_WEIGHT:g}"
        )
    if not 0 <= certificate.not_before < certificate.expires <= MAX_TIME:
        raise MemberCertificateError("a certificate that ends before it begins, or after the year 9999")
    try:
        public_key_of(certificate.peer_id)
    except PeerIdError as error:
        raise MemberCertificateError(f"a certificate for no peer id: {error}") from None


def _exceeds(certificate: Certificate) -> str | None:
    """Return what a delegated certificate grants beyond its delegate's own one, or ``None``."""
    issuer = certificate.issuer
    if issuer is None:
        return None
    # With chains of two, revoking a delegate takes along all that it has admitted.
    if issuer.issuer is not None or Role.DELEGATE in certificate.roles:
        return "a delegate cannot make other peers delegates"
    if Role.DELEGATE not in issuer.roles:
        return "its issuer is no delegate"
    if issuer.authority != certificate.authority:
        return "its delegate belongs to another run"
    if beyond := certificate.roles - issuer.roles:
        return f"its delegate may not grant the role {min(beyond)}"
    if certificate.max_weight > issuer.max_weight:
        return f"its delegate may grant a max_weight of {issuer.max_weight:g} at most"
    if certificate.expires > issuer.expires or certificate.not_before < issuer.not_before:
        return "it holds longer than its delegate's own certificate"
    return None


def refusal(
    data: bytes, *, authority: bytes, peer_id: str, now: float, revoked: Collection[bytes] = ()
) -> str | None:
    """Return the reason for which a peer is not admitted with this certificate, or ``None``.

    Args:
        data: the certificate as it came; empty if the peer has shown none.
        authority: public key of the run's authority.
        peer_id: the authenticated id of the peer that shows it.
        now: wall clock, seconds.
        revoked: identifiers of revoked certificates.
    """
    if not data:
        return "it has shown no certificate of this run"
    try:
        certificate = read_certificate(data)
    except MemberCertificateError as error:
        return str(error)
    # A certificate contains its authority, so a genuine one proves nothing until this is the run's own.
    if certificate.authority != authority:
        return "its certificate is of another run"
    # Certificates are shown to all members, so each of them could show that of another peer.
    if certificate.peer_id != peer_id:
        return "its certificate is for another peer"
    # After the cheap checks: signatures take time.
    if not is_genuine(certificate):
        return "its certificate is forged"
    for identifier in certificate.identifiers if revoked else ():
        if identifier in revoked:
            whose = (
                "its certificate" if identifier == certificate.identifier else "its delegate's certificate"
            )
            return f"{whose} was revoked"
    if now >= certificate.expires:
        return f"its certificate expired on {date_of(certificate.expires)}"
    # Only the beginning has tolerance. A certificate that has just been
    # issued must work at peers whose clocks are slow.
    if now < certificate.not_before - CLOCK_SKEW_SECONDS:
        return f"its certificate begins on {date_of(certificate.not_before)}"
    return None


def is_genuine(certificate: Certificate) -> bool:
    """Return whether the authority, or a delegate within its own rights, has signed a certificate."""
    issuer = certificate.issuer
    if issuer is None:
        return _signed_by(certificate.authority, certificate.data)
    # A delegate signs what it likes. Only what its own certificate grants counts.
    if _exceeds(certificate) is not None or not _signed_by(issuer.authority, issuer.data):
        return False
    return _signed_by(public_key_of(issuer.peer_id).public_bytes_raw(), certificate.data)


@lru_cache(maxsize=4096)  # a check takes 0.1 ms
def _signed_by(public_key: bytes, data: bytes) -> bool:
    certificate = read_certificate(data)
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(certificate.signature, certificate.statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def date_of(seconds: float) -> str:
    """Return a moment as text, to the second, in UTC."""
    return datetime.fromtimestamp(math.floor(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
