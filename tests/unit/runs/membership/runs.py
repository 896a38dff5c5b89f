"""A run with an authority, for tests."""

from __future__ import annotations

from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pavg.runs.membership.certificate import Certificate, Role, issue
from p2pavg.runs.membership.membership import RunAccess
from p2pavg_dht import Ed25519Signer

NOW = 1_800_000_000.0
SECRET = bytes(range(32))


class Authority:
    """The authority of a run."""

    def __init__(self, seed: bytes = b"a" * 32) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()
        self.sign = self._key.sign
        self._issued = 0

    def certify(self, peer_id: str, **changed: Any) -> Certificate:
        """Issue a certificate for a contributor; ``changed`` changes its fields."""
        self._issued += 1
        fields: dict[str, Any] = {
            "sign": self.sign,
            "authority": self.public,
            "peer_id": peer_id,
            "roles": [Role.CONTRIBUTOR],
            "max_weight": 100.0,
            "not_before": NOW,
            "expires": NOW + 3600.0,
            "serial": self._issued.to_bytes(16, "big"),
        }
        return issue(**(fields | changed))

    def access(self, signer: Ed25519Signer, **changed: Any) -> RunAccess:
        """Return a peer's access to the run."""
        certificate = self.certify(signer.peer_id, **changed).data
        return RunAccess(authority=self.public, secret=SECRET, certificate=certificate)


def signer(number: int) -> Ed25519Signer:
    """Return the identity of a peer."""
    return Ed25519Signer(bytes([number]) * 32)
