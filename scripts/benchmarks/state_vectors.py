"""The bytes of the benchmark of states: the same in every process, for p2pavg and for hivemind."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SEED = 20


def state_of(count: int) -> torch.Tensor:
    """Return a float32 vector of ``count`` bytes."""
    return torch.randn(count // 4, generator=torch.Generator().manual_seed(SEED))


def bytes_of(vector: torch.Tensor) -> memoryview:
    """Return the bytes of a vector, without a copy."""
    data: Any = vector.numpy()  # its stubs do not say that it is a buffer
    return memoryview(data).cast("B")


def digest_of(data: bytes | memoryview) -> str:
    """Return a digest of a state's bytes."""
    return hashlib.sha256(data).hexdigest()
