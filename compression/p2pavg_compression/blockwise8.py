"""Dynamic 8-bit codes with a scale for every block."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

import torch

from .blocks import BlockCodec, largest_of_blocks, reciprocals_of_scales
from .codec import typed
from .kernels import CODE_OF_HALF, LEVEL_PAIRS, LEVELS, ZERO_CODE
from .scratch import scratch

_MISSING = "blockwise8 encodes CUDA tensors with bitsandbytes: pip install 'p2pavg[cuda]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blockwise8(BlockCodec):
    """Blockwise dynamic quantization: the level nearest to x / scale, with scale = max|x| of the block.

    A payload has 1 byte for each element and 4 for each block. Source: Dettmers et al., "8-bit Optimizers via
    Block-wise Quantization" (2022), section 2; `dynamic_map` has the levels. Exact zeros stay zeros, and
    elements keep their magnitude down to 2.8e-7 of their block's maximum.

    On the CPU, x / scale is rounded to half precision, and its 16 bits are looked up in a table. That is about
    eight times as fast as the CPU encoder of bitsandbytes. A number near the middle between two levels may get
    the second nearest of them. On CUDA, the codes are those of bitsandbytes' kernel. Both have the same wire
    format. On CUDA, `encode` raises ImportError if bitsandbytes is not installed.

    `block_size`: a power of two from 64 to 4096.
    """

    largest_scale_bits: ClassVar[int] = 0x7180_0000  # 2**100; no level exceeds 1
    kind: ClassVar[str] = "blockwise8"
    has_kernel: ClassVar[bool] = True
    block_size: int = 64

    def check_device(self, device: torch.device) -> None:
        # Found, and not imported: that takes seconds, and a later encode does it in a thread of its own.
        if device.type == "cuda" and find_spec("bitsandbytes") is None:
            raise ImportError(_MISSING)

    def _quantize(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _quantize_cuda(rows, start) if rows.is_cuda else _quantize_cpu(rows, start)

    def _levels(self, codes: torch.Tensor, elements: int) -> torch.Tensor:
        levels = scratch.floats[:elements]
        even = elements - elements % 2
        pairs = scratch.integers[: even // 2].copy_(typed(codes[:even], torch.uint16))
        torch.index_select(LEVEL_PAIRS, 0, pairs, out=scratch.floats.view(torch.int64)[: even // 2])
        if even < elements:
            levels[even] = LEVELS[int(codes[even].item())]
        return levels

    def _validate_codes(self, codes: torch.Tensor, elements: int) -> None:
        """Accept every code, because each of the 256 codes stands for a level."""


def _quantize_cpu(rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    elements = rows.numel()
    scales, work = largest_of_blocks(rows, start)
    torch.mul(rows, reciprocals_of_scales(scales), out=work)
    halves = scratch.halves[:elements].copy_(work.view(-1))
    indices = scratch.integers[:elements].copy_(halves.view(torch.uint16))
    return scales, CODE_OF_HALF.index_select(0, indices).view_as(rows)


def _quantize_cuda(rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Importing bitsandbytes takes seconds and about 100 MB, so hosts without a GPU do not import it.
    try:
        from bitsandbytes.functional import quantize_blockwise
    except ModuleNotFoundError as error:
        raise ImportError(_MISSING) from error

    # The kernel ignores NaN in the maximum and silently gives it a code. So the maximum is computed here too.
    scales, _ = largest_of_blocks(rows, start)
    codes, _ = quantize_blockwise(
        rows.view(-1), code=LEVELS.to(rows.device), blocksize=rows.shape[1], nested=False
    )
    # As on the CPU, zeros stay zeros. A block without a finite reciprocal, for which the kernel's codes are
    # meaningless, becomes zeros.
    is_zero = (rows == 0.0).logical_or_(reciprocals_of_scales(scales) == 0.0)
    return scales, codes.view_as(rows).masked_fill_(is_zero, ZERO_CODE)
