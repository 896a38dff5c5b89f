"""Every codec passes the conformance suite. Names and values identify codecs."""

import dataclasses

import pytest
import torch

from p2pavg_compression import (
    KNOWN_CODECS,
    MAX_MAGNITUDE,
    NF4,
    Bf16,
    Blockwise8,
    Codec,
    Fp16,
    Fp32,
    Int4,
    Int8,
    Ternary,
    TopK,
    check_codec,
    resolve_codec,
)

KNOWN: list[Codec] = [resolve_codec(name) for name in KNOWN_CODECS]
"""The known codecs with their defaults: a new one is in it by itself."""
VARIANTS: dict[str, Codec] = {
    "int8:64": Int8(block_size=64),
    "blockwise8:4096": Blockwise8(block_size=4096),
    "nf4:256": NF4(block_size=256),
    "ternary:64": Ternary(block_size=64),
    "ternary:4096": Ternary(block_size=4096),
    "topk:256:4:1": TopK(chunk=256, k=4, bits=1),
    "topk:64:16:2": TopK(chunk=64, k=16),
}
CODECS = {codec.name: codec for codec in KNOWN} | VARIANTS


@pytest.mark.parametrize("name", CODECS)
def test_codec_passes_the_conformance_suite(name: str) -> None:
    check_codec(CODECS[name])


@pytest.mark.parametrize("name", CODECS)
def test_name_resolves_to_an_equal_codec(name: str) -> None:
    codec = CODECS[name]
    assert codec.name == name
    assert resolve_codec(name) == codec
    assert hash(resolve_codec(name)) == hash(codec)


def test_codecs_of_different_names_are_different() -> None:
    assert len(set(CODECS.values())) == len(CODECS)


def test_resolve_fills_in_defaults() -> None:
    assert resolve_codec(None) == Fp32()
    assert resolve_codec("int8") == Int8(block_size=256)
    assert resolve_codec("blockwise8") == Blockwise8(block_size=64)
    assert resolve_codec("int4") == Int4(block_size=64)
    assert resolve_codec("nf4") == NF4(block_size=64)
    assert resolve_codec("ternary") == Ternary(block_size=256)
    assert resolve_codec("topk") == TopK(chunk=4096, k=64, bits=2)
    assert resolve_codec("topk:1024") == TopK(chunk=1024)
    assert resolve_codec("topk:1024:10") == TopK(chunk=1024, k=10)
    codec = Blockwise8(block_size=512)
    assert resolve_codec(codec) is codec


def test_known_codecs() -> None:
    assert {name: type(resolve_codec(name)) for name in KNOWN_CODECS} == dict(KNOWN_CODECS)
    known = ["fp32", "fp16", "bf16", "int8", "blockwise8", "int4", "nf4", "ternary", "topk"]
    assert list(KNOWN_CODECS) == known


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "FP32",
        "int5",
        "topk:4096:64:2:1",
        "topk:",
        "fp16:64",
        "int8:",
        "int8:064",
        "int8:+64",
        "int8:64:64",
        " int8",
        "int8\n",
        8,
        b"fp32",
    ],
)
def test_unknown_name_is_refused_with_the_known_ones(spec: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"known are fp32, fp16, bf16, int8\[:block_size\], .*, topk\[:chunk\[:k\[:bits\]\]\]$",
    ):
        resolve_codec(spec)


@pytest.mark.parametrize("block_size", [0, 1, 32, 63, 65, 96, 8192, -64, 64.0, "64", None])
@pytest.mark.parametrize("codec", [Int8, Blockwise8, Int4, NF4, Ternary])
def test_block_size_is_validated_on_construction(
    codec: type[Int8 | Blockwise8 | Int4 | NF4 | Ternary], block_size: int
) -> None:
    with pytest.raises(ValueError, match="block_size must be a power of two from 64 to 4096"):
        codec(block_size=block_size)


def test_block_size_in_a_name_is_validated() -> None:
    with pytest.raises(ValueError, match="block_size must be a power of two"):
        resolve_codec("int8:100")


@pytest.mark.parametrize("block_size", [64, 256, 4096])
def test_a_mean_of_the_largest_numbers_stays_within_bounds(block_size: int) -> None:
    """Of each number of them, and of those just below it, whose sums are rounded up."""
    codec = Ternary(block_size=block_size)
    for largest in (MAX_MAGNITUDE, MAX_MAGNITUDE * (1 - 2.0**-24)):
        values = torch.full((block_size, block_size), largest).tril().view(-1)
        assert codec.decode(codec.encode(values), values.numel()).amax() <= MAX_MAGNITUDE


@pytest.mark.parametrize("name", CODECS)
def test_codecs_are_immutable_and_slotted(name: str) -> None:
    codec = CODECS[name]
    assert not hasattr(codec, "__dict__")
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError, AttributeError)):
        codec.block_size = 128  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("codec", "elements", "nbytes"),
    [
        (Fp32(), 1000, 4000),
        (Fp16(), 1000, 2000),
        (Bf16(), 1001, 2002),
        (Int8(), 0, 0),
        (Int8(), 1, 64 + 1),
        (Int8(), 256, 64 + 256),
        (Int8(), 16 * 256, 64 + 16 * 256),
        (Int8(), 16 * 256 + 1, 128 + 16 * 256 + 1),
        (Blockwise8(), 1 << 20, (1 << 16) + (1 << 20)),
        (Int4(), 1, 64 + 1),
        (Int4(), 127, 64 + 64),
        (NF4(), 1 << 20, (1 << 16) + (1 << 19)),
        (Ternary(), 1, 64 + 1),
        (Ternary(), 255, 64 + 51),
        (Ternary(), 257, 64 + 52 + 1),
        (Ternary(), 1 << 20, (1 << 14) + (52 << 12)),
        (TopK(), 4096, 76),
        (TopK(), 1 << 20, 256 * 76),
        (TopK(), 4097, 76 + 1 + 0 + 1 + 3),
        (TopK(bits=1), 4096, 76 - 6),
        (TopK(k=41), 4096, 54),
        (TopK(k=123), 4096, 130),
    ],
)
def test_payload_sizes(codec: Codec, elements: int, nbytes: int) -> None:
    assert codec.encoded_nbytes(elements) == nbytes


def test_refused_element_is_named_by_its_index_in_the_whole_vector() -> None:
    values = torch.zeros(600_000)
    values[543_210] = float("nan")
    for codec in CODECS.values():
        with pytest.raises(ValueError, match=r"element 543210, nan: it is not finite"):
            codec.encode(values)
    values[543_210] = -2e30
    for codec in CODECS.values():
        with pytest.raises(ValueError, match=r"element 543210, -2.*e\+30: its magnitude exceeds"):
            codec.encode(values)


def test_fp16_saturates() -> None:
    values = torch.tensor([65504.0, 65520.0, 1e30, -1e6])
    decoded = Fp16().decode(Fp16().encode(values), 4)
    assert decoded.tolist() == [65504.0, 65504.0, 65504.0, -65504.0]
