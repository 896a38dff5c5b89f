"""Checkpoint files: how they are written, verified, read and removed."""

from __future__ import annotations

import gc
import logging
import os
import re
import resource
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import ConfigError, StateError
from p2pavg.base.files import PUBLIC, replacing
from p2pavg.state.checkpoint import CheckpointFolder, read, write_checkpoint
from p2pavg.state.snapshot import Content, copy_of
from p2pavg.state.tree import CHUNK_BYTES
from tests.unit.state import contents
from tests.unit.state.contents import of_every_dtype, same_content, same_tensor

COMMON = Content(of_every_dtype() | {"parameter/w": torch.arange(5.0)}, {"lineage": b"\x01" * 32})
OWN = Content({"inner/m": torch.ones(2, 3).T, "none": torch.empty(0)}, {"extras": {"position": (3, 0.5)}})


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def file(epoch: int) -> str:
    return f"update-{epoch:012}.safetensors"


def numbered(number: int) -> Content:
    return Content({"parameter/w": torch.full((3,), float(number))})


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Make the system refuse to write longer files, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestReading:
    def test_a_checkpoint_comes_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "time", lambda: 1234.5)
        path = CheckpointFolder(tmp_path, 1).write(123, COMMON, OWN)
        assert path == tmp_path / "update-000000000123.safetensors"
        back = read(path)
        assert (back.epoch, back.written, back.size) == (123, 1234.5, path.stat().st_size)
        assert same_content(back.common, COMMON)
        assert same_content(back.own, OWN)
        assert read(path, verified=True).root == back.root

    @given(contents.contents, contents.contents)
    def test_any_content_comes_back(
        self, tmp_path_factory: pytest.TempPathFactory, common: Content, own: Content
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "any.safetensors"
        write_checkpoint(path, 0, common, own)
        back = read(path)
        assert same_content(back.common, common)
        assert same_content(back.own, own)

    def test_the_library_reads_it(self, tmp_path: Path) -> None:
        path = CheckpointFolder(tmp_path, 1).write(1, COMMON, OWN)
        loaded = safetensors.torch.load_file(path)
        assert loaded.keys() == {f"common/{name}" for name in COMMON.tensors} | {"own/inner/m", "own/none"}
        assert same_tensor(loaded["own/inner/m"], OWN.tensors["inner/m"])

    def test_writing_to_a_tensor_does_not_change_the_file(self, tmp_path: Path) -> None:
        path = CheckpointFolder(tmp_path, 1).write(1, COMMON, OWN)
        read(path).common.tensors["parameter/w"].zero_()
        read(path)
        assert same_content(read(path).common, COMMON)

    def test_a_checkpoint_that_was_removed_can_still_be_read(self, tmp_path: Path) -> None:
        path = CheckpointFolder(tmp_path, 1).write(1, COMMON, OWN)
        opened = read(path)
        path.unlink()
        gc.collect()
        assert same_content(opened.common, COMMON)

    def test_reading_and_writing_copy_no_tensor(self, tmp_path: Path) -> None:
        content = Content({str(number): torch.ones(2**21) for number in range(4)})
        tracemalloc.start()
        try:
            path = CheckpointFolder(tmp_path, 1).write(1, content, OWN)
            back = read(path)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 3 * CHUNK_BYTES
        assert same_content(back.common, content)


class TestDamage:
    @pytest.mark.parametrize("position", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES, -1])
    def test_a_flipped_byte_of_a_large_file_is_found(self, tmp_path: Path, position: int) -> None:
        content = Content({"w": torch.zeros(4 * CHUNK_BYTES + 5, dtype=torch.uint8)})
        path = CheckpointFolder(tmp_path, 1).write(1, content, OWN)
        read(path)
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        with pytest.raises(StateError, match="is damaged"):
            read(path)

    @given(st.integers(0, 2000), st.binary(max_size=3), st.integers(0, 40))
    def test_a_changed_file_is_refused(
        self, tmp_path_factory: pytest.TempPathFactory, position: int, new: bytes, cut: int
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "changed.safetensors"
        write_checkpoint(path, 7, numbered(1), OWN)
        good = path.read_bytes()
        changed = good[:position] + new + good[position + cut :]
        path.write_bytes(changed)
        if changed == good:
            read(path)
        else:
            for verified in (True, False):
                try:
                    read(path, verified=verified)
                except StateError:
                    continue
                assert verified

    @pytest.mark.parametrize("data", [b"", b"x", bytes(5000), bytes(copy_of(COMMON))])
    def test_other_files_are_refused(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "other").write_bytes(data)
        for verified in (True, False):
            with pytest.raises(StateError, match="other is damaged or no checkpoint"):
                read(tmp_path / "other", verified=verified)

    def test_a_root_in_another_place_or_other_digits_is_refused(self, tmp_path: Path) -> None:
        path = CheckpointFolder(tmp_path, 1).write(1, numbered(1), OWN)
        good = path.read_bytes()
        swapped = re.sub(rb'("p2pavg-c[^,]*"),("p2pavg-v[^}]*)', rb"\2,\1", good)
        capitals = re.sub(rb'(?<=:")[0-9a-f]{64}', lambda found: found[0].upper(), good)
        for data, reason in ((swapped, "its metadata are not those"), (capitals, "its root is not 64 hexa")):
            assert data != good
            path.write_bytes(data)
            with pytest.raises(StateError, match=reason):
                read(path, verified=True)

    def test_files_that_cannot_be_read_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(StateError, match=r"cannot read the checkpoint .*missing: No such file"):
            read(tmp_path / "missing")
        with pytest.raises(StateError, match="Is a directory"):
            read(tmp_path)

    def test_the_newest_file_that_is_not_damaged_is_taken(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = CheckpointFolder(tmp_path, 3)
        assert folder.newest() is None
        for epoch in (1, 2, 3):
            folder.write(epoch, numbered(epoch), OWN)
        assert folder.newest() == tmp_path / file(3)
        assert not caplog.records
        (tmp_path / file(3)).write_bytes((tmp_path / file(3)).read_bytes()[:-1])
        with caplog.at_level(logging.WARNING):
            assert CheckpointFolder(tmp_path, 3).newest() == tmp_path / file(2)
        [record] = caplog.records
        assert file(3) in record.getMessage()
        assert names(tmp_path) == [file(1), file(2), file(3)]


class TestFolder:
    def test_the_oldest_files_are_removed(self, tmp_path: Path) -> None:
        folder = CheckpointFolder(tmp_path / "new" / "folder", 2)
        for epoch in (5, 10, 999, 1000):
            folder.write(epoch, numbered(epoch), OWN)
        assert names(tmp_path / "new" / "folder") == [file(999), file(1000)]

    def test_files_of_other_names_are_left_alone(self, tmp_path: Path) -> None:
        others = [
            "model.safetensors",
            "update-1.safetensors",
            "update-000000000001.safetensors.bak",
            ".hidden.1.00",
        ]
        for name in others:
            (tmp_path / name).write_bytes(b"")
        folder = CheckpointFolder(tmp_path, 1)
        for epoch in (1, 2):
            folder.write(epoch, numbered(epoch), OWN)
        assert names(tmp_path) == sorted([*others, file(2)])

    def test_the_new_file_stays_when_it_is_of_an_earlier_update(self, tmp_path: Path) -> None:
        folder = CheckpointFolder(tmp_path, 2)
        for epoch in (100, 200, 50):
            folder.write(epoch, numbered(epoch), OWN)
        assert names(tmp_path) == [file(50), file(200)]

    def test_a_damaged_file_is_never_removed_and_takes_no_other_files_place(self, tmp_path: Path) -> None:
        (tmp_path / file(2)).write_bytes(b"damaged")
        folder = CheckpointFolder(tmp_path, 2)
        assert folder.newest() is None
        for epoch in (3, 4, 5):
            folder.write(epoch, numbered(epoch), OWN)
        assert names(tmp_path) == [file(2), file(4), file(5)]

    def test_a_full_disk_costs_no_earlier_file(self, tmp_path: Path) -> None:
        folder = CheckpointFolder(tmp_path, 1)
        folder.write(1, numbered(1), OWN)
        with (
            file_size_limit(2**16),
            pytest.raises(StateError, match=r"cannot write the checkpoint .*too large; the earl"),
        ):
            folder.write(2, Content({"w": torch.ones(2**16)}), OWN)
        assert names(tmp_path) == [file(1)]
        assert folder.newest() == tmp_path / file(1)

    def test_an_old_file_stays_until_the_new_one_is_safe(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = CheckpointFolder(tmp_path, 1)
        folder.write(1, numbered(1), OWN)

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StateError, match="No space left on device; the earlier checkpoints stay"):
            folder.write(2, numbered(2), OWN)
        assert names(tmp_path) == [file(1)]

    def test_what_cannot_be_saved_leaves_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(StateError, match="'own/z' is complex64"):
            CheckpointFolder(tmp_path, 1).write(
                1, COMMON, Content({"z": torch.ones(1, dtype=torch.complex64)})
            )
        assert names(tmp_path) == []

    def test_drafts_of_a_killed_process_are_removed(self, tmp_path: Path) -> None:
        with suppress(KeyboardInterrupt), replacing(tmp_path / file(7), mode=PUBLIC) as opened:
            opened.write(b"half")
            opened.flush()
            [draft] = names(tmp_path)
            raise KeyboardInterrupt
        assert names(tmp_path) == []
        (tmp_path / draft).write_bytes(b"half")  # a process that is killed cannot remove it
        (tmp_path / ".other.1.00000000").write_bytes(b"")
        CheckpointFolder(tmp_path, 1)
        assert names(tmp_path) == [".other.1.00000000"]

    def test_a_draft_that_is_being_written_stays(self, tmp_path: Path) -> None:
        with replacing(tmp_path / file(7), mode=PUBLIC) as opened:
            CheckpointFolder(tmp_path, 1)
            opened.write(b"x")
        assert names(tmp_path) == [file(7)]

    @pytest.mark.parametrize("keep", [0, -1, True, 2.0])
    def test_keep_is_checked(self, tmp_path: Path, keep: int) -> None:
        with pytest.raises(ConfigError, match="keep must be a whole number of at least 1"):
            CheckpointFolder(tmp_path, keep)

    def test_a_directory_that_cannot_be_used_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "taken").write_bytes(b"")
        with pytest.raises(StateError, match=r"cannot keep checkpoints in .*taken: File exists"):
            CheckpointFolder(tmp_path / "taken", 1)
