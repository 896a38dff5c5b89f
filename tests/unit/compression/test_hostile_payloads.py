"""Payloads of strangers: each kind of bad payload is refused with a reason, and changes nothing."""

import struct

import pytest
import torch

from p2pavg_compression import (
    MAX_MAGNITUDE,
    NF4,
    Bf16,
    Blockwise8,
    BytesLike,
    Codec,
    CodecError,
    Fp16,
    Fp32,
    Int4,
    Int8,
    Ternary,
)

ELEMENTS = 300_100  # more than a chunk
BLOCK_CODECS: list[Codec] = [Int8(block_size=64), Blockwise8(block_size=4096), Int4(), NF4(), Ternary()]
NOT_FINITE = [float("nan"), -float("nan"), float("inf"), -float("inf")]
# The last three are finite: the largest number and the two next to 2**100.
BAD_BF16 = [0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x7F7F, 0x7181, 0xF181]


def refuses(codec: Codec, payload: BytesLike, reason: str, elements: int = ELEMENTS) -> None:
    accumulator = torch.arange(elements, dtype=torch.float32)
    out = accumulator.clone()
    with pytest.raises(CodecError, match=reason):
        codec.decode(payload, elements)
    with pytest.raises(CodecError, match=reason):
        codec.decode(payload, elements, out)
    with pytest.raises(CodecError, match=reason):
        codec.accumulate(payload, accumulator, 1.0)
    assert torch.equal(accumulator, torch.arange(elements, dtype=torch.float32))
    assert torch.equal(out, accumulator)


def payload_of(codec: Codec) -> bytearray:
    return bytearray(codec.encode(torch.linspace(-1, 1, ELEMENTS)))


@pytest.mark.parametrize("codec", BLOCK_CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("scale", [*NOT_FINITE, -1.0, -0.0, 1e38, MAX_MAGNITUDE * 1.0001])
def test_bad_scale(codec: Codec, scale: float) -> None:
    blocks = -(-ELEMENTS // codec.granularity)
    for block in (0, blocks // 2, blocks - 1):
        payload = payload_of(codec)
        payload[4 * block : 4 * block + 4] = struct.pack("<f", scale)
        refuses(codec, payload, "has a scale that is negative, not finite or too large")


@pytest.mark.parametrize("codec", BLOCK_CODECS, ids=lambda codec: codec.name)
def test_largest_scale_decodes_within_bounds_and_the_next_is_refused(codec: Codec) -> None:
    payload = bytearray(codec.encode(torch.tensor([MAX_MAGNITUDE])))
    assert codec.decode(payload, 1).item() == MAX_MAGNITUDE
    (bits,) = struct.unpack_from("<I", payload)
    struct.pack_into("<I", payload, 0, bits + 1)
    refuses(codec, payload, "has a scale that is", elements=1)


@pytest.mark.parametrize("codec", BLOCK_CODECS, ids=lambda codec: codec.name)
def test_padding_that_is_not_zero(codec: Codec) -> None:
    blocks = -(-ELEMENTS // codec.granularity)
    first, end = 4 * blocks, -(-4 * blocks // 64) * 64
    assert first < end
    for position in (first, end - 1):
        payload = payload_of(codec)
        payload[position] = 1
        refuses(codec, payload, "padding that is not zero")


def test_unused_int8_code() -> None:
    payload = payload_of(Int8())
    payload[-1] = 0x80
    refuses(Int8(), payload, "code -128")


@pytest.mark.parametrize("pair", [0x0F, 0xF0, 0x00])
@pytest.mark.parametrize("place", [-1, -ELEMENTS // 4, -ELEMENTS // 2])
def test_unused_int4_code(pair: int, place: int) -> None:
    payload = payload_of(Int4())
    payload[place] = pair
    refuses(Int4(), payload, "code -8")


@pytest.mark.parametrize(("codec", "zero"), [(Int4(), 8), (NF4(), 7)])
def test_four_bits_after_the_last_element(codec: Codec, zero: int) -> None:
    payload = bytearray(codec.encode(torch.ones(3)))
    assert payload[-1] & 0xF == zero
    for code in set(range(1, 16)) - {zero}:
        payload[-1] = payload[-1] & 0xF0 | code
        refuses(codec, payload, "does not end with the code of zero", elements=3)


@pytest.mark.parametrize("byte", [243, 255])
@pytest.mark.parametrize("place", [-1, -ELEMENTS // 5, -ELEMENTS // 10])
def test_bytes_that_are_not_five_ternary_codes(byte: int, place: int) -> None:
    payload = payload_of(Ternary())
    payload[place] = byte
    refuses(Ternary(), payload, "a byte that is not five codes")


@pytest.mark.parametrize(
    ("elements", "place"),
    [(ELEMENTS, 4736 + 51), (256, -1), (300, -1), (300, 64 + 51), (252, -1), (1, -1), (4, -1)],
)
def test_ternary_codes_beyond_the_end_of_a_block(elements: int, place: int) -> None:
    payload = bytearray(Ternary().encode(torch.ones(elements)))
    for more in (81, -81):  # the highest of the five codes
        wrong = payload.copy()
        wrong[place] += more
        refuses(Ternary(), wrong, "a code beyond the end of a block", elements=elements)


@pytest.mark.parametrize(
    ("codec", "number"),
    [
        *((Fp32(), struct.pack("<f", x)) for x in (*NOT_FINITE, 1e38, -1e38, 1.0001 * MAX_MAGNITUDE)),
        *((Fp16(), struct.pack("<e", x)) for x in NOT_FINITE),
        *((Bf16(), bits.to_bytes(2, "little")) for bits in BAD_BF16),
    ],
)
def test_bad_number(codec: Codec, number: bytes) -> None:
    for index in (0, ELEMENTS // 2, ELEMENTS - 1):
        payload = payload_of(codec)
        payload[index * len(number) : (index + 1) * len(number)] = number
        refuses(codec, payload, "not finite or too large")
