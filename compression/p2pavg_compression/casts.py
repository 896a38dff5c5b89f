"""Codecs that convert each number separately: fp32 unchanged, fp16 and bf16 rounded to nearest even."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .codec import CheckedCodec, CodecError, check_encodable, is_aligned, typed
from .scratch import CHUNK_ELEMENTS, CUDA_CHUNK_ELEMENTS, chunk_ranges, copy_to_host, scratch


class _Cast(CheckedCodec):
    """A codec whose payload is the vector in `dtype`, one number after the other.

    `largest_bits` are the bits of the largest number that is accepted. The bits of numbers without their sign,
    read as integers, have the order of the numbers, with infinity and NaN above all others. So one integer
    maximum checks a chunk.
    """

    __slots__ = ()
    dtype: ClassVar[torch.dtype]
    largest_bits: ClassVar[int]

    @property
    def granularity(self) -> int:
        return 1

    def _payload_nbytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def _encode(self, values: torch.Tensor, target: torch.Tensor) -> None:
        width = self.dtype.itemsize
        chunk_elements = CUDA_CHUNK_ELEMENTS if values.is_cuda else CHUNK_ELEMENTS
        for start, stop in chunk_ranges(values.numel(), 1, chunk_elements):
            chunk = values[start:stop]
            check_encodable(torch.stack((chunk.amax(), chunk.amin().neg_())), chunk, start)
            self._write(self._saturated(chunk), target[start * width : stop * width])

    def _saturated(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return `chunk` with numbers beyond the range of `dtype` replaced by its largest numbers."""
        return chunk

    def _write(self, chunk: torch.Tensor, target: torch.Tensor) -> None:
        if chunk.is_cuda:
            copy_to_host(chunk.to(self.dtype), target)
        elif is_aligned(target, self.dtype):
            target.view(self.dtype).copy_(chunk)
        else:
            target.copy_(chunk.to(self.dtype).view(torch.uint8))

    def _validate(self, source: torch.Tensor, elements: int) -> None:
        integer = torch.int32 if self.dtype.itemsize == 4 else torch.int16
        without_sign = torch.iinfo(integer).max
        magnitudes = scratch.integers.view(integer)
        for start, stop in chunk_ranges(elements, 1, CHUNK_ELEMENTS):
            bits = self._read(source, start, stop).view(integer)
            largest = torch.bitwise_and(bits, without_sign, out=magnitudes[: stop - start]).amax()
            if largest.item() > self.largest_bits:
                raise CodecError(f"{self.name} payload contains a number that is not finite or too large")

    def _decode(self, source: torch.Tensor, out: torch.Tensor) -> None:
        for start, stop in chunk_ranges(out.numel(), 1, CHUNK_ELEMENTS):
            out[start:stop].copy_(self._read(source, start, stop))

    def _accumulate(self, source: torch.Tensor, accumulator: torch.Tensor, weight: float) -> None:
        for start, stop in chunk_ranges(accumulator.numel(), 1, CHUNK_ELEMENTS):
            numbers = scratch.floats[: stop - start].copy_(self._read(source, start, stop))
            accumulator[start:stop].add_(numbers, alpha=weight)

    def _read(self, source: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        width = self.dtype.itemsize
        return typed(source[start * width : stop * width], self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32(_Cast):
    """The numbers unchanged: 4 bytes for each element, exact."""

    kind: ClassVar[str] = "fp32"
    dtype: ClassVar[torch.dtype] = torch.float32
    largest_bits: ClassVar[int] = 0x7180_0000  # 2**100

    @property
    def is_identity(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16(_Cast):
    """IEEE half precision: 2 bytes for each element, 11 significant bits from 6.1e-5 to 65504.

    Larger numbers become 65504 with their sign. Smaller numbers lose bits, and become zero below 3.0e-8.
    """

    kind: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    largest_bits: ClassVar[int] = 0x7BFF  # 65504

    def _saturated(self, chunk: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(torch.float16).max
        if chunk.is_cuda:
            return chunk.clamp(-limit, limit)
        return torch.clamp(chunk, -limit, limit, out=scratch.floats[: chunk.numel()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16(_Cast):
    """The upper half of float32: 2 bytes for each element, 8 significant bits over the range of float32."""

    kind: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    largest_bits: ClassVar[int] = 0x7180  # 2**100
