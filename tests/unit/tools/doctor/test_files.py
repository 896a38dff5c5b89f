"""Key file, run file and certificate: the level and the cause for each state of them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pavg.base.limits import CLOCK_SKEW_SECONDS
from p2pavg.runs.membership.certificate import EXPIRES_SOON_SECONDS, Certificate, Role, issue
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.tools.doctor.findings import Finding, Level
from p2pavg.tools.doctor.probes import files
from p2pavg.tools.doctor.rules.files import (
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
        ("content", "mode", "cause"),
        [
            (None, 0o700, "Is a directory"),
            (bytes(32), 0o640, "its mode is 0640"),
            (b"not a key", 0o600, "it has 9 bytes, and a key has 32"),
            (bytes(40), 0o600, "it has more than 32 bytes"),
        ],
    )
    def test_faults(self, tmp_path: Path, content: bytes | None, mode: int, cause: str) -> None:
        path = tmp_path / "k"
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
        path.chmod(mode)
        (finding,) = judge_key_file(files.key_file(path), needed=False)
        assert finding.level is Level.FAULT
        assert cause in finding.cause
        assert mode != 0o640 or finding.remedy == f"chmod 600 {path}"

    def test_a_missing_key_is_a_fault_only_beside_a_certificate(self, tmp_path: Path) -> None:
        for found in (files.key_file(tmp_path / "k"), None):
            assert [each.level for each in judge_key_file(found, needed=False)] == [Level.NOTE]
            assert [each.level for each in judge_key_file(found, needed=True)] == [Level.FAULT]
        assert list(tmp_path.iterdir()) == [], "it is not made"

    def test_a_key(self, tmp_path: Path) -> None:
        path = tmp_path / "k"
        path.write_bytes(b"p" * 32)
        path.chmod(0o600)
        (finding,) = judge_key_file(files.key_file(path), needed=True)
        assert (finding.level, finding.what) == (Level.OK, f"{path}: {PEER}")


def test_a_run_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.run"
    assert judge_run_file(*files.run_file(None)) == []
    path.write_text("version = 1\n")
    (fault,) = judge_run_file(*files.run_file(path))
    assert fault.level is Level.FAULT
    assert "run_id is missing" in fault.cause
    path.write_text(RUN.text)
    path.chmod(0o600)
    (note,) = judge_run_file(*files.run_file(path))
    assert (note.level, note.cause) == (Level.NOTE, "it names no bootstrap address; add --bootstrap ADDR")


class TestCertificate:
    @pytest.mark.parametrize(
        ("changes", "level", "what"),
        [
            ({}, Level.OK, "contributor, valid until"),
            ({"expires": NOW + EXPIRES_SOON_SECONDS}, Level.OK, "contributor, valid until"),
            ({"expires": NOW + EXPIRES_SOON_SECONDS - 1.0}, Level.WARNING, "it expires in 168 hours"),
            ({"expires": NOW}, Level.FAULT, "it has expired"),
            ({"not_before": NOW + CLOCK_SKEW_SECONDS}, Level.OK, "contributor, valid until"),
            ({"not_before": NOW + CLOCK_SKEW_SECONDS + 1.0}, Level.FAULT, "it is not valid yet"),
            ({"peer_id": STRANGER}, Level.FAULT, "it is for another peer"),
            (
                {"sign": OTHER.sign, "authority": OTHER.public_key().public_bytes_raw()},
                Level.FAULT,
                "it is of another run",
            ),
            ({"sign": OTHER.sign}, Level.FAULT, "it is forged"),
        ],
        ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
    )
    def test_what_members_think_of_it(self, changes: dict[str, Any], level: Level, what: str) -> None:
        found = judged(signed(**changes))
        assert found.level is level
        assert found.what.startswith(what)
        if "peer_id" in changes:
            assert STRANGER in found.cause
            assert PEER in found.cause
        if changes.get("expires") == NOW:
            assert found.cause == "it was valid until 2027-01-15 08:00:00 UTC"

    def test_without_a_key_the_peer_is_not_compared(self) -> None:
        shown = NamedCertificate(path="c", certificate=signed(peer_id=STRANGER))
        found = judge_certificate(shown, RUN, None, NOW, None)
        assert [each.level for each in found] == [Level.OK, Level.NOTE, Level.NOTE]

    def test_revoked(self) -> None:
        issuer = signed(peer_id=DELEGATE.peer_id, roles=[Role.DELEGATE, Role.CONTRIBUTOR])
        certificate = signed(DELEGATE.sign, issuer=issuer)
        assert judged(certificate).level is Level.OK
        for identifier, whose in (
            (certificate.identifier, "it"),
            (issuer.identifier, "the certificate of its delegate"),
        ):
            found = judged(certificate, revoked={identifier})
            assert (found.level, found.what) == (Level.FAULT, f"{whose} was revoked")

    def test_none_and_an_unreadable_one(self, tmp_path: Path) -> None:
        assert judge_certificate(None, None, PEER, NOW, None) == []
        (found,) = judge_certificate(files.certificate(None), RUN, PEER, NOW, None)
        assert found.what == "no certificate was named"
        (tmp_path / "c").write_text("# nothing")
        (found,) = judge_certificate(files.certificate(tmp_path / "c"), RUN, PEER, NOW, None)
        assert found.level is Level.FAULT
        assert "it has no line of base64" in found.cause
