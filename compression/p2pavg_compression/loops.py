"""The loops of the block codecs, as numba compiles them. `kernels.py` does so, in the background.

Nothing else imports this file, because importing numba takes long, and nothing calls the loops uncompiled.

They give the bits of the torch expressions in `blockwise8.py`, `int8.py` and `ternary.py`. So every operation is one of
float32, in the order of those expressions, and the compiler may not reorder operations (numba does not without
`fastmath`). Nor may it fuse a multiplication with an addition, which saves a rounding, except where torch does:
`addcmul_` on most processors. `kernels.py` finds out.

* The largest magnitude of a block is found among the bits: read as integers, the bits of non-negative floats have
  the order of the floats, and NaN is above infinity. Integers can be compared in any order, so this is vectorized.
* numba computes with 64-bit integers. The casts to 32 bits let a vector hold twice as many. `view` needs one, too.
* A slice of a block is indexed from zero. Otherwise numba checks for negative indices, and nothing is vectorized.

Legend: n elements, B elements in a block, R = ceil(n / B) blocks.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, register_jitable
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

_MAGNITUDE_BITS = np.uint32(0x7FFF_FFFF)
_LARGEST = np.uint32(0x7180_0000)  # the bits of MAX_MAGNITUDE, 2**100
_SMALLEST_NORMAL = np.float32(2.0**-126)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_ONE_OF_127 = np.float32(1 / 127)

# Half precision has 13 bits less of mantissa, and another bias of the exponent. Below 2**-14 it has a fixed unit of
# 2**-24, the unit of a float32 between 0.5 and 1: adding 0.5 rounds to it, and leaves the number in the last bits.
_SIGN_OF_HALF = np.uint32(0x8000)
_ROUND_DOWN = np.uint32(0xFFF)
_BIAS = np.uint32(112 << 10)
_SMALLEST_NORMAL_HALF = np.uint32(0x3880_0000)  # 2**-14
_HALF = np.float32(0.5)
_HALF_BITS = np.uint32(0x3F00_0000)

# Adding 1.5 * 2**23 rounds to an integer, half to even. It is left in the last bits, in two's complement.
_ROUNDER = np.float32(12582912.0)


def _fused_source(_context: Any, left: Any, right: Any, addend: Any) -> Any:
    """Return left * right + addend with a single rounding, all of them float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(left, right, addend), generate


_fused: Any = intrinsic(_fused_source)


def encode_blockwise8(values: Floats, table: Codes, block: int, scales: Floats, codes: Codes) -> bool:
    """Encode `values` (n,) into `scales` (R,) and `codes` (n,). Return False if a number must not be encoded.

    `table`: (65536,) the code of each half-precision number, by its bits.
    """
    halves = np.empty(block, dtype=np.uint16)
    for row in range(scales.size):
        start = row * block
        stop = min(start + block, values.size)
        chunk = values[start:stop]
        target = codes[start:stop]
        top = np.uint32(0)
        for index in range(chunk.size):
            top = max(top, np.uint32(np.float32(chunk[index]).view(np.uint32) & _MAGNITUDE_BITS))
        if top > _LARGEST:
            return False
        scale = np.uint32(top).view(np.float32)
        inverse = _ZERO
        if scale < _SMALLEST_NORMAL:
            scale = _ZERO
        else:
            inverse = _ONE / scale
        scales[row] = scale
        for index in range(chunk.size):
            bits = np.float32(chunk[index] * inverse).view(np.uint32)
            size = np.uint32(bits & _MAGNITUDE_BITS)
            odd = np.uint32(np.uint32(size >> np.uint32(13)) & np.uint32(1))
            rounded = np.uint32(np.uint32(size + _ROUND_DOWN) + odd)
            normal = np.uint32(np.uint32(rounded >> np.uint32(13)) - _BIAS)
            small = np.uint32(
                np.float32(np.uint32(size).view(np.float32) + _HALF).view(np.uint32) - _HALF_BITS
            )
            half = small if size < _SMALLEST_NORMAL_HALF else normal
            sign = np.uint32(np.uint32(bits >> np.uint32(16)) & _SIGN_OF_HALF)
            halves[index] = np.uint16(sign | half)
        for index in range(chunk.size):
            target[index] = table[halves[index]]
    return True


