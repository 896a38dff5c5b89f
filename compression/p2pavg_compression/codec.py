"""The interface of all codecs, between tensors and bytes.

A payload is the encoding of one flat float32 vector on the wire. It does not contain its codec, its length or
a codebook. The peers have agreed on all of these before, so a payload cannot ask for memory. Every number in
it is little-endian.
"""

import abc
import sys
from typing import TypeAlias

import torch

__all__ = ["MAX_MAGNITUDE", "BytesLike", "Codec", "CodecError"]

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
        """True if most elements of a vector decode to zero, so that what was left out has to be given again.

        An average of few such vectors means something only with error feedback.
        """
        return False

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
