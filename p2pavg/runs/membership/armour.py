"""Certificates and lists of revoked ones as text that can be pasted into a mail. No I/O, no clock, no random source.

The text is a comment that says what it is, and base64. Comments are for people: nothing is read from them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Iterable

from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.runs.membership.certificate import Certificate, MemberCertificateError, read_certificate
from p2pavg.runs.membership.revocation import RevocationList, read_revocations

MAX_TEXT_CHARS = 8192
"""Length of a text with comments. A list of 200 identifiers has 4500 characters."""


def certificate_text(certificate: Certificate) -> str:
    """Return a certificate as text."""
    return _armoured(f"p2pavg certificate of {certificate.peer_id}", certificate.data)


def revocations_text(revocations: RevocationList) -> str:
    """Return a list of revoked certificates as text."""
    return _armoured(
        f"p2pavg list of revoked certificates, number {revocations.number}, entries: {len(revocations.identifiers)}",
        revocations.encode(),
    )


def parse_certificate(text: str) -> Certificate:
    """Read a certificate. Its signatures are not checked.

    Raises:
        ConfigError: the text is no certificate.
    """
    try:
        return read_certificate(read_armour(text))
    except MemberCertificateError as error:
        raise ConfigError(f"it is no certificate: {error}") from None


def parse_revocations(text: str, authority: bytes) -> RevocationList:
    """Read a list of revoked certificates and check its signature.

    Raises:
        ConfigError: the text is no list of this authority.
    """
    try:
        return read_revocations(read_armour(text), authority)
    except RemoteProtocolError as error:
        raise ConfigError(f"it is no list of this run's revoked certificates: {error}") from None


def read_armour(text: str) -> bytes:
    """Return the bytes in a text. A program for mail may have broken the line of base64, or added blank lines.

    Raises:
        ConfigError: the text is no base64.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ConfigError(f"it has {len(text)} characters; {MAX_TEXT_CHARS} are allowed")
    lines = (line.strip() for line in text.splitlines())
    joined = "".join(line for line in lines if not line.startswith("#"))
    try:
        data = base64.b64decode(joined, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data:
        raise ConfigError("it has no line of base64; was a part of it lost when it was copied?")
    return data


def _armoured(comment: str, data: bytes) -> str:
    return f"# {comment}\n{base64.b64encode(data).decode('ascii')}\n"


# The ledger of an authority: the certificates that it has signed or revoked.
#
# It is a text with one certificate a line. The authority adds lines and changes none. With it, a peer's certificates
# can be revoked by the peer's id, and a list of revoked certificates loses those that have expired.

COMMENT = (
    "# p2pavg ledger: the certificates that this authority has signed or revoked. Keep it with the key.\n"
)


def ledger_line(certificate: Certificate) -> str:
    """Return the line of one certificate."""
    return base64.b64encode(certificate.data).decode("ascii") + "\n"


def parse_ledger(text: str) -> list[Certificate]:
    """Read a ledger.

    Raises:
        ConfigError: a line is no certificate; the message has its number.
    """
    certificates = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            try:
                certificates.append(parse_certificate(line))
            except ConfigError as error:
                raise ConfigError(f"line {number}: {error}") from None
    return certificates


def identifiers_of(peer_id: str, certificates: Iterable[Certificate], *, now: float) -> frozenset[bytes]:
    """Return the identifiers of a peer's certificates that have not expired."""
    return frozenset(
        each.identifier for each in certificates if each.peer_id == peer_id and each.expires > now
    )


def still_revoked(
    identifiers: Collection[bytes], certificates: Iterable[Certificate], *, now: float
) -> frozenset[bytes]:
    """Return the identifiers without those of certificates that have expired: these admit no peer anyway."""
    expired = {each.identifier for each in certificates if each.expires <= now}
    return frozenset(identifiers) - expired