def decode_blockwise8(scales: Floats, codes: Codes, levels: Floats, block: int, out: Floats) -> None:
    """Decode `codes` (n,) into `out` (n,). `levels`: (256,) the level of each code."""
    for row in range(scales.size):
        start = row * block
        stop = min(start + block, out.size)
        source = codes[start:stop]
        target = out[start:stop]
        scale = scales[row]
        for index in range(source.size):
            target[index] = levels[source[index]] * scale


def accumulate_blockwise8(
    scales: Floats, codes: Codes, levels: Floats, block: int, accumulator: Floats, fuse: bool
) -> None:
    """Add the decoded `codes` (n,) to `accumulator` (n,). `levels`: (256,) times the weight."""
    for row in range(scales.size):
        start = row * block
        stop = min(start + block, accumulator.size)
        source = codes[start:stop]
        target = accumulator[start:stop]
        scale = scales[row]
        if fuse:
            for index in range(source.size):
                target[index] = _fused(levels[source[index]], scale, target[index])
        else:
            for index in range(source.size):
                target[index] = levels[source[index]] * scale + target[index]


def encode_int8(values: Floats, block: int, scales: Floats, codes: Codes) -> bool:
    """Encode `values` (n,) into `scales` (R,) and `codes` (n,). Return False if a number must not be encoded."""
    for row in range(scales.size):
        start = row * block
        stop = min(start + block, values.size)
        chunk = values[start:stop]
        target = codes[start:stop]
        top = np.uint32(0)
        for index in range(chunk.size):
            top = max(top, np.uint32(np.float32(chunk[index]).view(np.uint32) & _MAGNITUDE_BITS))
        if top > _LARGEST:
            return False
        scale = np.uint32(top).view(np.float32) * _ONE_OF_127
        inverse = _ZERO
        if scale < _SMALLEST_NORMAL:
            scale = _ZERO
        else:
            inverse = _ONE / scale
        scales[row] = scale
        for index in range(chunk.size):
            target[index] = np.uint8(np.float32(chunk[index] * inverse + _ROUNDER).view(np.uint32))
    return True


def decode_int8(scales: Floats, codes: NDArray[np.int8], block: int, out: Floats) -> None:
    """Decode `codes` (n,) into `out` (n,)."""
    for row in range(scales.size):
        start = row * block
        stop = min(start + block, out.size)
        source = codes[start:stop]
        target = out[start:stop]
        scale = scales[row]
        for index in range(source.size):
            target[index] = np.float32(source[index]) * scale


def accumulate_int8(
    scales: Floats, codes: NDArray[np.int8], weight: np.float32, block: int, accumulator: Floats, fuse: bool
) -> None:
    """Add `weight` times the decoded `codes` (n,) to `accumulator` (n,)."""
    for row in range(scales.size):
        start = row * block
        stop = min(start + block, accumulator.size)
        source = codes[start:stop]
        target = accumulator[start:stop]
        scale = scales[row]
        if fuse:
            for index in range(source.size):
                target[index] = _fused(weight * np.float32(source[index]), scale, target[index])
        else:
            for index in range(source.size):
                target[index] = (weight * np.float32(source[index])) * scale + target[index]


_DIGITS = 5
_THREE = np.uint8(3)


