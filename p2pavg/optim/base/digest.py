"""Digests of tensors: their shapes, dtypes and bytes, wherever they are. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from blake3 import blake3

DIGEST_BYTES = 32
SHORT_BYTES = 8
"""Of a digest that peers compare to locate differences; the chance of a false match is 1 in 2^64."""
MANY_BYTES = 2**22  # from which on several threads hash; with less, waking them costs more than it saves
MAX_CHUNKS = 64  # 512 bytes of a record's 4096


@torch.no_grad()
def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return 32 bytes that depend on the shape, the dtype and every bit.

    Memory layout and device do not count. A tensor on a GPU is copied to the CPU.
    """
    values = tensor.detach().contiguous().cpu()
    threads = blake3.AUTO if values.nbytes >= MANY_BYTES else 1
    digest = blake3(f"{tuple(values.shape)}:{values.dtype};".encode(), max_threads=threads)
    digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def joint_digest(digests: Iterable[bytes]) -> bytes:
    """Return one digest of several, each of 32 bytes; their order and number count."""
    return blake3(b"".join(digests)).digest()


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return one digest of several tensors; their order and number count."""
    return joint_digest(tensor_digest(tensor) for tensor in tensors)


def chunk_bounds(tensors: int) -> list[tuple[int, int]]:
    """Return each chunk's range of tensors as (first, end): at most 64 chunks, none empty."""
    chunks = min(tensors, MAX_CHUNKS)
    return [(tensors * i // chunks, tensors * (i + 1) // chunks) for i in range(chunks)]


def short_digests(digests: Sequence[bytes]) -> bytes:
    """Return 8 bytes for each chunk of some tensors' digests, one after the other."""
    return b"".join(
        joint_digest(digests[first:end])[:SHORT_BYTES] for first, end in chunk_bounds(len(digests))
    )
