"""Releases of jobs: only those that the authority has signed are read."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from p2pavg.base.errors import ConfigError
from p2pavg.base.messages import pack
from p2pavg.runs.membership.job_release import (
    JobRelease,
    SeenProgress,
    read_release,
    release_to_start,
    sign_release,
)
from p2pavg.runs.membership.run_file import RunFile, parse_run_file

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
AUTHORITY = KEY.public_key().public_bytes_raw()
OTHER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)


def release(key: Ed25519PrivateKey = KEY, authority: bytes = AUTHORITY) -> JobRelease:
    return sign_release(key.sign, authority=authority, run_id="lab", number=1, root=b"r" * 32, size=1000)


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
        replace(release(), since=7).text,
        sign_release(KEY.sign, authority=AUTHORITY, run_id="other", number=1, root=b"r" * 32, size=1000).text,
        replace(release(), signature=b"").text,
        release().text + "AAAA",
    ],
)
def test_only_what_the_authority_has_signed_is_read(text: str) -> None:
    with pytest.raises(ConfigError, match="job is"):
        read_release(text, AUTHORITY, "lab")
    if text:
        with pytest.raises(ConfigError, match="job"):
            RunFile(run_id="lab", authority=AUTHORITY, secret=b"s" * 32, job=text)


def test_the_bytes_of_a_release_stay_the_same() -> None:
    unsigned = replace(release(), signature=b"")
    assert (
        unsigned.encode().hex()
        == "9701c420" + AUTHORITY.hex() + "01c420" + (b"r" * 32).hex() + "cd03e800c400"
    )
    assert release().statement("lab") == pack("p2pavg-job/1", "lab", unsigned.encode())


@pytest.mark.parametrize(
    ("version", "epoch", "starts"),
    [
        (1, 99, 1),  # the run has not changed yet
        (1, 100, 2),  # its members change now
        (2, 100, 2),
        (2, 3, 2),  # of a few peers that began with it
        (0, 0, 2),  # no one trains: all begin with the newest
        (7, 5, 2),
    ],
)
def test_a_peer_begins_with_the_version_with_which_the_run_trains(
    version: int, epoch: int, starts: int
) -> None:
    first = release()
    second = replace(first, number=2, since=100)
    assert release_to_start(second, first, SeenProgress(version, epoch)).number == starts
