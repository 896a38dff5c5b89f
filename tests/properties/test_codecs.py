"""Codecs over arbitrary numbers and arbitrary bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pavg_compression import (
    KNOWN_CODECS,
    MAX_MAGNITUDE,
    NF4,
    Bf16,
    Blockwise8,
    Codec,
    CodecError,
    Fp16,
    Fp32,
    Int4,
    Int8,
    Ternary,
    TopK,
    resolve_codec,
)
from p2pavg_compression.kernels import LEVELS

CODECS: list[Codec] = [
    *(resolve_codec(name) for name in KNOWN_CODECS),
    Int8(block_size=64),
    Blockwise8(block_size=1024),
    Ternary(block_size=64),
    TopK(chunk=64, k=8),
    TopK(chunk=256, k=16, bits=1),
]
TINY = 2.0**-126

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)

# Numbers of one magnitude, and mixed numbers of all magnitudes from denormal to the largest.
magnitudes = st.one_of(
    st.floats(-10.0, 10.0, width=32),
    st.floats(-MAX_MAGNITUDE, MAX_MAGNITUDE, width=32),
    st.floats(-(2.0**-120), 2.0**-120, width=32),
    st.sampled_from([0.0, -0.0, TINY, -TINY, 2.0**-149, MAX_MAGNITUDE, -MAX_MAGNITUDE, 65504.0, 65520.0]),
)


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """Draw up to 700 numbers: a few values, repeated in blocks of drawn scales."""
    pattern = draw(st.lists(magnitudes, min_size=0, max_size=40))
    repeats = draw(st.integers(1, 18))
    values = torch.tensor(pattern * repeats, dtype=torch.float32)[: draw(st.integers(0, 700))]
    scale = 2.0 ** draw(st.integers(-60, 0))
    first = draw(st.integers(0, 700))
    values[first:] *= scale
    return values


def bound(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return the largest allowed error of each element, float64 (n,)."""
    exact = values.double().abs()
    match codec:
        case Fp32():
            return torch.zeros_like(exact)
        case Bf16():
            return exact * 2.0**-8 + 2.0**-133
        case Fp16():
            beyond = (exact - 65504.0).clamp(min=0.0)
            return torch.maximum(beyond, exact.clamp(max=65504.0) * 2.0**-11 + 2.0**-25)
        case Int8(block_size=size):
            return block_maxima(exact, size) * (0.5 / 127) * (1 + 2.0**-14) + 127 * TINY
        case Blockwise8(block_size=size):
            return blockwise8_bound(exact, block_maxima(exact, size)) + TINY
        case Int4(block_size=size):
            return block_maxima(exact, size) * (0.5 / 7) * (1 + 2.0**-14) + 7 * TINY
        case NF4(block_size=size):
            # Half of the widest gap between two levels, which is that from -1 to its neighbour.
            return block_maxima(exact, size) * ((1 - 0.6961928) / 2 + 2.0**-11) + TINY
        case Ternary(block_size=size) | TopK(chunk=size):
            return block_maxima(exact, size) * (1 + 2.0**-8) + TINY
    raise AssertionError(codec)


def block_maxima(magnitudes: torch.Tensor, size: int) -> torch.Tensor:
    """Return the maximum of each element's block."""
    padded = torch.nn.functional.pad(magnitudes, (0, -len(magnitudes) % size)).view(-1, size)
    return padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: len(magnitudes)]


def blockwise8_bound(magnitudes: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """Return half the gap between the levels around x / maximum, plus the error of half precision."""
    quotients = torch.where(maxima > 0, magnitudes / maxima, 0.0).clamp(max=1.0)
    levels = LEVELS[LEVELS >= 0].double()
    # The negative of every level but 1 is a level, so a negative number near the maximum is up to a whole gap
    # away from its level. Elsewhere, the distance is up to half of the gap that contains the rounded number.
    rounding = quotients * 2.0**-11 + 2.0**-24
    upper = torch.searchsorted(levels, (quotients + rounding).clamp(max=1.0)).clamp(1, len(levels) - 1)
    half_gap = (levels[upper] - levels[upper - 1]) / 2
    half_gap = torch.where(quotients > levels[-2] - rounding, levels[-1] - levels[-2], half_gap)
    return maxima * (half_gap + 2 * rounding)


@every_codec
@settings(max_examples=150, deadline=None)
@given(values=vectors())
def test_round_trip_error(codec: Codec, values: torch.Tensor) -> None:
    elements = values.numel()
    payload = codec.encode(values)
    assert payload.nbytes == codec.encoded_nbytes(elements)
    decoded = codec.decode(bytes(payload), elements)
    assert decoded.shape == (elements,)
    error = (decoded.double() - values.double()).abs()
    assert bool((error <= bound(codec, values)).all())
    assert bool((decoded[values == 0] == 0).all())
    assert bool((decoded.abs() <= MAX_MAGNITUDE).all())
    # The sign of a number never changes.
    assert bool((decoded.sign() * values.sign() >= 0).all())


@every_codec
@settings(max_examples=60, deadline=None)
@given(values=vectors())
def test_decoded_values_can_be_encoded_again(codec: Codec, values: torch.Tensor) -> None:
    """A peer that forwards decoded numbers can always encode them, and its payload is accepted."""
    decoded = codec.decode(codec.encode(values), values.numel())
    codec.decode(codec.encode(decoded), values.numel())


@st.composite
def hostile(draw: st.DrawFn, codec: Codec) -> tuple[bytes, int]:
    """Draw bytes and an element count: noise, mostly of the right length, or a changed valid payload."""
    elements = draw(st.integers(0, 300))
    nbytes = codec.encoded_nbytes(elements)
    if draw(st.booleans()):
        return draw(st.binary(min_size=nbytes, max_size=nbytes)), elements
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=2 * nbytes + 8)), elements
    payload = bytearray(codec.encode(torch.linspace(-3, 3, elements)))
    for _ in range(draw(st.integers(0, 4)) if nbytes else 0):
        payload[draw(st.integers(0, nbytes - 1))] = draw(st.integers(0, 255))
    return bytes(payload), elements


@every_codec
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_arbitrary_bytes_decode_to_bounded_numbers_or_are_refused(codec: Codec, data: st.DataObject) -> None:
    payload, elements = data.draw(hostile(codec))
    before = torch.linspace(-1, 1, elements)
    accumulator = before.clone()
    try:
        decoded = codec.decode(payload, elements)
    except CodecError:
        with pytest.raises(CodecError):
            codec.accumulate(payload, accumulator, 0.5)
        assert torch.equal(accumulator, before)
        return
    assert decoded.dtype is torch.float32
    assert decoded.shape == (elements,)
    assert bool((decoded.abs() <= MAX_MAGNITUDE).all())
    codec.accumulate(payload, accumulator, 0.5)
    assert bool(accumulator.isfinite().all())
