"""The interface between tensors and bytes: what every codec promises.

A payload is what one flat float32 vector becomes on the wire. It carries neither its codec, nor its length,
nor a codebook: all of these come from what the peers agreed on before, so a payload cannot ask for memory.
Every number in it is little-endian.
"""

import abc
import sys
from typing import TypeAlias

import torch

__all__ = ["MAX_MAGNITUDE", "BytesLike", "Codec", "CodecError"]

if sys.byteorder != "little":
    # Codecs reinterpret a payload's memory instead of parsing it, which makes them as fast as a copy.
    raise ImportError(f"p2pavg_compression needs a little-endian host, this one is {sys.byteorder}-endian")

BytesLike: TypeAlias = bytes | bytearray | memoryview

MAX_MAGNITUDE: float = 2.0**100
"""No encoder takes and no decoder returns a number of larger absolute value.

Infinity is not the only number that destroys an average: a finite 1e38 does it as well, and overflows as
soon as it is multiplied by a weight. 2**100 is 1.3e30, beyond any gradient, and leaves a factor of 2**27
for weights below the largest float32.
"""


class CodecError(ValueError):
    """A payload that does not decode (the sender's fault), or a value that cannot be encoded (ours)."""


class Codec(abc.ABC):
    """Turns flat float32 vectors into payloads and back.

    A codec is an immutable value: comparable, hashable, free of state, and safe to use from several threads
    at once. The same payload decodes to the same bits on every host. (The one exception that a host can
    choose is `torch.set_flush_denormal`: it replaces decoded numbers below 2**-126 by zero.)
    """

    __slots__ = ()

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The identity on the wire with all parameters, such as "fp16" or "blockwise8:64".

        Two codecs of one name produce interchangeable payloads.
        """

    @property
    @abc.abstractmethod
    def granularity(self) -> int:
        """Elements that are encoded together.

        A vector cut at multiples of it and encoded piece by piece decodes to the same bits as the whole.
        """

    @property
    def is_identity(self) -> bool:
        """Whether a payload is the vector's own bytes, so that encoding and decoding are copies."""
        return False

    @abc.abstractmethod
    def encoded_nbytes(self, elements: int) -> int:
        """The exact size in bytes of the payload of `elements` elements.

        Raises ValueError if `elements` is negative.
        """

    @abc.abstractmethod
    def encode(self, values: torch.Tensor, out: memoryview | bytearray | None = None) -> memoryview:
        """Encode `values` into `out`, or into a new buffer.

        `values`: float32, one-dimensional, contiguous, on the CPU or on a CUDA device; it is read and never
        changed. A CUDA tensor must be ready on the calling thread's current stream; the call returns once the
        payload is in host memory.
        `out`: writable and exactly `encoded_nbytes(values.numel())` bytes long.
        Returns a writable view of the payload, one byte an item.

        Raises CodecError if `values` contains NaN, an infinity or a number beyond MAX_MAGNITUDE, ValueError
        for a tensor or buffer of the wrong kind or size. After an error the content of `out` is unspecified.
        """

    @abc.abstractmethod
    def decode(self, payload: BytesLike, elements: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Decode the payload of `elements` elements into `out`, or into a new tensor, and return it.

        `payload`: contiguous bytes, read-only or not, aligned or not. It is not trusted.
        `out`: float32, one-dimensional, contiguous, on the CPU, of `elements` elements.

        Raises CodecError, before `out` is touched, if `payload` is not one that an encoder could have
        written: wrong length, or numbers that are not finite or beyond MAX_MAGNITUDE. ValueError for an `out`
        of the wrong kind.
        """

    @abc.abstractmethod
    def accumulate(self, payload: BytesLike, accumulator: torch.Tensor, weight: float) -> None:
        """Add `weight` times the decoded payload to `accumulator`, in place.

        `accumulator`: float32, one-dimensional, contiguous, on the CPU; its length is the payload's element
        count.
        `weight`: finite in float32. The caller sees to it that the sum stays finite.

        Raises what `decode` raises, ValueError for a bad weight; in either case `accumulator` is as it was.
        """
