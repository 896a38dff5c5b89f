"""Releases of jobs: only those that the authority has signed are read."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from p2pavg.base.errors import ConfigError
from p2pavg.runs.membership.job_release import JobRelease, read_release, sign_release
from p2pavg.runs.membership.run_file import RunFile, parse_run_file

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
AUTHORITY = KEY.public_key().public_bytes_raw()
OTHER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)


def release(key: Ed25519PrivateKey = KEY, authority: bytes = AUTHORITY) -> JobRelease:
    return sign_release(key.sign, authority=authority, number=1, root=b"r" * 32, size=1000)


def test_a_run_file_brings_its_release_back() -> None:
    run = RunFile(run_id="lab", authority=AUTHORITY, secret=b"s" * 32, job=release().text)
    assert parse_run_file(run.text).release == release()
    assert parse_run_file(RunFile(run_id="lab", authority=AUTHORITY, secret=b"s" * 32).text).release is None


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "",
        base64.b64encode(b"\x90").decode(),
        release(OTHER).text,
        release(OTHER, OTHER.public_key().public_bytes_raw()).text,
        replace(release(), root=b"x" * 32).text,
        replace(release(), size=999).text,
        replace(release(), number=2).text,
        replace(release(), signature=b"").text,
        release().text + "AAAA",
    ],
)
def test_only_what_the_authority_has_signed_is_read(text: str) -> None:
    with pytest.raises(ConfigError, match="job is"):
        read_release(text, AUTHORITY)
    if text:
        with pytest.raises(ConfigError, match="job"):
            RunFile(run_id="lab", authority=AUTHORITY, secret=b"s" * 32, job=text)


def test_the_bytes_of_a_release_stay_the_same() -> None:
    assert release().statement.hex() == (
        "7032706176672d6a6f622f31009601c420" + AUTHORITY.hex() + "01c420" + (b"r" * 32).hex() + "cd03e8c400"
    )
