"""Certificates of a commit: each one verifies, and no other bytes do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from p2pavg.base.errors import CertificateError
from p2pavg.consensus.certificate import MAX_CERTIFICATE_BYTES, encode_certificate, verify_certificate
from p2pavg.consensus.statements import Statement
from p2pavg.consensus.votes import ResultCommit
from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.group.roster import Roster
from p2pavg.testing.simulation import simulated_signer

SIZE = 4
DIGEST = b"d" * 32


def member(index: int, *, auxiliary: bool = False, addresses: tuple[str, ...] = ()) -> Candidate:
    return sign_candidate(
        simulated_signer(index),
        key=b"k" * 32,
        deadline=100.0 + index,
        expiration_time=1000.0,
        weight=0.0 if auxiliary else 1.0 + index,
        bandwidth=100.0,
        codec="fp32",
        auxiliary=auxiliary,
        addresses=addresses,
    )


def roster_of(size: int, auxiliaries: int = 0, addresses: tuple[str, ...] = ()) -> Roster:
    members = tuple(
        member(index, auxiliary=index >= size - auxiliaries, addresses=addresses) for index in range(size)
    )
    return Roster(members=members, shares=(10,) * size, proposal=1)


ROSTER = roster_of(SIZE, auxiliaries=1)


def signed(
    roster: Roster, signers: set[int], attempt: int = 0, members: set[int] | None = None
) -> ResultCommit:
    """Return a commit that these members have signed."""
    among = frozenset(range(len(roster.members)) if members is None else members)
    statement = Statement(roster.group_id, attempt, among, DIGEST)
    signatures = ((one, simulated_signer(one).sign(statement.signed_bytes())) for one in sorted(signers))
    return ResultCommit(attempt, among, DIGEST, tuple(signatures))


def ids(*positions: int) -> tuple[str, ...]:
    return tuple(simulated_signer(position).peer_id for position in positions)


CERTIFICATE = encode_certificate(ROSTER, signed(ROSTER, {0, 1, 2}))


def test_a_certificate_names_the_group_the_peers_their_weights_and_the_signers() -> None:
    found = verify_certificate(CERTIFICATE)
    assert found.group_id == ROSTER.group_id.hex()
    assert found.peers == found.signers == ids(0, 1, 2)
    assert dict(found.weights) == dict(zip(ids(0, 1, 2), (1.0, 2.0, 3.0), strict=True))
    assert found.digest == DIGEST


def test_a_later_attempt_counts_its_members_only() -> None:
    found = verify_certificate(encode_certificate(ROSTER, signed(ROSTER, {0, 2}, 4, {0, 2, 3})))
    assert found.peers == found.signers == ids(0, 2)


def test_a_member_that_died_after_it_had_contributed_is_a_peer_and_no_signer() -> None:
    found = verify_certificate(encode_certificate(ROSTER, signed(ROSTER, {1, 2})))
    assert found.peers == ids(0, 1, 2)
    assert found.signers == ids(1, 2)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, len(CERTIFICATE) - 1), st.integers(1, 255))
def test_a_certificate_with_any_changed_byte_is_refused(position: int, change: int) -> None:
    changed = bytearray(CERTIFICATE)
    changed[position] ^= change
    with pytest.raises(CertificateError):
        verify_certificate(bytes(changed))


@settings(deadline=None)
@given(st.integers(0, len(CERTIFICATE) - 1))
def test_a_certificate_of_another_length_is_refused(length: int) -> None:
    for data in (CERTIFICATE[:length], CERTIFICATE + CERTIFICATE[length:]):
        with pytest.raises(CertificateError):
            verify_certificate(data)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    for prefix in (b"", CERTIFICATE[:16], CERTIFICATE[:20]):
        with pytest.raises(CertificateError):
            verify_certificate(prefix + data)


FALSE: dict[str, ResultCommit] = {
    "no signature": ResultCommit(0, frozenset(range(SIZE)), DIGEST, ()),
    "a signature of an auxiliary": signed(ROSTER, {0, 1, 2, 3}),
    "a signature of no member of the attempt": signed(ROSTER, {0, 1}, 4, {0, 3}),
    "members that the group has not": signed(ROSTER, {0}, 0, {0, 1, SIZE}),
    "a signature about another attempt": structs.replace(signed(ROSTER, {0, 1, 2}), attempt=1),
    "a signature about other members": structs.replace(signed(ROSTER, {0, 1}), members=frozenset({0, 1})),
    "a signature about another result": structs.replace(signed(ROSTER, {0, 1}), digest=bytes(32)),
    "another member's signature": structs.replace(
        signed(ROSTER, {0}), signatures=((1, signed(ROSTER, {0}).signatures[0][1]),)
    ),
    "a signature about another group": signed(replace(ROSTER, proposal=2), {0, 1, 2}),
    "signers in another order": structs.replace(
        signed(ROSTER, {0, 1}), signatures=signed(ROSTER, {0, 1}).signatures[::-1]
    ),
}


@pytest.mark.parametrize("false", FALSE)
def test_a_false_certificate_is_refused(false: str) -> None:
    with pytest.raises(CertificateError):
        verify_certificate(encode_certificate(ROSTER, FALSE[false]))


def test_the_same_content_in_another_encoding_is_refused() -> None:
    """There is one certificate of a commit. Attempt 0 can be packed as one byte or, not canonically, as two."""
    commit = signed(ROSTER, {0, 1, 2})
    head, rest = CERTIFICATE.rsplit(b"\x95\x00\x94", 1)
    assert head + b"\x95\x00\x94" + rest == CERTIFICATE == encode_certificate(ROSTER, commit)
    with pytest.raises(CertificateError, match="in another way"):
        verify_certificate(head + b"\x95\xcc\x00\x94" + rest)


def test_only_bytes_are_read() -> None:
    for data in ("text", None, bytes(MAX_CERTIFICATE_BYTES + 1)):
        with pytest.raises(CertificateError):
            verify_certificate(data)  # type: ignore[arg-type]


def test_the_certificate_of_the_largest_group_is_small() -> None:
    """Each of 64 members announces eight addresses."""
    roster = roster_of(64, addresses=tuple(f"/ip4/203.0.113.{index}/tcp/40001" for index in range(8)))
    data = encode_certificate(roster, signed(roster, set(range(64))))
    assert len(data) < 100_000
    assert len(verify_certificate(data).signers) == 64
