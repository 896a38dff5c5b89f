"""The conformance suite finds broken codecs: for each promise, one codec breaks it on purpose."""

import contextlib
import struct
import threading
from collections.abc import Callable

import pytest
import torch

from p2pavg_compression import BytesLike, Codec, CodecError, Fp32, Int8, check_codec

SHARED = torch.zeros(1 << 20)
TWO_THREADS = threading.Barrier(2)


class Wrapped(Codec):
    """A codec of int8 in blocks of 64, with methods that a subclass can override."""

    inner = Int8(block_size=64)
    granularity = 64
    name = "wrapped"

    def encoded_nbytes(self, elements: int) -> int:
        return self.inner.encoded_nbytes(elements)

    def encode(self, values: torch.Tensor, out: memoryview | bytearray | None = None) -> memoryview:
        return self.inner.encode(values, out)

    def decode(self, payload: BytesLike, elements: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner.decode(payload, elements, out)

    def accumulate(self, payload: BytesLike, accumulator: torch.Tensor, weight: float) -> None:
        self.inner.accumulate(payload, accumulator, weight)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


def test_a_custom_codec_passes() -> None:
    check_codec(Wrapped())


class NotEqual(Wrapped):
    __hash__ = Wrapped.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class WritesOtherBytesToOut(Wrapped):
    def encode(self, values: torch.Tensor, out: memoryview | bytearray | None = None) -> memoryview:
        payload = self.inner.encode(values)
        return payload if out is None else self.inner.encode(values.neg(), out)


class CopiesOut(Wrapped):
    def decode(self, payload: BytesLike, elements: int, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner.decode(payload, elements, None if out is None else out.clone())


class TakesShortPayloads(Wrapped):
    def decode(self, payload: BytesLike, elements: int, out: torch.Tensor | None = None) -> torch.Tensor:
        padded = bytes(payload).ljust(self.encoded_nbytes(min(elements, 1 << 20)), b"\0")
        return self.inner.decode(padded, elements, out)


class TakesNan(Wrapped):
    def encode(self, values: torch.Tensor, out: memoryview | bytearray | None = None) -> memoryview:
        return self.inner.encode(values.nan_to_num() if values.isnan().any() else values, out)


class ChangesInput(Wrapped):
    def encode(self, values: torch.Tensor, out: memoryview | bytearray | None = None) -> memoryview:
        payload = self.inner.encode(values, out)
        values.mul_(2)
        return payload


class LosesZeros(Wrapped):
    def encode(self, values: torch.Tensor, out: memoryview | bytearray | None = None) -> memoryview:
        return self.inner.encode(values + 0.5 if values.is_contiguous() else values, out)


class ForgetsWeight(Wrapped):
    def accumulate(self, payload: BytesLike, accumulator: torch.Tensor, weight: float) -> None:
        self.inner.accumulate(payload, accumulator, weight and 1.0)


class AccumulatesBeforeItValidates(Wrapped):
    def accumulate(self, payload: BytesLike, accumulator: torch.Tensor, weight: float) -> None:
        accumulator[:1].add_(1.0)
        self.inner.accumulate(payload, accumulator, weight)


class DependsOnThePosition(Wrapped):
    granularity = 1


class SharesScratchBetweenThreads(Wrapped):
    def decode(self, payload: BytesLike, elements: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if elements > len(SHARED) or out is not None:
            return self.inner.decode(payload, elements, out)
        shared = SHARED[:elements].copy_(self.inner.decode(payload, elements))
        if threading.current_thread() is not threading.main_thread():
            with contextlib.suppress(threading.BrokenBarrierError):
                TWO_THREADS.wait(timeout=5)  # so that the second call has overwritten the result of the first
        return shared.clone()


class DecodesInfinity(Codec):
    """A codec of fp32 that does not check the numbers."""

    granularity = 1
    name = "unchecked"
    __eq__ = Wrapped.__eq__
    __hash__ = Wrapped.__hash__

    def encoded_nbytes(self, elements: int) -> int:
        return Fp32().encoded_nbytes(elements)

    def encode(self, values: torch.Tensor, out: memoryview | bytearray | None = None) -> memoryview:
        return Fp32().encode(values, out)

    def decode(self, payload: BytesLike, elements: int, out: torch.Tensor | None = None) -> torch.Tensor:
        try:
            return Fp32().decode(payload, elements, out)
        except CodecError:
            if len(payload) != 4 * elements:
                raise
            decoded = torch.tensor(struct.unpack(f"<{elements}f", payload))
            return decoded if out is None else out.copy_(decoded)

    def accumulate(self, payload: BytesLike, accumulator: torch.Tensor, weight: float) -> None:
        Fp32().accumulate(payload, accumulator, weight)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (NotEqual, "must equal its copy"),
        (WritesOtherBytesToOut, "encode differs at byte offset 0 of its buffer"),
        (CopiesOut, "decode did not return out"),
        (TakesShortPayloads, "did not raise CodecError"),
        (TakesNan, "encoding nan at element 0 did not raise CodecError"),
        (ChangesInput, "encode changed its input"),
        (LosesZeros, "did not stay zero"),
        (ForgetsWeight, r"accumulate with weight -0.5 is not \+= weight"),
        (AccumulatesBeforeItValidates, "a refused payload changed the accumulator"),
        (DependsOnThePosition, "the parts decode to other numbers"),
        (SharesScratchBetweenThreads, "threads disturb each other"),
        (DecodesInfinity, "not all finite"),
    ],
)
def test_broken_codec_is_found(broken: Callable[[], Codec], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_codec(broken())


def test_wrong_size_is_found() -> None:
    class WrongSize(Wrapped):
        def encoded_nbytes(self, elements: int) -> int:
            return self.inner.encoded_nbytes(elements) + (elements == 1000)

    with pytest.raises(AssertionError, match="encoded_nbytes says"):
        check_codec(WrongSize())
