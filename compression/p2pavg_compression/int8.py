"""Linear 8-bit codes with a scale for every block."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .blocks import BlockCodec, largest_of_blocks, reciprocals_of_scales
from .codec import CodecError
from .scratch import scratch

_LARGEST_CODE = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8(BlockCodec):
    """Symmetric linear quantization: x is sent as rint(x / scale), with scale = max|x| / 127 over its block.

    A payload has 1 byte for each element and 4 for each block. The error of an element is at most half a scale,
    so elements below max/254 of their block become zero. This is absmax quantization, section 2 of Dettmers et
    al., "LLM.int8()" (2022), applied to blocks instead of tensors.

    `block_size`: a power of two from 64 to 4096.
    """

    largest_scale_bits: ClassVar[int] = 0x6E01_0204  # the scale of a block whose maximum is 2**100
    kind: ClassVar[str] = "int8"
    has_kernel: ClassVar[bool] = True
    block_size: int = 256

    def _quantize(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales, work = largest_of_blocks(rows, start)
        # With and without SIMD, amax * (1/127) and x * (1/scale) round alike, but 127/amax does not.
        inverses = reciprocals_of_scales(scales.mul_(1 / _LARGEST_CODE))
        return scales, torch.mul(rows, inverses, out=work).round_().to(torch.int8).view(torch.uint8)

    def _levels(self, codes: torch.Tensor, elements: int) -> torch.Tensor:
        return scratch.floats[:elements].copy_(codes.view(torch.int8))

    def _validate_codes(self, codes: torch.Tensor, elements: int) -> None:  # noqa: ARG002 - a byte is a code
        if codes.view(torch.int8).amin().item() < -_LARGEST_CODE:
            raise CodecError(f"{self.name} payload contains the code -128, which is not in use")
