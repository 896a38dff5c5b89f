"""Codecs with a scale for each block of elements, and a code of few bits for each element.

Legend: n elements, B elements in a block, R = ceil(n / B) blocks.

A payload is R scales (float32), zeros up to a multiple of 64 bytes, and the codes: one byte each, or several in a byte
if a subclass packs them. A short last block has a scale like any other. Scales come first, so that they are checked
before any code is read. If the payload begins at a cache line, so do the codes.
"""

import abc
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch.autograd.graph import increment_version

from .codec import CPU, CheckedCodec, CodecError, check_encodable, is_aligned, typed
from .kernels import Kernel, kernels
from .scratch import CHUNK_ELEMENTS, CUDA_CHUNK_ELEMENTS, chunk_ranges, copy_to_host, default_stream, scratch

_ALIGNMENT = 64
SMALLEST_NORMAL = 2.0**-126


class BlockCodec(CheckedCodec):
    """The layout, the chunks and the scales. A subclass defines the meaning of the codes."""

    __slots__ = ()
    block_size: int
    largest_scale_bits: ClassVar[int]
    """The bits of the largest scale (float32) that is accepted. No code exceeds MAX_MAGNITUDE with it."""
    has_kernel: ClassVar[bool] = False
    """True if `loops.py` has compiled loops under the name of this kind."""

    def __post_init__(self) -> None:
        size = self.block_size
        # The sizes for which GPU kernels exist.
        if not (isinstance(size, int) and 64 <= size <= 4096 and size.bit_count() == 1):
            raise ValueError(f"block_size must be a power of two from 64 to 4096, got {size!r}")

    @abc.abstractmethod
    def _quantize(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales (float32 (R,)) and codes (uint8 (R, B)) of `rows` (float32 (R, B)), on their device.

        On the CPU there are at most CHUNK_ELEMENTS elements, and the results may lie in scratch memory.
        `start` is the index of the first element of `rows` in the caller's vector. Raises CodecError for
        numbers that must not be encoded.
        """

    @abc.abstractmethod
    def _levels(self, codes: torch.Tensor, elements: int) -> torch.Tensor:
        """Return the values at scale 1 of a chunk's packed `codes` (uint8): float32 (elements,), in scratch memory."""

    @abc.abstractmethod
    def _validate_codes(self, codes: torch.Tensor, elements: int) -> None:
        """Raise CodecError if the packed `codes` (uint8) of `elements` elements are not what an encoder writes."""

    def _codes_nbytes(self, elements: int) -> int:
        """Return the bytes of the packed codes of so many elements from the beginning of a block."""
        return elements

    def _pack(self, codes: torch.Tensor, elements: int) -> torch.Tensor:
        """Return the packed codes of a chunk: of `codes` (uint8 (R, B)), those of its `elements` elements."""
        return codes.view(-1)[:elements]

    @property
    def granularity(self) -> int:
        return self.block_size

    def _payload_nbytes(self, elements: int) -> int:
        return self._codes_offset(elements) + self._codes_nbytes(elements)

    def _encode(self, values: torch.Tensor, target: torch.Tensor) -> None:
        scales, padding, codes = self._sections(target, values.numel())
        # The target may be used memory, and a receiver refuses padding that is not zero.
        padding.zero_()
        if values.is_cuda:
            with default_stream(values.device):
                self._encode_chunks(values, scales, codes, CUDA_CHUNK_ELEMENTS)
        # There is no kernel, or it has refused the values. Then these expressions raise the error that says why.
        elif not self._encode_compiled(values, scales, codes):
            self._encode_chunks(values, scales, codes, CHUNK_ELEMENTS)

    def _encode_compiled(self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> bool:
        """Return whether a kernel has encoded `values`. It refuses what must not be encoded, without a reason."""
        kernel = self._kernel(values.numel())
        if kernel is None:
            return False
        # A payload may lie at any place of the caller's memory, and a kernel writes whole floats.
        in_place = is_aligned(scales, torch.float32)
        target = (
            scales.view(torch.float32)
            if in_place
            else torch.empty(scales.numel() // 4, dtype=torch.float32, device=CPU)
        )
        done = kernel.encode(_array(values), self.block_size, _array(target), _array(codes))
        if done and not in_place:
            scales.copy_(target.view(torch.uint8))
        return done

    def _kernel(self, elements: int) -> Kernel | None:
        """Return the kernel for work on so many elements, if there is one yet."""
        return kernels.find(self.kind, elements, self.agrees_with) if self.has_kernel else None

    def _encode_chunks(
        self, values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, chunk_elements: int
    ) -> None:
        copy = copy_to_host if values.is_cuda else _copy_on_host
        for start, stop in chunk_ranges(values.numel(), self.block_size, chunk_elements):
            chunk_scales, chunk_codes = self._quantize(self._rows(values[start:stop]), start)
            first = 4 * (start // self.block_size)
            copy(chunk_scales, scales[first : first + 4 * chunk_scales.numel()])
            copy(self._pack(chunk_codes, stop - start), codes[self._place(start, stop)])

    def _place(self, start: int, stop: int) -> slice:
        """Return where the packed codes of the elements of a chunk are. It begins with a block."""
        first = self._codes_nbytes(start)
        return slice(first, first + self._codes_nbytes(stop - start))

    def _rows(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return `chunk` as whole blocks (R, B). A short block is padded with zeros, which change no scale."""
        if chunk.numel() % self.block_size == 0:
            return chunk.view(-1, self.block_size)
        row = torch.zeros(1, self.block_size, dtype=torch.float32, device=chunk.device)
        row[0, : chunk.numel()] = chunk
        return row

    def _validate(self, source: torch.Tensor, elements: int) -> None:
        scales, padding, codes = self._sections(source, elements)
        # The bits of non-negative floats, read as integers, have the order of the floats. Infinity and NaN are
        # larger than any finite number, and a negative number is below zero.
        bits = typed(scales, torch.int32)
        if bits.amin().item() < 0 or bits.amax().item() > self.largest_scale_bits:
            raise CodecError(f"{self.name} payload has a scale that is negative, not finite or too large")
        if padding.any().item():
            raise CodecError(f"{self.name} payload has padding that is not zero")
        self._validate_codes(codes, elements)

    def _decode(self, source: torch.Tensor, out: torch.Tensor) -> None:
        scales, _, codes = self._sections(source, out.numel())
        if (kernel := self._kernel(out.numel())) is not None:
            kernel.decode(_array(typed(scales, torch.float32)), _array(codes), self.block_size, _array(out))
            _note_written(out)
        else:
            self._decode_chunks(scales, codes, out)

    def _decode_chunks(self, scales: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        for place, levels, column in self._chunks(scales, codes, out.numel()):
            torch.mul(levels, column, out=out[place].view_as(levels))

    def _accumulate(self, source: torch.Tensor, accumulator: torch.Tensor, weight: float) -> None:
        scales, _, codes = self._sections(source, accumulator.numel())
        if (kernel := self._kernel(accumulator.numel())) is not None:
            numbers = _array(typed(scales, torch.float32))
            kernel.accumulate(numbers, _array(codes), self.block_size, _array(accumulator), weight)
            _note_written(accumulator)
        else:
            self._accumulate_chunks(scales, codes, accumulator, weight)

    def _accumulate_chunks(
        self, scales: torch.Tensor, codes: torch.Tensor, accumulator: torch.Tensor, weight: float
    ) -> None:
        for place, levels, column in self._chunks(scales, codes, accumulator.numel()):
            accumulator[place].view_as(levels).addcmul_(levels, column, value=weight)

    def _chunks(
        self, scales: torch.Tensor, codes: torch.Tensor, elements: int
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield the place of each chunk, its values at scale 1, a row a block, and the scales of its blocks."""
        columns = typed(scales, torch.float32).view(-1, 1)
        for start, stop in chunk_ranges(elements, self.block_size, CHUNK_ELEMENTS):
            # A chunk begins with a block, and may end within one.
            column = columns[start // self.block_size : -(-stop // self.block_size)]
            levels = self._levels(codes[self._place(start, stop)], stop - start)
            yield slice(start, stop), levels.view(len(column), -1), column

    def agrees_with(self, kernel: Kernel) -> bool:
        """Return whether a kernel gives the bits of torch's expressions: for scales from denormal to the largest, for
        zeros, and for a short last block."""
        blocks = 250
        values = torch.randn(
            blocks * self.block_size - self.block_size // 2 - 1,
            generator=torch.Generator(device=CPU).manual_seed(0),
            dtype=torch.float32,
            device=CPU,
        )
        # Zeros of both signs: their bits differ, and a comparison of the numbers would not see it.
        values[::7], values[3::49] = 0.0, -0.0
        positions = torch.arange(values.numel(), device=CPU, dtype=torch.int64)
        exponents = positions // self.block_size - (blocks - 97)  # up to 2**96
        values.copy_(torch.ldexp(values.double(), exponents))  # float32 has no 2**-150
        expected = [
            torch.empty(4 * blocks, dtype=torch.uint8, device=CPU),
            torch.empty(self._codes_nbytes(values.numel()), dtype=torch.uint8, device=CPU),
        ]
        found = [each.clone() for each in expected]
        with torch.no_grad():
            self._encode_chunks(values, expected[0], expected[1], CHUNK_ELEMENTS)
            numbers, codes = _array(found[0].view(torch.float32)), _array(found[1])
            if not kernel.encode(_array(values), self.block_size, numbers, codes):
                return False
            payload = (expected[0], expected[1])
            # ``None`` stands for decoding. The weights include some that float32 has to round.
            for weight in (None, 1.0, 0.3, -2.5e-3):
                wanted, got = torch.ones_like(values), torch.ones_like(values)
                if weight is None:
                    self._decode_chunks(*payload, wanted)
                    kernel.decode(numbers, codes, self.block_size, _array(got))
                else:
                    wanted.copy_(values)
                    got.copy_(values)
                    self._accumulate_chunks(*payload, wanted, weight)
                    kernel.accumulate(numbers, codes, self.block_size, _array(got), weight)
                expected.append(wanted)
                found.append(got)
        # All bytes are compared: members that use kernels and members that do not must hold the same bits.
        return all(
            torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
            for ours, theirs in zip(expected, found, strict=True)
        )

    def _codes_offset(self, elements: int) -> int:
        blocks = -(-elements // self.block_size)
        return -(-4 * blocks // _ALIGNMENT) * _ALIGNMENT

    def _sections(
        self, payload: torch.Tensor, elements: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the bytes of the scales, of the padding and of the codes."""
        scales_end, offset = 4 * -(-elements // self.block_size), self._codes_offset(elements)
        return payload[:scales_end], payload[scales_end:offset], payload[offset:]


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the memory of `tensor`, which may be a parameter, as an array."""
    return tensor.detach().numpy()


def _note_written(tensor: torch.Tensor) -> None:
    """Tell autograd, which cannot see what a kernel writes, as torch's own operations do."""
    if not tensor.is_inference():
        increment_version(tensor)


def _copy_on_host(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source.view(torch.uint8))


def largest_of_blocks(rows: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest magnitude of each block (float32 (R,)), and memory of the shape of `rows`, to be overwritten.

    `rows` and `start` are those of :meth:`BlockCodec._quantize`. Raises CodecError for numbers that must not be
    encoded.
    """
    work = torch.empty_like(rows) if rows.is_cuda else scratch.floats[: rows.numel()].view_as(rows)
    largest = torch.abs(rows, out=work).amax(1)
    check_encodable(largest, rows, start)
    return largest, work


def reciprocals_of_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the factor of each block (float32 (R, 1)), and set scales that are too small for one to zero.

    The reciprocal of a number below the smallest normal one may overflow to infinity, and 0 * infinity is NaN.
    So such scales become 0 in `scales`, and their blocks become zeros. The error is below 2**-126, which no
    optimizer can tell from 0.
    """
    if scales.amin().item() >= SMALLEST_NORMAL:  # the common case, which saves three passes
        return scales.reciprocal().view(-1, 1)
    scales.masked_fill_(scales < SMALLEST_NORMAL, 0.0)
    return scales.reciprocal().masked_fill_(scales == 0.0, 0.0).view(-1, 1)
