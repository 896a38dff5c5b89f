"""Statements that members sign, and the evidence that two of them are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.consensus.statements import (
    MAX_EVIDENCE_BYTES,
    Contradiction,
    Signed,
    Statement,
    contradiction,
    encode_evidence,
    is_signed_by,
    read_evidence,
    result_digest,
)
from p2pavg.testing.simulation import simulated_signer

LIAR, OTHER = simulated_signer(0), simulated_signer(1)
ONE = Statement(b"g" * 32, 3, frozenset({0, 1, 4}), result_digest([b"a" * 32, b"b" * 32]))
ANOTHER = replace(ONE, digest=result_digest([b"a" * 32, b"c" * 32]))


def signed(statement: Statement) -> Signed:
    return Signed(LIAR.peer_id, statement, LIAR.sign(statement.signed_bytes()))


def test_the_signed_bytes_never_change() -> None:
    assert result_digest([b"a" * 32, b"b" * 32]).hex() == (
        "b24c98b86b4f621fa1d312b61ad9b6f751a00a4f73ac78e3db160f3ed1706c8d"
    )
    assert ONE.signed_bytes() == (
        b"p2pavg-held/1\0\x94\xc4\x20" + b"g" * 32 + b"\x03\x93\x00\x01\x04\xc4\x20" + ONE.digest
    )


def test_only_the_signer_has_signed_and_only_this_statement() -> None:
    signature = LIAR.sign(ONE.signed_bytes())
    assert is_signed_by(LIAR.peer_id, ONE, signature)
    assert not is_signed_by(OTHER.peer_id, ONE, signature)
    assert not is_signed_by("no peer id", ONE, signature)
    assert not is_signed_by(LIAR.peer_id, ONE, signature[:-1])
    for other in (
        ANOTHER,
        replace(ONE, group_id=bytes(32)),
        replace(ONE, attempt=4),
        replace(ONE, members=frozenset({0, 1})),
    ):
        assert not is_signed_by(LIAR.peer_id, other, signature)


@pytest.mark.parametrize(
    "other", [ANOTHER, replace(ONE, members=frozenset({0, 1}))], ids=["another result", "other members"]
)
def test_two_statements_about_one_attempt_are_evidence(other: Statement) -> None:
    found = contradiction(signed(ONE), signed(other))
    assert found.startswith(f"{LIAR.peer_id} signed that it holds two ")
    data = encode_evidence(signed(ONE), signed(other))
    assert data == encode_evidence(signed(other), signed(ONE))
    assert set(read_evidence(data)) == {signed(ONE), signed(other)}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(signed(ONE), signed(ONE), id="the same"),
        pytest.param(signed(ONE), signed(replace(ONE, attempt=4)), id="two attempts"),
        pytest.param(signed(ONE), signed(replace(ANOTHER, group_id=bytes(32))), id="two groups"),
        pytest.param(signed(ONE), replace(signed(ANOTHER), signature=bytes(64)), id="the second forged"),
        pytest.param(replace(signed(ONE), signature=bytes(64)), signed(ANOTHER), id="the first forged"),
        pytest.param(
            signed(ONE), Signed(OTHER.peer_id, ANOTHER, OTHER.sign(ANOTHER.signed_bytes())), id="two peers"
        ),
        pytest.param(signed(ONE), replace(signed(ANOTHER), peer_id=OTHER.peer_id), id="another peer's name"),
    ],
)
def test_other_statements_prove_nothing(a: Signed, b: Signed) -> None:
    assert contradiction(a, b) == contradiction(b, a) == ""
    with pytest.raises(ValueError, match="do not contradict"):
        encode_evidence(a, b)


def test_changed_evidence_is_refused() -> None:
    data = encode_evidence(signed(ONE), signed(ANOTHER))
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises(RemoteProtocolError):
            read_evidence(bytes(changed))
        with pytest.raises(RemoteProtocolError):
            read_evidence(data[:position])
    said = Contradiction.decode(data)
    other_order = structs.replace(said, first=said.second, second=said.first).encode()
    for wrong in (other_order, data + b"\0", bytes(MAX_EVIDENCE_BYTES + 1)):
        with pytest.raises(RemoteProtocolError):
            read_evidence(wrong)
