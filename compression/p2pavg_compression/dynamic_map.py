"""The signed dynamic 8-bit data type, and the tables that encode and decode it.

Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (2022),
section 1.3, and Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2016). There are 256 levels
in [-1, 1]. Each decade has half as many levels as the decade above it: 64, 32, ... 1, over seven decades and
both signs, and 0 and 1 beside them. So small numbers keep their magnitude, and large numbers their precision.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from .buffers import CPU

__all__ = ["CODE_OF_HALF", "LEVELS", "LEVEL_PAIRS", "ZERO_CODE", "codes_of_halves", "dynamic_levels"]

_DECADES = 7


def dynamic_levels() -> NDArray[np.float32]:
    """Return the 256 levels in ascending order, float32 (256,).

    On hosts where torch uses AVX2 or better, they equal `bitsandbytes.functional.create_dynamic_map()` bit for
    bit. On other hosts, the levels of bitsandbytes differ by up to two units in the last place, because
    torch.linspace rounds differently without a fused multiply-add. Peers must decode to the same bits, so this
    function computes the fused rounding explicitly.
    """
    levels = [np.float32(0.0), np.float32(1.0)]
    for decade in range(_DECADES):
        edges = _linspace_from_tenth_to_one(2**decade + 1)
        centers = (edges[:-1] + edges[1:]) / np.float32(2.0)
        magnitudes = np.float32(10.0 ** (decade - _DECADES + 1)) * centers
        levels.extend((*magnitudes, *-magnitudes))
    return np.array(sorted(levels), dtype=np.float32)


def _linspace_from_tenth_to_one(steps: int) -> NDArray[np.float32]:
    """Return torch.linspace(0.1, 1, steps) as with a fused multiply-add. Each half counts from its own end.

    float64 holds the product and the sum exactly (24 bits times at most 6, over few binades). So the
    conversion to float32 is the only rounding.
    """
    first, last = np.float32(0.1), np.float32(1.0)
    step = np.float64((last - first) / np.float32(steps - 1))
    index = np.arange(steps)
    rising = np.float64(first) + step * index
    falling = np.float64(last) - step * (steps - 1 - index)
    return np.where(index < steps // 2, rising, falling).astype(np.float32)


def codes_of_halves(levels: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the code of the nearest of ascending levels for each of the 65,536 half-precision numbers.

    NaN counts as 0.
    """
    halves = np.arange(65_536, dtype=np.uint16).view(np.float16).astype(np.float64)
    # The mean of two float32 is exact in float64.
    midpoints = (levels[:-1].astype(np.float64) + levels[1:].astype(np.float64)) / 2
    return np.searchsorted(midpoints, np.nan_to_num(halves, nan=0.0)).astype(np.uint8)


def _level_pairs(levels: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the two levels, as one 64-bit number, of each pair of codes, read as one 16-bit number."""
    pair = np.arange(65_536)
    return np.stack((levels[pair & 0xFF], levels[pair >> 8]), axis=1).view(np.int64).reshape(-1)


_levels = dynamic_levels()

LEVELS = torch.tensor(_levels, dtype=torch.float32, device=CPU)
"""float32 (256,): the level of each code."""

LEVEL_PAIRS = torch.tensor(_level_pairs(_levels), dtype=torch.int64, device=CPU)
"""int64 (65536,), 512 KiB: the levels of each pair of codes. Looking up pairs is twice as fast as single codes."""

CODE_OF_HALF = torch.tensor(codes_of_halves(_levels), dtype=torch.uint8, device=CPU)
"""uint8 (65536,), 64 KiB: the code of each half-precision number, by its bits."""

ZERO_CODE = int(np.flatnonzero(_levels == 0.0)[0])
