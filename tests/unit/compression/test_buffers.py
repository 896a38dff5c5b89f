"""Views of bytes as tensors: shared if possible, copied if necessary, and released after use."""

import pytest
import torch

from p2pavg_compression import Blockwise8
from p2pavg_compression.codec import read_only_bytes, typed
from p2pavg_compression.scratch import chunk_ranges


def test_payload_is_not_copied() -> None:
    payload = bytearray(b"abcdef")
    seen = read_only_bytes(memoryview(payload).toreadonly())
    payload[0] = ord("z")
    assert seen.tolist() == list(b"zbcdef")


def test_payload_lives_as_long_as_its_tensor() -> None:
    seen = read_only_bytes(bytes(range(200)) * 1000)
    other = [bytes(200_000) for _ in range(20)]  # objects that would reuse the memory
    assert seen[:200].tolist() == list(range(200))
    assert len(other) == 20


def test_buffers_are_released_after_each_call() -> None:
    """A bytearray cannot be resized while an object holds a view of it."""
    codec = Blockwise8()
    payload = bytearray(codec.encoded_nbytes(100))
    codec.encode(torch.ones(100), payload)
    codec.decode(payload, 100)
    codec.accumulate(payload, torch.zeros(100), 1.0)
    payload.append(0)
    with pytest.raises(ValueError, match="bytes, expected"):
        codec.decode(payload, 100)
    payload.append(0)


@pytest.mark.parametrize("offset", range(9))
def test_numbers_are_read_at_aligned_addresses_only(offset: int) -> None:
    numbers = torch.arange(10, dtype=torch.float32)
    raw = read_only_bytes(memoryview(bytes(offset) + numbers.numpy().tobytes())[offset:])
    view = typed(raw, torch.float32)
    assert torch.equal(view, numbers)
    assert view.data_ptr() % 4 == 0
    assert (view.data_ptr() == raw.data_ptr()) == (raw.data_ptr() % 4 == 0)


@pytest.mark.parametrize("elements", [0, 1, 63, 64, 65, 1000, 1024, 1025, 2048 + 70])
def test_chunks_cover_the_vector_in_whole_blocks(elements: int) -> None:
    ranges = list(chunk_ranges(elements, 64, 1024))
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(elements))
    assert all(start % 64 == 0 and 0 < stop - start <= 1024 for start, stop in ranges)
    assert all((stop - start) % 64 == 0 for start, stop in ranges[:-1])
