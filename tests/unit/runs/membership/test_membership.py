"""The members of a run, as one of its peers sees it; and the encryption of its records."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.group.candidate import Candidate, sign_candidate
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.membership.membership import Membership, RunAccess
from p2pavg.runs.membership.revocation import revoke
from p2pavg.runs.membership.sealing import OVERHEAD_BYTES, seal, sealed_key, unseal
from tests.unit.runs.membership.runs import NOW, SECRET, Authority, signer

RUN = Authority()
ALICE, BOB = signer(1), signer(2)


def membership() -> Membership:
    return Membership(RUN.access(ALICE), ALICE.peer_id)


def candidate(certificate: bytes, **changed: Any) -> Candidate:
    fields: dict[str, Any] = {
        "key": bytes(32),
        "deadline": NOW + 30.0,
        "expiration_time": NOW + 3600.0,
        "weight": 1.0,
        "bandwidth": 100.0,
        "codec": "fp32",
        "auxiliary": False,
        "addresses": (),
        "certificate": certificate,
    }
    return sign_candidate(BOB, **(fields | changed))


@pytest.mark.parametrize(
    ("roles", "changed", "reason"),
    [
        ([Role.CONTRIBUTOR], {}, None),
        ([Role.CONTRIBUTOR], {"weight": 0.0}, None),
        ([Role.OBSERVER], {"weight": 0.0}, None),
        ([Role.AUXILIARY], {"weight": 0.0, "auxiliary": True}, None),
        ([Role.OBSERVER], {}, "its certificate grants observer and not contributor"),
        ([Role.AUXILIARY], {}, "its certificate grants auxiliary and not contributor"),
        (
            [Role.CONTRIBUTOR, Role.OBSERVER],
            {"weight": 0.0, "auxiliary": True},
            "its certificate grants contributor, observer and not auxiliary",
        ),
        ([Role.CONTRIBUTOR], {"weight": 101.0}, "its weight of 101 is above the 100"),
    ],
)
def test_a_candidate_takes_part_only_as_its_certificate_says(
    roles: list[Role], changed: dict[str, Any], reason: str | None
) -> None:
    found = membership().refuses(candidate(RUN.certify(BOB.peer_id, roles=roles).data, **changed), NOW + 1.0)
    assert (found is None) if reason is None else (reason in (found or ""))


def test_a_candidate_without_a_certificate_or_with_that_of_another_peer_is_refused() -> None:
    members = membership()
    assert "no certificate" in (members.refuses(candidate(b""), NOW) or "")
    stolen = candidate(RUN.certify(ALICE.peer_id).data)
    assert "for another peer" in (members.refuses(stolen, NOW) or "")


def test_only_a_source_contributes_where_parameters_are_given_to_all() -> None:
    members = Membership(dataclasses.replace(RUN.access(ALICE), contributing=Role.SOURCE), ALICE.peer_id)
    contributor = candidate(RUN.certify(BOB.peer_id).data)
    assert members.refuses(contributor, NOW) == "its certificate grants contributor and not source"
    source = candidate(RUN.certify(BOB.peer_id, roles=[Role.SOURCE]).data)
    assert members.refuses(source, NOW) is None
    assert members.refuses(candidate(RUN.certify(BOB.peer_id).data, weight=0.0), NOW) is None


def test_a_revocation_counts_from_the_moment_it_is_learned() -> None:
    members, certificate = membership(), RUN.certify(BOB.peer_id)
    assert members.refuses(candidate(certificate.data), NOW) is None
    newer = revoke(RUN.sign, authority=RUN.public, number=2, identifiers=[certificate.identifier])
    assert members.known.learn(newer)
    assert "revoked" in (members.refuses(candidate(certificate.data), NOW) or "")
    older = revoke(RUN.sign, authority=RUN.public, number=1, identifiers=[])
    assert not members.known.learn(older), "an old list does not bring a revoked peer back"
    assert "revoked" in (members.refuses(candidate(certificate.data), NOW) or "")


def test_a_peer_knows_when_its_own_certificate_no_longer_holds() -> None:
    members = membership()
    assert members.own_refusal(NOW) is None
    assert "expired" in (members.own_refusal(NOW + 3601.0) or "")


def test_a_certificate_for_another_identity_is_an_error_of_the_caller() -> None:
    with pytest.raises(ConfigError, match=f"certificate: it is for {ALICE.peer_id}, and this peer is"):
        Membership(RUN.access(ALICE), BOB.peer_id)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"authority": b"x"}, "authority must be 32 bytes"),
        ({"secret": "text"}, "secret must be 32 bytes"),
        ({"certificate": b"x"}, "certificate: not a certificate"),
        (
            {"certificate": Authority(b"b" * 32).certify(ALICE.peer_id).data},
            "certificate: it is of another run",
        ),
        ({"certificate": RUN.certify(ALICE.peer_id, sign=BOB.sign).data}, "certificate: its signature"),
    ],
)
def test_a_wrong_access_is_an_error_that_names_the_argument(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        dataclasses.replace(RUN.access(ALICE), **changed)


def test_secrets_are_not_in_the_text_of_an_access() -> None:
    access: RunAccess = RUN.access(ALICE)
    assert str(SECRET) not in repr(access)
    assert str(access.certificate) not in repr(access)


class TestSealing:
    KEY = bytes(31) + b"k"

    def test_a_value_is_read_back_by_whoever_knows_the_secret(self) -> None:
        sealed = seal(SECRET, self.KEY, ALICE.peer_id, b"value", bytes(12))
        assert len(sealed) == len(b"value") + OVERHEAD_BYTES
        assert unseal(SECRET, self.KEY, ALICE.peer_id, sealed) == b"value"

    @pytest.mark.parametrize("part", ["secret", "key", "publisher", "value"])
    def test_a_value_is_refused_when_anything_about_it_has_changed(self, part: str) -> None:
        sealed = seal(SECRET, self.KEY, ALICE.peer_id, b"value", bytes(12))
        given = {"secret": SECRET, "key": self.KEY, "publisher": ALICE.peer_id, "value": sealed}
        other = {"secret": bytes(32), "key": bytes(32), "publisher": BOB.peer_id, "value": sealed[:-1] + b"x"}
        arguments = given | {part: other[part]}
        with pytest.raises(RemoteProtocolError, match="not encrypted to this run"):
            unseal(*arguments.values())  # type: ignore[arg-type]

    def test_a_short_value_is_refused(self) -> None:
        with pytest.raises(RemoteProtocolError, match="too short"):
            unseal(SECRET, self.KEY, ALICE.peer_id, bytes(OVERHEAD_BYTES - 1))

    def test_the_key_and_the_encryption_never_change(self) -> None:
        assert (
            sealed_key(SECRET, self.KEY).hex()
            == "65669940c548e3db32c06a96979dcca859ab09358ea834c51a16ae3eba500873"
        )
        assert (
            seal(SECRET, self.KEY, ALICE.peer_id, b"value", bytes(12)).hex()
            == "0000000000000000000000000b882a9fece40b4a53c10515c42c3ebce7b4d65544"
        )
