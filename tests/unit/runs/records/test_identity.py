"""The key file: private from the start, never half written, and refused if other users can read it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from p2pavg.base.errors import IdentityError
from p2pavg.runs.records.identity import SEED_BYTES, load_or_make_seed
from p2pavg_dht import Ed25519Signer


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_without_a_file_every_identity_is_new() -> None:
    seeds = {load_or_make_seed(None) for _ in range(10)}
    assert len(seeds) == 10
    assert {len(seed) for seed in seeds} == {SEED_BYTES}


def test_a_missing_file_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "peer.key"
    before = os.umask(0o000)
    try:
        seed = load_or_make_seed(file)
    finally:
        os.umask(before)
    assert mode(file) == 0o600
    assert file.read_bytes() == seed
    assert os.listdir(tmp_path) == ["peer.key"], "a draft was left behind"


def test_key_file_is_private_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    link = os.link

    def watched(draft: Path, file: Path) -> None:
        seen.append((mode(draft), draft.stat().st_size))
        link(draft, file)

    monkeypatch.setattr(os, "link", watched)
    load_or_make_seed(tmp_path / "peer.key")
    assert seen == [(0o600, SEED_BYTES)]


def test_identity_is_the_same_at_every_start(tmp_path: Path) -> None:
    file = tmp_path / "peer.key"
    first = load_or_make_seed(file)
    written = file.stat().st_mtime_ns
    assert load_or_make_seed(str(file)) == first
    assert file.stat().st_mtime_ns == written


def test_a_file_of_its_owner_may_be_read_only(tmp_path: Path) -> None:
    file = tmp_path / "peer.key"
    seed = load_or_make_seed(file)
    file.chmod(0o400)
    assert load_or_make_seed(file) == seed


@pytest.mark.parametrize("others", [0o640, 0o602, 0o610])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, others: int) -> None:
    file = tmp_path / "peer.key"
    load_or_make_seed(file)
    file.chmod(others)
    with pytest.raises(
        IdentityError, match=rf"others can read the identity .*peer\.key \(mode {others:04o}\); chmod 600"
    ):
        load_or_make_seed(file)


@pytest.mark.parametrize("content", [b"", b"k" * 31, b"k" * 33, b"-----BEGIN PRIVATE KEY-----\n" * 3])
def test_a_file_of_another_size_is_no_key_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "peer.key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(
        IdentityError, match=r"peer\.key is not an identity: it does not have 32 bytes"
    ) as caught:
        load_or_make_seed(file)
    assert "restore it from a copy" in caught.value.remedy
    assert file.read_bytes() == content


@pytest.mark.parametrize(("path", "reason"), [("", "Is a directory"), ("file/peer.key", "Not a directory")])
def test_what_is_no_file_is_named(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IdentityError, match=f"cannot read the identity .*: {reason}"):
        load_or_make_seed(tmp_path / path)


def test_the_folder_is_made_for_its_owner_only(tmp_path: Path) -> None:
    """The first line of an operator's day is `p2pavg identity hub/identity.key`."""
    file = tmp_path / "missing" / "peer.key"
    assert load_or_make_seed(file) == load_or_make_seed(file)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "mounted read-only"),
        (errno.ENOSPC, "make room on the file system"),
        (errno.EACCES, "as the user that owns"),
        (errno.ENOMEM, "or name another path"),
    ],
)
def test_a_remedy_fits_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    """It never says "make the key file with `p2pavg identity FILE`": that is the command that failed."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(IdentityError, match=f"cannot make the identity .*: {os.strerror(number)}") as caught:
        load_or_make_seed(tmp_path / "peer.key")
    assert os.listdir(tmp_path) == [], "half a key was left behind"
    assert remedy in caught.value.remedy
    assert str(tmp_path / "peer.key") in caught.value.remedy
    assert "p2pavg identity" not in caught.value.remedy


def test_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "peer.key").symlink_to(tmp_path / "gone")
    with pytest.raises(IdentityError, match=r"cannot read the identity .*: No such file or directory"):
        load_or_make_seed(tmp_path / "peer.key")
    assert os.listdir(tmp_path) == ["peer.key"]


def test_second_creator_uses_the_first_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the same race with a fixed winner."""
    file = tmp_path / "peer.key"
    link = os.link

    def slower(draft: Path, target: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", link)
            first.append(load_or_make_seed(file))
        link(draft, target)

    first: list[bytes] = []
    monkeypatch.setattr(os, "link", slower)
    assert load_or_make_seed(file) == first[0] == file.read_bytes()


def test_the_file_holds_the_ed25519_seed(tmp_path: Path) -> None:
    """RFC 8032, section 7.1, test 1; the peer id is the base58 of the identity multihash of its public key."""
    file = tmp_path / "peer.key"
    file.write_bytes(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    file.chmod(0o600)
    assert (
        Ed25519Signer(load_or_make_seed(file)).peer_id
        == "12D3KooWQK1wnefoLrcVHbbnf5tLzbopUd3K3bFAoJpA7YJgL5pV"
    )
