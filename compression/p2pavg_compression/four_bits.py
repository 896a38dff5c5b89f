"""Codecs with a scale for each block of elements, and four bits for each element.

Legend: n elements, B elements in a block, R = ceil(n / B) blocks.

A payload is R scales (float32), zeros up to a multiple of 64 bytes, and ceil(n / 2) bytes with two codes each, the
first one in the upper half. If n is odd, the last half holds the code of zero.
"""

import abc
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from .blocks import BlockCodec, largest_of_blocks, reciprocals_of_scales
from .codec import CPU, CodecError
from .kernels import codes_of_halves
from .scratch import scratch

_LARGEST_CODE = 7


def _level_pairs(levels: NDArray[np.float32]) -> torch.Tensor:
    """Return the two levels, as one 64-bit number, of each byte: int64 (256,), 2 KiB."""
    byte = np.arange(256)
    pairs = np.stack((levels[byte >> 4], levels[byte & 0xF]), axis=1).view(np.int64).reshape(-1)
    return torch.tensor(pairs, dtype=torch.int64, device=CPU)


class FourBitCodec(BlockCodec):
    """The layout, and the decoding by a table of 16 levels. A subclass chooses scales and codes."""

    __slots__ = ()
    zero_code: ClassVar[int]
    """The code of the level 0."""
    level_pairs: ClassVar[torch.Tensor]
    """int64 (256,): the levels of each pair of codes, two float32."""

    @abc.abstractmethod
    def _quantize(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`BlockCodec`. Codes are from 0 to 15, one in each byte."""

    def _codes_nbytes(self, elements: int) -> int:
        return (elements + 1) // 2

    def _pack(self, codes: torch.Tensor, elements: int) -> torch.Tensor:
        pairs = codes.view(-1, 2)
        packed = pairs[:, 0].bitwise_left_shift(4).bitwise_or_(pairs[:, 1])
        return packed[: self._codes_nbytes(elements)]

    def _validate_codes(self, codes: torch.Tensor, elements: int) -> None:
        if elements % 2 and int(codes[-1].item()) & 0xF != self.zero_code:
            raise CodecError(f"{self.name} payload does not end with the code of zero")

    def _levels(self, codes: torch.Tensor, elements: int) -> torch.Tensor:
        pairs = scratch.integers[: codes.numel()].copy_(codes)
        torch.index_select(self.level_pairs, 0, pairs, out=scratch.floats.view(torch.int64)[: codes.numel()])
        return scratch.floats[:elements]


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4(FourBitCodec):
    """Symmetric linear quantization: x is sent as rint(x / scale), with scale = max|x| / 7 over its block.

    A payload has half a byte for each element and 4 bytes for each block. The error of an element is at most half a
    scale, so elements below max/14 of their block become zero: use it with :class:`~p2pavg.optim.ErrorFeedback`.
    Streaming DiLoCo (Douillard et al. 2025, section 3.3) sends its outer gradients in four bits.

    `block_size`: a power of two from 64 to 4096.
    """

    kind: ClassVar[str] = "int4"
    largest_scale_bits: ClassVar[int] = 0x7012_4925  # the scale of a block whose maximum is 2**100
    zero_code: ClassVar[int] = 8
    level_pairs: ClassVar[torch.Tensor] = _level_pairs(np.arange(-8, 8, dtype=np.float32))
    block_size: int = 64

    def _quantize(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales, work = largest_of_blocks(rows, start)
        # As in Int8: a product with the reciprocal rounds alike everywhere, a quotient does not.
        inverses = reciprocals_of_scales(scales.mul_(1 / _LARGEST_CODE))
        return scales, torch.mul(rows, inverses, out=work).round_().add_(self.zero_code).to(torch.uint8)

    def _validate_codes(self, codes: torch.Tensor, elements: int) -> None:
        # Not super(): a dataclass with slots is made anew, and the word then means the class before.
        FourBitCodec._validate_codes(self, codes, elements)
        # A byte below 16 has the code 0 in its upper half.
        if codes.amin().item() < 16 or codes.bitwise_and(0xF).amin().item() == 0:
            raise CodecError(f"{self.name} payload contains the code -8, which is not in use")


# Dettmers et al., "QLoRA" (2023), appendix E: quantiles of the normal distribution, with an exact zero.
_NF4_LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    dtype=np.float32,
)
_NF4_OF_HALF = torch.tensor(codes_of_halves(_NF4_LEVELS), dtype=torch.uint8, device=CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class NF4(FourBitCodec):
    """NormalFloat: the one of 16 levels that is nearest to x / scale, with scale = max|x| of the block.

    A payload has half a byte for each element and 4 bytes for each block. Source: Dettmers et al., "QLoRA: Efficient
    Finetuning of Quantized LLMs" (2023), section 3 and appendix E; the levels are those of bitsandbytes. They are dense
    near zero, where most values of a normal distribution are. Exact zeros stay zeros.

    x / scale is rounded to half precision, and its 16 bits are looked up in a table. A number near the middle between
    two levels may get the second nearest of them.

    `block_size`: a power of two from 64 to 4096.
    """

    kind: ClassVar[str] = "nf4"
    largest_scale_bits: ClassVar[int] = 0x7180_0000  # 2**100; no level exceeds 1
    zero_code: ClassVar[int] = 7
    level_pairs: ClassVar[torch.Tensor] = _level_pairs(_NF4_LEVELS)
    block_size: int = 64

    def _quantize(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales, work = largest_of_blocks(rows, start)
        torch.mul(rows, reciprocals_of_scales(scales), out=work)
        indices = work.view(-1).half().view(torch.uint16).to(torch.int32)
        return scales, _NF4_OF_HALF.to(rows.device).index_select(0, indices).view_as(rows)
