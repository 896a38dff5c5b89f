"""Pieces land in memory or in a file, and a download survives a crash at any point."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg.base.errors import StateError
from p2pavg.state.joiner.sink import SUFFIX, FileSink, MemorySink
from tests.unit.state.blobs import Blob

BLOB = Blob(0, 20, 5_000, 123)
OTHER = Blob(1, 20, 5_000, 123)


def open_sink(folder: Path, blob: Blob = BLOB) -> FileSink:
    return FileSink(folder / "blob", blob.sizes, blob.digests)


def put_all(sink: FileSink | MemorySink, indices: list[int], blob: Blob = BLOB) -> None:
    for index in indices:
        sink.put(index, blob.pieces[index])


def shuffled(seed: int = 0) -> list[int]:
    order = [*range(len(BLOB.pieces))]
    random.Random(seed).shuffle(order)
    return order


def test_memory_holds_the_pieces_in_their_places() -> None:
    sink = MemorySink(BLOB.sizes)
    put_all(sink, shuffled())
    assert sink.take() == BLOB.data
    assert sink.take().readonly


def test_a_file_holds_the_pieces_in_their_places(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    assert sink.claimed == []
    put_all(sink, shuffled())
    data = sink.take()
    sink.close()
    sink.remove()
    assert data == BLOB.data, "the map outlives the file"
    assert data.readonly
    assert [*tmp_path.iterdir()] == []


def test_several_threads_put_pieces_at_once(tmp_path: Path) -> None:
    sink, order = open_sink(tmp_path), shuffled()
    threads = [threading.Thread(target=put_all, args=(sink, order[start::4])) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    again = open_sink(tmp_path)
    assert again.verify(again.claimed) == [*range(20)]
    assert again.take() == BLOB.data
    again.close()


@pytest.mark.parametrize("count", [0, 1, 9, 20])
def test_a_download_goes_on_after_a_crash(tmp_path: Path, count: int) -> None:
    """A process that is killed closes nothing."""
    order = shuffled()
    put_all(open_sink(tmp_path), order[:count])
    again = open_sink(tmp_path)
    assert again.verify(again.claimed) == sorted(order[:count])
    put_all(again, order[count:])
    assert again.take() == BLOB.data
    again.close()


def test_a_piece_whose_bit_was_written_before_its_data_is_fetched_again(tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    put_all(sink, [3, 4])
    sink.close()
    path = tmp_path / "blob"
    data = bytearray(path.read_bytes())
    data[3 * 5_000 + 17] ^= 1
    path.write_bytes(data)
    again = open_sink(tmp_path)
    assert again.claimed == [3, 4]
    assert again.verify(again.claimed) == [4]
    assert again.claimed == [4], "the bit is gone"
    again.close()
    last = open_sink(tmp_path)
    assert last.claimed == [4]
    last.close()


@given(cut_data=st.integers(0, 100_000), cut_bits=st.integers(0, 60), flip=st.integers(0, 1 << 20))
@settings(max_examples=100)
def test_damage_of_either_file_costs_pieces_and_never_makes_a_wrong_blob(
    tmp_path_factory: pytest.TempPathFactory, cut_data: int, cut_bits: int, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    sink = open_sink(folder)
    put_all(sink, [*range(20)])
    sink.close()
    for path, cut in ((folder / "blob", cut_data), (folder / f"blob{SUFFIX}", cut_bits)):
        content = bytearray(path.read_bytes())
        content[flip % len(content)] ^= 1 << flip % 8
        path.write_bytes(content[:cut])
    again = open_sink(folder)
    right = again.verify(again.claimed)
    put_all(again, [index for index in range(20) if index not in right])
    assert again.take() == BLOB.data
    again.close()


def test_leftovers_of_another_blob_are_replaced(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, OTHER)
    put_all(sink, [*range(20)], OTHER)
    sink.close()
    again = open_sink(tmp_path)
    assert again.claimed == []
    put_all(again, shuffled())
    assert again.take() == BLOB.data
    again.close()


def test_a_larger_file_of_another_program_is_cut(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"x" * 1_000_000)
    sink = open_sink(tmp_path)
    put_all(sink, shuffled())
    assert sink.take() == BLOB.data
    sink.close()


def test_a_full_disk_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StateError, match=f"the disk of {tmp_path / 'blob'} is full"):
        open_sink(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = open_sink(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StateError, match="is full"):
        sink.put(0, BLOB.pieces[0])
    monkeypatch.undo()
    assert sink.claimed == []
    sink.close()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"missing/blob: No such file or directory"):
        FileSink(tmp_path / "missing" / "blob", BLOB.sizes, BLOB.digests)


def test_a_blob_without_pieces(tmp_path: Path) -> None:
    for sink in (MemorySink([]), FileSink(tmp_path / "blob", [], [])):
        assert bytes(sink.take()) == b""
        sink.close()


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, real = open_sink(tmp_path), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, bytes(data[:700]), offset))
    put_all(sink, shuffled())
    assert sink.take() == BLOB.data
    sink.close()
