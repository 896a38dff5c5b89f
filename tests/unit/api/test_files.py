"""Files that have their whole content or do not exist."""

from __future__ import annotations

import errno
import os
import stat
import tracemalloc
from pathlib import Path

import pytest

from p2pavg.base.errors import StateError
from p2pavg.base.files import PRIVATE, PUBLIC, create_file, creating, naming_errors, replace_file, replacing


@pytest.mark.parametrize("mode", [PRIVATE, PUBLIC])
def test_a_file_is_created_with_its_mode(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o022)
    try:
        create_file(tmp_path / "new", b"data", mode=mode)
        replace_file(tmp_path / "other", b"data", mode=mode)
    finally:
        os.umask(before)
    for name in ("new", "other"):
        assert (tmp_path / name).read_bytes() == b"data"
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    assert sorted(os.listdir(tmp_path)) == ["new", "other"], "a draft was left behind"


def test_a_file_is_never_created_over_another_one(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "old", b"new", mode=PRIVATE)
    assert (tmp_path / "old").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old"], "a draft was left behind"


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "old", b"new", mode=PRIVATE)
    assert (tmp_path / "old").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old"], "a draft was left behind"


def test_a_block_that_raises_changes_no_file(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    for opening, name in ((replacing, "old"), (creating, "new")):
        with pytest.raises(KeyError), opening(tmp_path / name, mode=PRIVATE) as opened:  # noqa: PT012
            opened.write(b"half")
            raise KeyError
    assert (tmp_path / "old").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old"], "a draft was left behind"


def test_what_is_written_is_not_copied(tmp_path: Path) -> None:
    data = memoryview(bytes(2**24))
    tracemalloc.start()
    try:
        replace_file(tmp_path / "large", data, mode=PRIVATE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert (tmp_path / "large").read_bytes() == data


def test_an_error_names_the_file_that_is_in_the_way_and_no_draft(tmp_path: Path) -> None:
    inner = str(tmp_path / "folder" / "file")
    for named, other, subject in ((inner, f" ({inner})", inner), (".x.1.0123abcd", "", str(tmp_path))):
        with pytest.raises(StateError) as found, naming_errors("cannot", tmp_path, StateError):
            raise OSError(errno.EIO, "I/O error", named)
        assert str(found.value) == f"cannot: I/O error{other}"
        assert found.value.remedy == f"check the disk of {subject}: it reports errors"
