"""Files in memory that carry states between a peer and its processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from p2pavg.attached.blobs import (
    FileInMemory,
    ReceivedFile,
    mapped_sealed,
    sealed_file,
    vector_file,
    vector_of,
)
from p2pavg.base.errors import RemoteProtocolError


def test_a_sealed_file_has_its_content_and_cannot_be_changed() -> None:
    descriptor = sealed_file(b"state")
    try:
        assert bytes(mapped_sealed(descriptor, 5)) == b"state"
        with pytest.raises(PermissionError):
            os.write(descriptor, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 1)
    finally:
        os.close(descriptor)


def test_a_file_that_can_still_be_changed_is_refused() -> None:
    descriptor = os.memfd_create("state")
    try:
        os.write(descriptor, b"state")
        with pytest.raises(RemoteProtocolError, match="still be changed"):
            mapped_sealed(descriptor, 5)
    finally:
        os.close(descriptor)


def test_a_file_of_the_disk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"state")
    descriptor = os.open(tmp_path / "state", os.O_RDONLY)
    try:
        with pytest.raises(RemoteProtocolError):
            mapped_sealed(descriptor, 5)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size", [4, 6, 0, -1])
def test_a_file_of_another_size_is_refused(size: int) -> None:
    descriptor = sealed_file(b"state")
    try:
        with pytest.raises(RemoteProtocolError, match="another size"):
            mapped_sealed(descriptor, size)
    finally:
        os.close(descriptor)


def test_pieces_arrive_in_a_file_that_another_process_can_read() -> None:
    sink = FileInMemory([3, 2])
    sink.put(1, b"de")
    sink.put(0, b"abc")
    received = ReceivedFile(os.dup(sink.descriptor), sink.size)
    sink.close()
    assert bytes(received.take()) == b"abcde"


def test_a_vector_comes_back_bit_for_bit() -> None:
    vector = torch.tensor([1.5, -0.0, float("inf"), 1e-40])
    descriptor = vector_file(vector)
    found = vector_of(ReceivedFile(descriptor, vector.nbytes).take())
    assert found.numpy().tobytes() == vector.numpy().tobytes()


def test_a_part_of_an_element_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        vector_of(memoryview(b"12345"))
