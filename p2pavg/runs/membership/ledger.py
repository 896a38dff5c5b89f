"""The ledger of an authority: the certificates that it has signed or revoked. No I/O, no clock, no random source.

It is a text with one certificate a line. The authority adds lines and changes none. With it, a peer's certificates can
be revoked by the peer's id, and a list of revoked certificates loses those that have expired.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable

from p2pavg.base.errors import ConfigError
from p2pavg.runs.membership.armour import parse_certificate
from p2pavg.runs.membership.certificate import Certificate

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
