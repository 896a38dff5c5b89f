"""The access of one peer to a run that has an authority: what its user puts into the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pavg.base.errors import ConfigError
from p2pavg.runs.membership.certificate import (
    AUTHORITY_BYTES,
    MemberCertificateError,
    Role,
    is_genuine,
    read_certificate,
)

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
