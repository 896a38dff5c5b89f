"""A kind of evidence of some MiB, for tests of its way."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import first_text, pack
from p2pavg.verification.evidence import accusation
from p2pavg.verification.evidence.accusation import EvidenceKind
from tests.unit.verification.evidence.samples import LIAR

LARGE = "large/1"
SIZE = 5 * 1024 * 1024


def large_evidence() -> bytes:
    """Return evidence of this kind; each byte counts."""
    return pack(LARGE, LIAR.peer_id, bytes(range(256)) * (SIZE // 256))


def admit_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this version verify the kind."""
    true = large_evidence()

    def read(data: bytes) -> tuple[str, str]:
        if data != true or first_text(data) != LARGE:
            raise RemoteProtocolError("another one")
        return LIAR.peer_id, "it lied at length"

    kinds = {**accusation.KINDS, LARGE: EvidenceKind(2 * SIZE, read)}
    monkeypatch.setattr(accusation, "KINDS", MappingProxyType(kinds))
