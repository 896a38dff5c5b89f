"""The interface of all codecs, between tensors and bytes.

A payload is the encoding of one flat float32 vector on the wire. It does not contain its codec, its length or
a codebook. The peers have agreed on all of these before, so a payload cannot ask for memory. Every number in
it is little-endian.
"""

import abc
import math
import sys
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

if sys.byteorder != "little":
    # Codecs reinterpret the memory of a payload instead of parsing it, so they are as fast as a copy.
    raise ImportError(f"p2pavg_compression needs a little-endian host, this one is {sys.byteorder}-endian")

BytesLike: TypeAlias = bytes | bytearray | memoryview

MAX_MAGNITUDE: float = 2.0**100
"""The largest absolute value that an encoder accepts and a decoder returns.

Infinity is not the only number that destroys an average. A finite 1e38 does so too, and overflows when it is
multiplied by a weight. 2**100 is 1.3e30, which is beyond any gradient, and leaves a factor of 2**27 for weights
before float32 overflows.
"""


class CodecError(ValueError):
    """A payload that cannot be decoded (the sender's fault), or a value that cannot be encoded (the caller's)."""


class Codec(abc.ABC):
    """Turns flat float32 vectors into payloads and back.

    A codec is an immutable value: comparable, hashable, stateless, and safe to use from several threads at
    once. The same payload decodes to the same bits on every host. There is one exception, which a host must
    switch on: `torch.set_flush_denormal` replaces decoded numbers below 2**-126 by zero.
    """

    __slots__ = ()

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name on the wire, with all parameters, such as "fp16" or "blockwise8:64".

        Two codecs of the same name produce interchangeable payloads.
        """

    @property
    @abc.abstractmethod
    def granularity(self) -> int:
        """The number of elements that are encoded together.

        If a vector is cut at multiples of it and encoded in pieces, it decodes to the same bits as the whole.
        """

    @property
    def is_identity(self) -> bool:
        """True if a payload is the vector's own bytes, so that encoding and decoding are copies."""
        return False

    @property
    def is_sparse(self) -> bool:
        """True if most elements of a vector decode to zero, and an average keeps only some of what was sent.

        What was left out has to be given again.
        """
        return False

    @property
    def averages(self) -> "Codec":
        """The codec of averages of vectors that this codec has encoded; it has the same granularity.

        It is this codec itself, or with a sparse one a codec that keeps more values: contributors choose different
        ones, and what an average does not keep was sent in vain.
        """
        return self

    @property
    def needs_feedback(self) -> bool:
        """True if so much of a vector is left out that an average means something only with error feedback."""
        return self.is_sparse

    def check_device(self, device: torch.device) -> None:  # noqa: B027 - most codecs need no more than torch
        """Raise ImportError if vectors on a device cannot be encoded, since a package is not installed.

        A caller that asks before it begins has lost nothing yet.
        """

    @abc.abstractmethod
    def encoded_nbytes(self, elements: int) -> int:
        """Return the exact size in bytes of the payload of `elements` elements.

        Raises ValueError if `elements` is negative.
        """

    @abc.abstractmethod
    def encode(self, values: torch.Tensor, out: memoryview | bytearray | None = None) -> memoryview:
        """Encode `values` into `out`, or into a new buffer.

        `values`: float32, one-dimensional, contiguous, on the CPU or on a CUDA device. It is never changed. A
        CUDA tensor must be ready on the calling thread's current stream. The call returns when the payload is
        in host memory.
        `out`: writable and exactly `encoded_nbytes(values.numel())` bytes long.
        Returns a writable view of the payload, with items of one byte.

        Raises CodecError if `values` contains NaN, an infinity or a number beyond MAX_MAGNITUDE. Raises
        ValueError for a tensor or buffer of the wrong kind or size. After an error, the content of `out` is
        unspecified.
        """

    @abc.abstractmethod
    def decode(self, payload: BytesLike, elements: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Decode the payload of `elements` elements into `out`, or into a new tensor, and return it.

        `payload`: contiguous bytes, read-only or writable, aligned or not. It is not trusted.
        `out`: float32, one-dimensional, contiguous, on the CPU, of `elements` elements.

        Raises CodecError, before it writes to `out`, if no encoder could have written `payload`: its length is
        wrong, or a number is not finite or beyond MAX_MAGNITUDE. Raises ValueError for an `out` of the wrong
        kind.
        """

    @abc.abstractmethod
    def accumulate(self, payload: BytesLike, accumulator: torch.Tensor, weight: float) -> None:
        """Add `weight` times the decoded payload to `accumulator`, in place.

        `accumulator`: float32, one-dimensional, contiguous, on the CPU. Its length is the payload's number of
        elements.
        `weight`: finite in float32. The caller ensures that the sum stays finite.

        Raises the exceptions of `decode`, and ValueError for a bad weight. After an error, `accumulator` is
        unchanged.
        """


# Views of bytes as tensors, without copies, and checks of a caller's arguments.

CPU = torch.device("cpu")


class _SharedMemory:
    """Exposes a buffer to numpy as writable, even if it is read-only.

    torch warns once in each process when it wraps read-only memory, and the warning cannot be switched off.
    Nothing here writes to a tensor made from a payload, so the warning would be noise. The array keeps this
    object alive, and this object keeps the buffer alive.
    """

    __slots__ = ("__array_interface__", "buffer")

    def __init__(self, buffer: memoryview) -> None:
        address = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
        self.buffer = buffer
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (buffer.nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def read_only_bytes(payload: BytesLike) -> torch.Tensor:
    """Return `payload` as a uint8 tensor (nbytes,) that shares its memory. Do not write to the tensor.

    Raises ValueError if `payload` is not contiguous.
    """
    view = _flat_view(payload, "payload")
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=CPU)
    return torch.from_numpy(np.asarray(_SharedMemory(view)))


def writable_bytes(out: memoryview | bytearray | None, nbytes: int) -> memoryview:
    """Return `out` as a flat view of bytes, or a new buffer of `nbytes` bytes.

    Raises ValueError if `out` is read-only, not contiguous or not `nbytes` bytes long.
    """
    if out is None:
        # Unlike bytearray(nbytes), numpy does not write zeros first.
        return np.empty(nbytes, dtype=np.uint8).data
    view = _flat_view(out, "out")
    if view.readonly:
        raise ValueError("out is read-only")
    if view.nbytes != nbytes:
        raise ValueError(f"out has {view.nbytes} bytes, the payload needs exactly {nbytes}")
    return view


def _flat_view(buffer: BytesLike, argument: str) -> memoryview:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError(f"{argument} is not contiguous")
    if view.nbytes == 0:
        # memoryview.cast refuses shapes with a zero in them.
        return memoryview(b"") if view.readonly else memoryview(bytearray())
    return view.cast("B")


def typed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bytes `raw` (uint8, 1-D) as numbers of `dtype`: a view, or a copy if they are not aligned."""
    return (raw if is_aligned(raw, dtype) else raw.clone()).view(dtype)


def is_aligned(raw: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the address of `raw` is aligned for numbers of `dtype`."""
    return raw.data_ptr() % dtype.itemsize == 0


def check_flat(tensor: torch.Tensor, argument: str, *, cuda: bool = False) -> None:
    """Raise ValueError unless `tensor` is float32, 1-D, contiguous, and on the CPU (or on a GPU, with `cuda`)."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{argument} must be a tensor, got {type(tensor).__name__}")  # noqa: TRY004 - as documented
    if tensor.dtype is not torch.float32:
        raise ValueError(f"{argument} must be float32, got {tensor.dtype}")
    if tensor.device.type not in (("cpu", "cuda") if cuda else ("cpu",)):
        where = "the CPU or a CUDA device" if cuda else "the CPU"
        raise ValueError(f"{argument} must be on {where}, is on {tensor.device}")
    if tensor.layout is not torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{argument} must be one-dimensional and contiguous, has shape {tuple(tensor.shape)}"
        )


# The base class of all codecs here: it checks the arguments once, so that its hooks may rely on them.

_LARGEST_FLOAT32 = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True, slots=True)
class CheckedCodec(Codec):
    """Implements the public methods of `Codec` with a few hooks. A subclass is a dataclass of its parameters.

    The hooks get arguments of the right kind, shape and length, with at least one element, and never an
    autograd graph.
    """

    kind: ClassVar[str]
    """The name without parameters."""

    @property
    def name(self) -> str:
        return ":".join([self.kind, *(str(getattr(self, field.name)) for field in fields(self))])

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
