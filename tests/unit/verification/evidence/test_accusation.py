"""Evidence is read by its kind, and believed only if it proves a lie and is what was announced."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from msgspec import structs

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.verification.evidence import accusation
from p2pavg.verification.evidence.accusation import (
    EvidenceKind,
    digest_of,
    is_readable,
    read_accusation,
    read_named,
)
from tests.unit.verification.evidence.samples import KIND, LIAR, contradiction, named, signer

DATA = contradiction()


def test_two_contradicting_statements_accuse_their_signer() -> None:
    found = read_accusation(DATA)
    assert found.peer_id == LIAR.peer_id
    assert found.reason == "it signed that it holds two results of attempt 0 of group 67676767"
    assert (found.kind, found.evidence, found.digest) == (KIND, DATA, digest_of(DATA))
    assert found.named == named(LIAR.peer_id, digest=digest_of(DATA), size=len(DATA))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no short text"),
        (pack("p2pavg-evidence/2", 1), "an unknown kind 'p2pavg-evidence/2'"),
        (pack("x" * 65), "no short text"),
        (pack(KIND, "nothing"), "no Contradiction"),
        (DATA[:-1] + bytes([DATA[-1] ^ 1]), "forged"),
        (pack(KIND, b"x" * 4096), "evidence of 4"),
    ],
)
def test_other_bytes_accuse_no_peer(data: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        read_accusation(data)


def test_another_kind_is_one_more_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        **accusation.KINDS,
        "audit/1": EvidenceKind(10**7, lambda data: (LIAR.peer_id, f"it lied in {len(data)} bytes")),
    }
    monkeypatch.setattr(accusation, "KINDS", MappingProxyType(kinds))
    data = pack("audit/1", b"x" * 10**6)
    assert read_accusation(data).reason == f"it lied in {len(data)} bytes"
    with pytest.raises(RemoteProtocolError, match="evidence of 1"):
        read_accusation(pack("audit/1", b"x" * 10**7))


@pytest.mark.parametrize(
    "changed",
    [{"digest": bytes(32)}, {"size": len(DATA) + 1}, {"peer_id": signer(1).peer_id}, {"kind": "another"}],
)
def test_evidence_must_be_what_was_announced(changed: dict[str, object]) -> None:
    true = read_accusation(DATA).named
    assert read_named(DATA, true).peer_id == LIAR.peer_id
    with pytest.raises(RemoteProtocolError, match="announced"):
        read_named(DATA, structs.replace(true, **changed))


def test_other_bytes_than_announced_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification may take milliseconds; the digest of 32 MiB takes less."""
    kinds = {KIND: EvidenceKind(4096, lambda _data: pytest.fail("verified"))}
    monkeypatch.setattr(accusation, "KINDS", MappingProxyType(kinds))
    with pytest.raises(RemoteProtocolError, match="announced digest"):
        read_named(DATA, named(LIAR.peer_id, size=len(DATA)))


def test_only_known_kinds_within_their_size_are_readable() -> None:
    assert is_readable(named("any", size=4096))
    assert not is_readable(named("any", size=4097))
    assert not is_readable(named("any", size=0))
    assert not is_readable(named("any", kind="another"))
