"""The base class of all codecs here: it checks the arguments once, so that its hooks may rely on them."""

import abc
import math

import torch

from .buffers import CPU, check_flat, read_only_bytes, writable_bytes
from .codec import MAX_MAGNITUDE, BytesLike, Codec, CodecError

__all__ = ["CheckedCodec", "check_block_size", "check_encodable"]

_LARGEST_FLOAT32 = float(torch.finfo(torch.float32).max)


class CheckedCodec(Codec):
    """Implements the public methods of `Codec` with a few hooks.

    The hooks get arguments of the right kind, shape and length, with at least one element, and never an
    autograd graph.
    """

    __slots__ = ()

    @abc.abstractmethod
    def _payload_nbytes(self, elements: int) -> int:
        """Return the size of the payload of `elements` >= 1 elements."""

    @abc.abstractmethod
    def _encode(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Write the payload of `values` (float32 (n,), any device) to `target` (uint8, CPU)."""

    @abc.abstractmethod
    def _validate(self, source: torch.Tensor, elements: int) -> None:
        """Raise CodecError unless all numbers to which `source` (uint8, CPU) decodes are within bounds."""

    @abc.abstractmethod
    def _decode(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Decode the validated `source` into `out` (float32 (n,), CPU)."""

    @abc.abstractmethod
    def _accumulate(self, source: torch.Tensor, accumulator: torch.Tensor, weight: float) -> None:
        """Add `weight` times the decoded `source`, which is validated, to `accumulator` (float32 (n,), CPU)."""

    def encoded_nbytes(self, elements: int) -> int:
        if elements < 0:
            raise ValueError(f"elements must not be negative, got {elements}")
        return self._payload_nbytes(elements) if elements else 0

    def encode(self, values: torch.Tensor, out: memoryview | bytearray | None = None) -> memoryview:
        check_flat(values, "values", cuda=True)
        payload = writable_bytes(out, self.encoded_nbytes(values.numel()))
        if payload.nbytes:
            with torch.no_grad():
                self._encode(values, torch.frombuffer(payload, dtype=torch.uint8))
        return payload

    def decode(self, payload: BytesLike, elements: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is not None:
            check_flat(out, "out")
            if out.numel() != elements:
                raise ValueError(f"out has {out.numel()} elements, expected {elements}")
        with torch.no_grad():
            source = self._validated(payload, elements)
            decoded = torch.empty(elements, dtype=torch.float32, device=CPU) if out is None else out
            if elements:
                self._decode(source, decoded)
        return decoded

    def accumulate(self, payload: BytesLike, accumulator: torch.Tensor, weight: float) -> None:
        check_flat(accumulator, "accumulator")
        if not abs(weight) <= _LARGEST_FLOAT32:
            raise ValueError(f"weight must be finite in float32, got {weight}")
        with torch.no_grad():
            source = self._validated(payload, accumulator.numel())
            if accumulator.numel():
                self._accumulate(source, accumulator, float(weight))

    def _validated(self, payload: BytesLike, elements: int) -> torch.Tensor:
        """Check that a payload decodes to `elements` numbers within bounds. Return its bytes (uint8)."""
        expected, received = self.encoded_nbytes(elements), memoryview(payload).nbytes
        if received != expected:
            raise CodecError(
                f"{self.name} payload of {elements} elements has {received} bytes, expected {expected}"
            )
        source = read_only_bytes(payload)
        if elements:
            self._validate(source, elements)
        return source


def check_encodable(largest: torch.Tensor, values: torch.Tensor, start: int) -> None:
    """Raise CodecError unless each of `values` is finite and within MAX_MAGNITUDE.

    `largest` holds maxima of the absolute values. amax propagates NaN, and a NaN fails the comparison.
    `start` is the index of the first of `values` in the caller's vector. The message names the first bad
    element by its index there.
    """
    if largest.amax().item() <= MAX_MAGNITUDE:
        return
    index = int((~(values.abs() <= MAX_MAGNITUDE)).flatten().nonzero()[0].item())
    value = values.flatten()[index].item()
    reason = f"its magnitude exceeds {MAX_MAGNITUDE:g}" if math.isfinite(value) else "it is not finite"
    raise CodecError(f"cannot encode element {start + index}, {value}: {reason}")


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless GPU kernels exist for `block_size`."""
    if not (isinstance(block_size, int) and 64 <= block_size <= 4096 and block_size.bit_count() == 1):
        raise ValueError(f"block_size must be a power of two from 64 to 4096, got {block_size!r}")
