"""The members of a run, as one of its peers sees them. No I/O, no clock, no random source."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pavg.base.errors import ConfigError
from p2pavg.group.candidate import Candidate
from p2pavg.runs.membership.certificate import (
    AUTHORITY_BYTES,
    MemberCertificateError,
    Role,
    is_genuine,
    read_certificate,
    refusal,
)
from p2pavg.runs.membership.revocation import NewestNotice, RevocationList, known_revocations

# The access of one peer to a run that has an authority: what its user puts into the configuration.

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAccess:
    """The keys of a run, and this peer's certificate.

    Args:
        authority: Ed25519 public key of the run's authority, 32 bytes.
        secret: 32 bytes that all peers of the run share. The keys of its records follow from it, and the records are
            encrypted with it.
        certificate: this peer's certificate, as ``p2pavg run invite`` writes it.
        contributing: the role that a contribution needs; ``source`` where one peer gives its parameters to all others.

    Raises:
        ConfigError: an argument is malformed, or the certificate is not of this run; the message names it.
    """

    authority: bytes
    secret: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    contributing: Role = Role.CONTRIBUTOR

    def __post_init__(self) -> None:
        for name, size in (("authority", AUTHORITY_BYTES), ("secret", SECRET_BYTES)):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != size:
                raise ConfigError(f"{name} must be {size} bytes")
        try:
            certificate = read_certificate(self.certificate)
        except MemberCertificateError as error:
            raise ConfigError(f"certificate: {error}") from None
        if certificate.authority != self.authority:
            raise ConfigError("certificate: it is of another run; ask the operator of this run for one")
        if not is_genuine(certificate):
            raise ConfigError("certificate: its signature is not the authority's; ask for a new one")

    @property
    def peer_id(self) -> str:
        """Id of the peer that the certificate is for."""
        return read_certificate(self.certificate).peer_id

    @property
    def roles(self) -> frozenset[Role]:
        """Roles that the certificate grants."""
        return read_certificate(self.certificate).roles

    @property
    def max_weight(self) -> float:
        """Largest weight of a contribution that the certificate grants, in samples."""
        return read_certificate(self.certificate).max_weight


class Membership:
    """The members of a run that has an authority.

    Args:
        access: this peer's access to the run.
        peer_id: this peer's id.
        known: the revocations that all users of the authority's runs at this peer share; ``None``: none are known yet.

    Raises:
        ConfigError: the certificate is for another peer.
    """

    def __init__(
        self, access: RunAccess, peer_id: str, known: NewestNotice[RevocationList] | None = None
    ) -> None:
        if access.peer_id != peer_id:
            raise ConfigError(
                f"certificate: it is for {access.peer_id}, and this peer is {peer_id}; "
                "open the peer with the identity file for which the certificate was made"
            )
        self.access = access
        self.known = known or known_revocations(access.authority)

    def own_refusal(self, now: float) -> str | None:
        """Return the reason for which other members refuse this peer, or ``None``."""
        return self.refusal(self.access.peer_id, self.access.certificate, now)

    def refusal(self, peer_id: str, certificate: bytes, now: float) -> str | None:
        """Return the reason for which a peer is no member, or ``None``.

        Args:
            peer_id: the authenticated id of the peer.
            certificate: what it has shown.
            now: wall clock, seconds.
        """
        return refusal(
            certificate,
            authority=self.access.authority,
            peer_id=peer_id,
            now=now,
            revoked=self.known.newest.identifiers,
        )

    def refuses(self, candidate: Candidate, now: float) -> str | None:
        """Return the reason for which a candidate may not take part as it wants to, or ``None``."""
        wrong = self.refusal(candidate.peer_id, candidate.certificate, now)
        if wrong is not None:
            return wrong
        certificate = read_certificate(candidate.certificate)
        role = self.access.contributing if candidate.weight else Role.OBSERVER
        if candidate.auxiliary:
            role = Role.AUXILIARY
        if role not in certificate.roles and not (
            role is Role.OBSERVER and Role.CONTRIBUTOR in certificate.roles
        ):
            granted = ", ".join(sorted(certificate.roles))
            return f"its certificate grants {granted} and not {role}"
        if candidate.weight > certificate.max_weight:
            return (
                f"its weight of {candidate.weight:g} is above the {certificate.max_weight:g} "
                "that its certificate grants"
            )
        return None
