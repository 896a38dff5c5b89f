"""Certificates: what they grant, and everything that is refused."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.limits import CLOCK_SKEW_SECONDS, MAX_CERTIFICATE_BYTES, MAX_WEIGHT
from p2pavg.base.messages import pack
from p2pavg.runs.membership.certificate import (
    Certificate,
    MemberCertificateError,
    Role,
    is_genuine,
    read_certificate,
    refusal,
)
from tests.unit.runs.membership.runs import NOW, Authority, signer

RUN = Authority()
ALICE, BOB, DELEGATE = signer(1), signer(2), signer(3)


def refused(certificate: Certificate | bytes, **changed: Any) -> str | None:
    data = certificate if isinstance(certificate, bytes) else certificate.data
    arguments: dict[str, Any] = {"authority": RUN.public, "peer_id": ALICE.peer_id, "now": NOW + 1.0}
    return refusal(data, **(arguments | changed))


def delegation(**changed: Any) -> Certificate:
    fields: dict[str, Any] = {"roles": [Role.CONTRIBUTOR, Role.DELEGATE], "max_weight": 50.0}
    return RUN.certify(DELEGATE.peer_id, **(fields | changed))


def delegated(by: Certificate, **changed: Any) -> Certificate:
    fields: dict[str, Any] = {
        "peer_id": ALICE.peer_id,
        "sign": DELEGATE.sign,
        "issuer": by,
        "max_weight": 10.0,
    }
    return RUN.certify(**(fields | changed))


def test_a_genuine_certificate_is_read_back_and_admits_its_peer() -> None:
    certificate = RUN.certify(ALICE.peer_id, roles=[Role.SOURCE, Role.CONTRIBUTOR])
    assert read_certificate(certificate.data) == certificate
    assert refused(certificate) is None


def test_the_encoding_never_changes() -> None:
    data = Authority().certify(ALICE.peer_id).data
    assert (
        hashlib.sha256(data).hexdigest() == "9270d507082476e8892332a91396bbf3cd150811be8e48360c5c54c492a00428"
    )


def test_the_longest_delegated_certificate_is_within_the_limit() -> None:
    all_but_delegate = set(Role) - {Role.DELEGATE}
    certificate = delegated(delegation(roles=list(Role)), roles=all_but_delegate)
    assert len(certificate.data) <= MAX_CERTIFICATE_BYTES
    assert refused(certificate) is None


@pytest.mark.parametrize(
    ("data", "changed", "reason"),
    [
        (b"", {}, "it has shown no certificate of this run"),
        (b"\x00", {}, "not a certificate"),
        (RUN.certify(BOB.peer_id), {}, "its certificate is for another peer"),
        (Authority(b"b" * 32).certify(ALICE.peer_id), {}, "its certificate is of another run"),
        (RUN.certify(ALICE.peer_id, sign=BOB.sign), {}, "its certificate is forged"),
        (
            RUN.certify(ALICE.peer_id, expires=NOW + 1.0),
            {},
            "its certificate expired on 2027-01-15 08:00:01 UTC",
        ),
        (
            RUN.certify(ALICE.peer_id),
            {"now": NOW - CLOCK_SKEW_SECONDS - 1.0},
            "its certificate begins on 2027-01-15 08:00:00 UTC",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_peer_without_a_valid_certificate_hears_why(
    data: Certificate | bytes, changed: dict[str, Any], reason: str
) -> None:
    assert reason in (refused(data, **changed) or "")


def test_a_certificate_that_has_just_begun_counts_despite_the_clocks() -> None:
    certificate = RUN.certify(ALICE.peer_id)
    assert refused(certificate, now=NOW - CLOCK_SKEW_SECONDS + 1.0) is None


def test_a_revoked_certificate_is_refused() -> None:
    certificate = RUN.certify(ALICE.peer_id)
    assert refused(certificate, revoked={certificate.identifier}) == "its certificate was revoked"
    assert refused(certificate, revoked={bytes(16)}) is None


class TestDelegates:
    def test_a_delegate_admits_a_peer(self) -> None:
        assert refused(delegated(delegation())) is None

    def test_the_revocation_of_a_delegate_revokes_what_it_signed(self) -> None:
        by = delegation()
        assert refused(delegated(by), revoked={by.identifier}) == "its delegate's certificate was revoked"

    @pytest.mark.parametrize(
        ("by", "grants", "reason"),
        [
            (delegation(roles=[Role.CONTRIBUTOR]), {}, "its issuer is no delegate"),
            (delegation(), {"roles": [Role.SOURCE]}, "may not grant the role source"),
            (delegation(), {"roles": [Role.DELEGATE]}, "cannot make other peers delegates"),
            (delegation(), {"max_weight": 51.0}, "a max_weight of 50 at most"),
            (delegation(expires=NOW + 60.0), {}, "longer than its delegate's"),
            (delegation(not_before=NOW + 1.0), {}, "longer than its delegate's"),
        ],
    )
    def test_a_delegate_cannot_grant_more_than_it_has(
        self, by: Certificate, grants: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(MemberCertificateError, match=reason):
            delegated(by, **grants)
        forged = beyond_rights(by, **grants)
        assert refused(forged) is not None
        assert not is_genuine(forged)

    def test_a_delegate_that_a_stranger_made_admits_no_peer(self) -> None:
        by = delegation(sign=BOB.sign)
        assert refused(delegated(by)) == "its certificate is forged"

    def test_a_delegation_does_not_admit_with_another_peers_signature(self) -> None:
        assert refused(delegated(delegation(), sign=BOB.sign)) == "its certificate is forged"

    def test_a_chain_has_two_certificates_at_most(self) -> None:
        inner = delegated(delegation())
        with pytest.raises(MemberCertificateError, match="cannot make other peers delegates"):
            delegated(inner)


def beyond_rights(by: Certificate, **grants: Any) -> Certificate:
    """Return what a delegate could sign with a program of its own."""
    fields: dict[str, Any] = {
        "authority": RUN.public,
        "peer_id": ALICE.peer_id,
        "roles": frozenset([Role.CONTRIBUTOR]),
        "max_weight": 10.0,
        "not_before": NOW,
        "expires": NOW + 3600.0,
        "serial": bytes(16),
        "issuer": by,
    }
    fields |= grants
    fields["roles"] = frozenset(fields["roles"])
    unsigned = Certificate(**fields)
    return Certificate(**fields, signature=DELEGATE.sign(unsigned.statement))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"authority": bytes(31)}, "wrong length"),
        ({"serial": bytes(15)}, "wrong length"),
        ({"roles": []}, "without a role"),
        ({"max_weight": 0.0}, "a max_weight of 0"),
        ({"max_weight": 2 * MAX_WEIGHT}, "a max_weight of"),
        ({"expires": NOW}, "ends before it begins"),
        ({"expires": 1e12}, "after the year 9999"),
        ({"not_before": -1.0}, "ends before it begins"),
        ({"peer_id": "nobody"}, "for no peer id"),
    ],
)
def test_a_certificate_with_a_field_out_of_range_is_not_issued(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(MemberCertificateError, match=reason):
        RUN.certify(**({"peer_id": ALICE.peer_id} | changed))


@pytest.mark.parametrize(
    "data",
    [
        bytes(MAX_CERTIFICATE_BYTES + 1),
        pack(2, b"", bytes(64), b""),
        pack(1, b"", bytes(64), b""),
        pack(1, b"", bytes(63), b""),
        pack(1, pack(RUN.public, ALICE.peer_id, ("king",), 1.0, 0.0, 1.0, bytes(16)), bytes(64), b""),
        pack(
            1,
            pack(RUN.public, ALICE.peer_id, ("source", "observer"), 1.0, 0.0, 1.0, bytes(16)),
            bytes(64),
            b"",
        ),
        pack(1, pack(RUN.public, ALICE.peer_id, (5,), 1.0, 0.0, 1.0, bytes(16)), bytes(64), b""),
    ],
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MemberCertificateError):
        read_certificate(data)
    assert refused(data) is not None


GENUINE = delegated(delegation()).data


@given(st.integers(0, len(GENUINE) - 1), st.integers(1, 255))
def test_a_certificate_with_any_changed_byte_admits_no_peer(position: int, change: int) -> None:
    changed = bytearray(GENUINE)
    changed[position] ^= change
    assert refused(bytes(changed)) is not None


@given(st.binary(max_size=700))
def test_any_bytes_are_refused_without_another_exception(data: bytes) -> None:
    assert refused(data) is not None


class TestSerialsThatAnIssuerChose:
    """A delegate chooses the serials of the certificates that it signs, also those of other certificates."""

    def test_revoking_an_accomplice_shuts_out_no_peer_that_the_authority_admitted(self) -> None:
        honest = RUN.certify(BOB.peer_id)
        accomplice = delegated(delegation(), serial=honest.serial)
        assert refused(accomplice, revoked={accomplice.identifier}) == "its certificate was revoked"
        assert refused(honest, peer_id=BOB.peer_id, revoked={accomplice.identifier}) is None

    def test_no_serial_gives_one_peer_the_identifier_of_another(self) -> None:
        by = delegation()
        issuers: list[dict[str, Any]] = [{}, {"issuer": by, "sign": DELEGATE.sign}]
        found = {
            RUN.certify(peer.peer_id, max_weight=10.0, serial=bytes(16), **issuer).identifier
            for peer in (ALICE, BOB)
            for issuer in issuers
        }
        assert len(found) == 4

    def test_a_link_that_is_used_again_gives_no_way_around_a_revocation(self) -> None:
        """The delegate's own certificate was renewed meanwhile: the same token gives another certificate."""
        before, after = delegation(), delegation(expires=NOW + 7200.0)
        serial = b"t" * 16
        revoked = delegated(before, serial=serial)
        again = delegated(after, serial=serial, expires=NOW + 5000.0)
        assert again.data != revoked.data
        assert refused(again, revoked={revoked.identifier}) == "its certificate was revoked"


def test_a_certificate_of_a_certificate_is_not_followed_deeper() -> None:
    by = delegation()
    middle = beyond_rights(by, roles=[Role.CONTRIBUTOR, Role.DELEGATE])
    fields = {"sign": ALICE.sign, "issuer": middle, "roles": [Role.CONTRIBUTOR], "max_weight": 1.0}
    with pytest.raises(MemberCertificateError):
        RUN.certify(BOB.peer_id, **fields)
