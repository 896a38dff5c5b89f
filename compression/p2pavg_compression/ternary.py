"""Three levels for each element: less than two bits.

Legend: n elements, B elements in a block, R = ceil(n / B) blocks, W = ceil(B / 5) bytes of codes for a block.

A payload is R scales (float32), zeros up to a multiple of 64 bytes, and W bytes for each block, ceil(m / 5) for a short
last block of m elements. A byte is a number of five digits to the base 3. The codes of a block's first W elements are
the lowest digits of its bytes, those of the next W elements the digits above them, and so on. So one loop over
neighbours encodes or decodes each digit. Places beyond a block's end hold the code of zero.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from .blocks import SMALLEST_NORMAL, BlockCodec
from .codec import CPU, CodecError, check_encodable
from .kernels import RECIPROCALS, TERNARY_SHARE
from .scratch import scratch

_DIGITS = 5  # 3**5 is 243: 1.6 bits for a code, where 1.585 are the least
_POWERS = torch.tensor([[3**digit] for digit in range(_DIGITS)], dtype=torch.uint8, device=CPU)
_ZERO_CODE = 1
_LEVELS = torch.tensor(
    np.stack([np.arange(256) // 3**digit % 3 - 1 for digit in range(_DIGITS)]),
    dtype=torch.float32,
    device=CPU,
)
"""float32 (5, 256): the level of each digit of a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ternary(BlockCodec):
    """Three levels: the sign of x times the scale of its block, or 0 for small x.

    Small are the elements up to 0.85 times the mean magnitude of their block, and the scale is the mean magnitude of
    the others. What is decoded is therefore the orthogonal projection of a block on its pattern of signs: it is never
    longer than the block, and neither is the error. Of normal values it loses 19 % of the energy, so use it with
    :class:`~p2pavg.optim.ErrorFeedback`, which needs just that. Source: Li, Zhang and Liu, "Ternary Weight Networks"
    (2016), section 2.2, where the threshold is 0.75; 0.85 loses at most 2 % more energy than the best threshold, both
    for normal values and for those of a Laplace distribution.

    A payload has 52 bytes of codes and 4 of a scale for 256 elements: 1.75 bits for an element. Exact zeros stay zeros.

    `block_size`: a power of two from 64 to 4096. A short last block counts as one that ends with zeros.
    """

    largest_scale_bits: ClassVar[int] = 0x7180_0000  # 2**100; no level exceeds 1
    kind: ClassVar[str] = "ternary"
    has_kernel: ClassVar[bool] = True
    block_size: int = 256

    @property
    def needs_feedback(self) -> bool:
        return True

    def _codes_nbytes(self, elements: int) -> int:
        blocks, rest = divmod(elements, self.block_size)
        return blocks * _width(self.block_size) + _width(rest)

    def _quantize(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        work = torch.empty_like(rows) if rows.is_cuda else scratch.floats[: rows.numel()].view_as(rows)
        magnitudes = torch.abs(rows, out=work)
        check_encodable(magnitudes.amax(1), rows, start)
        kept = magnitudes > _sum_of_rows(magnitudes).mul_(TERNARY_SHARE / self.block_size).view(-1, 1)
        sums = _sum_of_rows(magnitudes.mul_(kept))
        # No mean exceeds MAX_MAGNITUDE: roundings keep the order of numbers, and the mean of that power of two alone is
        # exact.
        scales = sums.mul_(RECIPROCALS.to(rows.device).index_select(0, kept.sum(1)))
        if scales.amin().item() < SMALLEST_NORMAL:  # rare, and else these are two passes for nothing
            scales.masked_fill_(scales < SMALLEST_NORMAL, 0.0)
            kept.logical_and_(scales.view(-1, 1) > 0.0)
        signs = rows.sign().mul_(kept).add_(_ZERO_CODE)
        return scales, signs.to(torch.uint8)

    def _pack(self, codes: torch.Tensor, elements: int) -> torch.Tensor:
        rows, width = len(codes), self._codes_nbytes(elements) // len(codes)
        digits = torch.full((rows, _DIGITS * width), _ZERO_CODE, dtype=torch.uint8, device=codes.device)
        given = codes[:, : _DIGITS * width]  # fewer if the places of the last digit are not all in use
        digits[:, : given.shape[1]] = given
        weighted = digits.view(rows, _DIGITS, width).mul_(_POWERS.to(codes.device))
        return weighted.sum(1, dtype=torch.uint8).view(-1)

    def _levels(self, codes: torch.Tensor, elements: int) -> torch.Tensor:
        rows = -(-elements // self.block_size)
        columns, width = elements // rows, codes.numel() // rows
        bytes_ = scratch.integers[: codes.numel()].copy_(codes).view(rows, width)
        levels = scratch.floats[:elements].view(rows, columns)
        for digit in range(_DIGITS):
            first = digit * width
            some = bytes_[:, : max(min(width, columns - first), 0)]
            levels[:, first : first + some.shape[1]] = _LEVELS[digit][some]
        return levels

    def _validate_codes(self, codes: torch.Tensor, elements: int) -> None:
        if codes.amax().item() >= 3**_DIGITS:
            raise CodecError(f"{self.name} payload contains a byte that is not five codes")
        blocks, rest = divmod(elements, self.block_size)
        whole = blocks * _width(self.block_size)
        for part, size in ((codes[:whole], self.block_size), (codes[whole:], rest)):
            if not part.numel():
                continue
            width = _width(size)
            for digit in range(size // width, _DIGITS):
                unused = part.view(-1, width)[:, max(size - digit * width, 0) :].to(torch.int32)
                if not bool((unused // 3**digit % 3 == _ZERO_CODE).all()):
                    raise CodecError(f"{self.name} payload has a code beyond the end of a block")


def _width(elements: int) -> int:
    """Return the bytes of the codes of a block."""
    return -(-elements // _DIGITS)


def _sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row (float32 (R, B)), rounded alike everywhere: float32 (R,).

    The upper half of a row is added to the lower half until one number is left. torch's own sum depends on a
    processor's vectors.
    """
    half = rows.shape[1] // 2
    sums = rows[:, :half] + rows[:, half:]
    while half > 1:
        half //= 2
        sums = sums[:, :half] + sums[:, half:]
    return sums.view(-1)