def encode_ternary(
    values: Floats, reciprocals: Floats, share: np.float32, block: int, scales: Floats, codes: Codes
) -> bool:
    """Encode `values` (n,) into `scales` (R,) and packed `codes`. Return False if a number must not be encoded.

    `reciprocals`: (4097,) 1 / n; `share`: the threshold, as a part of the sum of a block's magnitudes.
    """
    magnitudes = np.empty(block, dtype=np.float32)
    halves = np.empty(block, dtype=np.float32)
    digits = np.empty(block + _DIGITS, dtype=np.uint8)
    for row in range(scales.size):
        start = row * block
        chunk = values[start : min(start + block, values.size)]
        width = (chunk.size + _DIGITS - 1) // _DIGITS
        first = row * ((block + _DIGITS - 1) // _DIGITS)
        target = codes[first : first + width]
        top = np.uint32(0)
        for index in range(chunk.size):
            bits = np.uint32(np.float32(chunk[index]).view(np.uint32) & _MAGNITUDE_BITS)
            top = max(top, bits)
            magnitudes[index] = np.uint32(bits).view(np.float32)
        if top > _LARGEST:
            return False
        magnitudes[chunk.size :] = _ZERO
        threshold = _sum_of(magnitudes, halves) * share
        kept = 0
        for index in range(block):
            if magnitudes[index] > threshold:
                kept += 1
            else:
                magnitudes[index] = _ZERO
        scale = _sum_of(magnitudes, halves) * reciprocals[kept]
        if scale < _SMALLEST_NORMAL:
            scale = _ZERO
            magnitudes[:] = _ZERO
        scales[row] = scale
        digits[:] = np.uint8(1)
        for index in range(chunk.size):
            if magnitudes[index] > _ZERO:
                digits[index] = np.uint8(2) if chunk[index] > _ZERO else np.uint8(0)
        for index in range(width):
            target[index] = digits[(_DIGITS - 1) * width + index]
        for digit in range(_DIGITS - 2, -1, -1):
            some = digits[digit * width : (digit + 1) * width]
            for index in range(width):
                target[index] = np.uint8(target[index] * _THREE + some[index])
    return True


@register_jitable  # type: ignore[untyped-decorator]
def _sum_of(row: Floats, halves: Floats) -> np.float32:
    """Return the sum of a block, by halving, in the memory `halves` of its length."""
    half = row.size // 2
    for index in range(half):
        halves[index] = row[index] + row[half + index]
    while half > 1:
        half //= 2
        for index in range(half):
            halves[index] = halves[index] + halves[half + index]
    return np.float32(halves[0])


@register_jitable  # type: ignore[untyped-decorator]
def _next_level(left: Codes, index: int) -> np.float32:
    """Take the lowest digit from one of the bytes `left`, and return its level."""
    rest = np.uint8(left[index] // _THREE)
    code = np.uint8(left[index] - np.uint8(rest * _THREE))
    left[index] = rest
    return np.float32(np.float32(code) - _ONE)


def decode_ternary(scales: Floats, codes: Codes, block: int, out: Floats) -> None:
    """Decode packed `codes` into `out` (n,)."""
    for row in range(scales.size):
        start = row * block
        target = out[start : min(start + block, out.size)]
        width = (target.size + _DIGITS - 1) // _DIGITS
        first = row * ((block + _DIGITS - 1) // _DIGITS)
        left = codes[first : first + width].copy()
        scale = scales[row]
        for digit in range(_DIGITS):
            some = target[digit * width : (digit + 1) * width]
            for index in range(some.size):
                some[index] = _next_level(left, index) * scale


def accumulate_ternary(
    scales: Floats, codes: Codes, weight: np.float32, block: int, accumulator: Floats, fuse: bool
) -> None:
    """Add `weight` times the decoded `codes` to `accumulator` (n,)."""
    for row in range(scales.size):
        start = row * block
        target = accumulator[start : min(start + block, accumulator.size)]
        width = (target.size + _DIGITS - 1) // _DIGITS
        first = row * ((block + _DIGITS - 1) // _DIGITS)
        left = codes[first : first + width].copy()
        scale = scales[row]
        for digit in range(_DIGITS):
            some = target[digit * width : (digit + 1) * width]
            for index in range(some.size):
                level = weight * _next_level(left, index)
                if fuse:
                    some[index] = _fused(level, scale, some[index])
                else:
                    some[index] = level * scale + some[index]
