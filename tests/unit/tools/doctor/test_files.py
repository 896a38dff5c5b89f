"""Key file, run file and certificate: the level and the cause for each state of them."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pavg.base.limits import CLOCK_SKEW_SECONDS
from p2pavg.runs.membership.certificate import Certificate, Role, issue
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.tools.doctor.findings import Finding, Level
from p2pavg.tools.doctor.rules.files import (
    EXPIRES_SOON_SECONDS,
    KeyFile,
    NamedCertificate,
    judge_certificate,
    judge_key_file,
    judge_run_file,
)
from p2pavg_dht import Ed25519Signer

KEY = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
AUTHORITY = KEY.public_key().public_bytes_raw()
OTHER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
DELEGATE = Ed25519Signer(b"d" * 32)
PEER = Ed25519Signer(b"p" * 32).peer_id
STRANGER = Ed25519Signer(b"s" * 32).peer_id
NOW = 1_800_000_000.0
DAY = 86400.0
RUN = RunFile(run_id="lab", authority=AUTHORITY, secret=bytes(32))


def signed(sign: Any = KEY.sign, **changes: Any) -> Certificate:
    fields: dict[str, Any] = {
        "authority": AUTHORITY,
        "peer_id": PEER,
        "roles": [Role.CONTRIBUTOR],
        "max_weight": 1.0,
        "not_before": NOW - DAY,
        "expires": NOW + 30 * DAY,
        "serial": secrets.token_bytes(16),
    }
    return issue(sign, **(fields | changes))


def judged(
    certificate: Certificate, *, key: str | None = PEER, revoked: set[bytes] | None = None, now: float = NOW
) -> Finding:
    shown = NamedCertificate(path="peer.cert", certificate=certificate)
    return judge_certificate(shown, RUN, key, now, set() if revoked is None else revoked)[0]


class TestKeyFile:
    @pytest.mark.parametrize(
        ("found", "cause"),
        [
            (KeyFile(path="k", error="Permission denied"), "Permission denied"),
            (KeyFile(path="k", mode=0o640, peer_id=PEER), "its mode is 0640"),
            (KeyFile(path="k", size=0), "it has 0 bytes, and a key has 32"),
            (KeyFile(path="k", size=33), "it has more than 32 bytes"),
        ],
    )
    def test_faults(self, found: KeyFile, cause: str) -> None:
        (finding,) = judge_key_file(found, needed=False)
        assert finding.level is Level.FAULT
        assert cause in finding.cause

    def test_a_missing_key_is_a_fault_only_beside_a_certificate(self) -> None:
        missing = KeyFile(path="k", missing=True)
        for found in (missing, None):
            assert [each.level for each in judge_key_file(found, needed=False)] == [Level.NOTE]
            assert [each.level for each in judge_key_file(found, needed=True)] == [Level.FAULT]

    def test_a_key(self) -> None:
        (finding,) = judge_key_file(KeyFile(path="k", peer_id=PEER), needed=True)
        assert (finding.level, finding.what) == (Level.OK, f"k: {PEER}")


class TestRunFile:
    def test_states(self) -> None:
        assert judge_run_file(None, "") == []
        assert [each.level for each in judge_run_file(None, "it is not TOML")] == [Level.FAULT]
        assert [each.level for each in judge_run_file(RUN, "")] == [Level.NOTE]  # it has no address


class TestCertificate:
    def test_a_valid_one(self) -> None:
        assert judged(signed()).level is Level.OK

    def test_one_that_expires_soon(self) -> None:
        assert judged(signed(expires=NOW + EXPIRES_SOON_SECONDS)).level is Level.OK
        found = judged(signed(expires=NOW + EXPIRES_SOON_SECONDS - 1.0))
        assert (found.level, found.what) == (Level.WARNING, "it expires in 72 hours")

    def test_expired(self) -> None:
        found = judged(signed(expires=NOW))
        assert (found.level, found.what) == (Level.FAULT, "it has expired")
        assert found.cause == "it was valid until 2027-01-15 08:00:00 UTC"

    def test_not_yet_valid(self) -> None:
        begins = NOW + CLOCK_SKEW_SECONDS
        assert judged(signed(not_before=begins)).level is Level.OK
        found = judged(signed(not_before=begins + 1.0))
        assert (found.level, found.what) == (Level.FAULT, "it is not valid yet")

    def test_for_another_peer(self) -> None:
        found = judged(signed(peer_id=STRANGER))
        assert found.what == "it is for another peer"
        assert STRANGER in found.cause
        assert PEER in found.cause

    def test_without_a_key_the_peer_is_not_compared(self) -> None:
        shown = NamedCertificate(path="c", certificate=signed(peer_id=STRANGER))
        found = judge_certificate(shown, RUN, None, NOW, None)
        assert [each.level for each in found] == [Level.OK, Level.NOTE, Level.NOTE]

    def test_of_another_run(self) -> None:
        other = OTHER.public_key().public_bytes_raw()
        assert judged(signed(OTHER.sign, authority=other)).what == "it is of another run"

    def test_forged(self) -> None:
        assert judged(signed(OTHER.sign)).what == "it is forged"

    def test_revoked(self) -> None:
        certificate = signed()
        found = judged(certificate, revoked={certificate.identifier})
        assert (found.level, found.what) == (Level.FAULT, "it was revoked")

    def test_delegate_revoked(self) -> None:
        issuer = signed(peer_id=DELEGATE.peer_id, roles=[Role.DELEGATE, Role.CONTRIBUTOR])
        certificate = signed(DELEGATE.sign, issuer=issuer)
        assert judged(certificate).level is Level.OK
        found = judged(certificate, revoked={issuer.identifier})
        assert found.what == "the certificate of its delegate was revoked"

    def test_none_and_an_unreadable_one(self) -> None:
        assert judge_certificate(None, None, PEER, NOW, None) == []
        (found,) = judge_certificate(None, RUN, PEER, NOW, None)
        assert found.what == "no certificate was named"
        (found,) = judge_certificate(
            NamedCertificate(path="c", error="it is no base64"), RUN, PEER, NOW, None
        )
        assert (found.level, found.cause) == (Level.FAULT, "it is no base64")
