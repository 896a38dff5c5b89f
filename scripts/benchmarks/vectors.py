"""The vectors that all systems average, and the exact mean of them, in files that every process maps.

They are mapped so that a machine holds them once, however many processes wait for their turn.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CHUNK = 65_536  # so small that what checks a result adds nothing to the memory that is measured
SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def vectors(count: int, elements: int) -> Iterator[Path]:
    """A folder with ``count`` vectors of normal values and their mean, removed at the end."""
    # Not on a disk if it can be helped: writing back would go on while others measure.
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
    """A vector of :func:`vectors`, mapped: do not change it."""
    return torch.from_file(str(path), shared=True, size=elements, dtype=torch.float32)


def scale(number: int) -> float:
    """What everybody multiplies its vector with in a round: the result of the round before is a wrong one."""
    return (1.0, -2.0, 4.0)[number % 3]


def relative_error(found: torch.Tensor, mean: torch.Tensor, factor: float) -> float:
    """L2 norm of the difference from ``factor * mean``, divided by that of ``factor * mean``."""
    wrong, norm = 0.0, 0.0
    for some, right in zip(torch.split(found, CHUNK), torch.split(mean, CHUNK), strict=True):
        exact = right.double() * factor
        wrong += float((some.double() - exact).square().sum())
        norm += float(exact.square().sum())
    return float((wrong / norm) ** 0.5)
