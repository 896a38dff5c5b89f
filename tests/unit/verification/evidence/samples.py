"""Evidence for tests."""

from __future__ import annotations

from p2pavg.consensus.statements import Signed, Statement, encode_evidence
from p2pavg.verification.evidence.accusation import Accusation, Named
from p2pavg_dht import Ed25519Signer, Signer

KIND = "p2pavg-evidence/1"
LIAR = Ed25519Signer(b"l" * 32)


def signer(number: int) -> Ed25519Signer:
    return Ed25519Signer(number.to_bytes(32, "big"))


def contradiction(by: Signer = LIAR, group: bytes = b"g") -> bytes:
    """Return evidence that a peer signed two results."""
    one, other = (
        Signed(by.peer_id, said, by.sign(said.signed_bytes()))
        for said in (Statement(group * 32, 0, frozenset({0, 1}), digest * 32) for digest in (b"a", b"b"))
    )
    return encode_evidence(one, other)


def accusation(peer_id: str, evidence: bytes = b"evidence") -> Accusation:
    """Return an accusation as if it were verified."""
    digest = (peer_id.encode() + evidence[:16]).ljust(32, b"\0")[-32:]
    return Accusation(peer_id, f"{peer_id} lied", KIND, digest, evidence)


def named(peer_id: str, number: int = 0, **changed: object) -> Named:
    fields: dict[str, object] = {
        "digest": number.to_bytes(32, "big"),
        "size": 300,
        "peer_id": peer_id,
        "kind": KIND,
    }
    return Named(**(fields | changed))  # type: ignore[arg-type]
