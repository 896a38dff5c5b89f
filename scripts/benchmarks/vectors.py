"""The vectors that all systems average, and the exact mean of them, in files that every process maps.

They are mapped so that a machine holds them only once, for any number of waiting processes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CHUNK = 65_536  # small enough that checking a result does not add to the measured memory
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def vectors(count: int, elements: int) -> Iterator[Path]:
    """Make a folder with ``count`` vectors of normal values and their mean; remove it at the end."""
    # Preferably not on a disk: writing back would continue during the measurements.
    needed = 4 * elements * (count + 1)
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * needed
    with tempfile.TemporaryDirectory(prefix="p2pavg-bench-", dir=SHARED_MEMORY if roomy else None) as name:
        folder = Path(name)
        mean = torch.zeros(elements, dtype=torch.float64)
        for index in range(count):
            values = torch.randn(elements, generator=torch.Generator().manual_seed(index))
            mean += values.double()
            _write(folder / str(index), values)
        _write(folder / "mean", (mean / count).float())
        yield folder


def _write(path: Path, values: torch.Tensor) -> None:
    values.numpy().tofile(path)


def load(path: Path, elements: int) -> torch.Tensor:
    """Map a vector of :func:`vectors`; do not change it."""
    return torch.from_file(str(path), shared=True, size=elements, dtype=torch.float32)


def scale(number: int) -> float:
    """Return the factor of all vectors in a round; it changes, so that an old result counts as wrong."""
    return (1.0, -2.0, 4.0)[number % 3]


def relative_error(found: torch.Tensor, mean: torch.Tensor, factor: float) -> float:
    """Return the L2 norm of the difference from ``factor * mean``, relative to the norm of ``factor * mean``."""
    wrong, norm = 0.0, 0.0
    for some, right in zip(torch.split(found, CHUNK), torch.split(mean, CHUNK), strict=True):
        exact = right.double() * factor
        wrong += float((some.double() - exact).square().sum())
        norm += float(exact.square().sum())
    return float((wrong / norm) ** 0.5)
