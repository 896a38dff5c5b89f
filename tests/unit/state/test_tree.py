"""Digests of chunks, and the root over them."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.state.joiner.fetching import chunked
from p2pavg.state.tree import CHUNK_BYTES, BlobKind, ChunkDigester, chunk_count, chunk_digests, root_of

SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7]


def blob(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.mark.parametrize("size", SIZES)
def test_each_chunk_has_its_blake3_digest(size: int) -> None:
    data = blob(size)
    expected = [blake3(data[begin : begin + CHUNK_BYTES]).digest() for begin in range(0, size, CHUNK_BYTES)]
    assert chunk_digests(data) == chunk_digests(memoryview(data)) == expected
    assert chunk_count(size) == len(expected)


@pytest.mark.parametrize("piece", [100_003, CHUNK_BYTES, 3 * CHUNK_BYTES + 1])
@pytest.mark.parametrize("many", [False, True])
def test_pieces_of_any_size_give_the_digests_of_the_whole(piece: int, many: bool) -> None:
    data = blob(SIZES[-1])
    digester = ChunkDigester(many=many)
    for begin in range(0, len(data), piece):
        digester.update(data[begin : begin + piece])
    assert digester.size == len(data)
    assert digester.finish() == chunk_digests(data)


def test_numbers_of_another_format_are_hashed_as_bytes() -> None:
    numbers = np.arange(300_000, dtype=np.float64)
    assert chunk_digests(numbers.data) == chunk_digests(numbers.tobytes())


def test_a_donors_digests_count_only_if_their_root_was_asked_for() -> None:
    """Each piece is checked against them: a donor could send any state with digests of its own."""
    size = SIZES[-1]
    digests = chunk_digests(blob(size))
    wanted = chunked(BlobKind.SNAPSHOT, root_of(digests, size), size)
    manifest = wanted.read_manifest(b"".join(digests))
    assert (manifest.digests, manifest.sizes) == (digests, [*[CHUNK_BYTES] * 5, 7])
    with pytest.raises(RemoteProtocolError):
        wanted.read_manifest(b"".join([*digests[:-1], bytes(32)]))
    # A root that was made of more or fewer digests than the blob has chunks.
    for others in (digests[:-1], [*digests, bytes(32)], [*digests, b"\0"]):
        with pytest.raises(RemoteProtocolError):
            chunked(BlobKind.SNAPSHOT, root_of(others, size), size).read_manifest(b"".join(others))


def test_golden_root() -> None:
    data = bytes(range(256)) * 4097
    assert (
        root_of(chunk_digests(data), len(data)).hex()
        == "755c70360b7cbe64f9802bdf0881d3fadd26f944c111638ac211d23a01724daf"
    )
