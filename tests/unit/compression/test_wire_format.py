"""Payloads byte by byte. Peers of different versions exchange them, so they must not change by accident."""

import struct

import pytest
import torch

from p2pavg_compression import NF4, Bf16, Blockwise8, Codec, Fp16, Fp32, Int4, Int8, Ternary, TopK

SMALL = torch.tensor([1.0, -0.5, 0.0, 0.25, -3.0, 1e-3, 131008.0, -(2.0**-20), 0.1, 7.0])

GOLDEN: list[tuple[Codec, str]] = [
    (Fp32(), "0000803f 000000bf 00000000 0000803e 000040c0 6f12833a 00e0ff47 000080b5 cdcccc3d 0000e040"),
    (Fp16(), "003c 00b8 0000 0034 00c2 1914 ff7b 1080 662e 0047"),
    (Bf16(), "803f 00bf 0000 803e 40c0 833a 0048 80b5 cd3d e040"),
    (Int8(), "e4f18044" + 60 * "00" + "00 00 00 00 00 00 7f 00 00 00"),
    (Blockwise8(), "00e0ff47" + 60 * "00" + "82 7d 7f 81 7b 7f ff 7f 80 84"),
    (Int4(), "dc369246" + 60 * "00" + "88 88 88 f8 88"),
    (NF4(), "00e0ff47" + 60 * "00" + "77 77 77 f7 77"),
    (Ternary(), "00e0ff47" + 60 * "00" + "94 79"),
    (TopK(), "06 00 0090 00"),
    (TopK(chunk=64, k=16), "67 01 558e 00"),
]


@pytest.mark.parametrize(("codec", "golden"), GOLDEN, ids=lambda value: getattr(value, "name", ""))
def test_golden_payload(codec: Codec, golden: str) -> None:
    assert bytes(codec.encode(SMALL)).hex() == golden.replace(" ", "")


def test_int8_layout() -> None:
    """The layout is: scales, zeros up to byte 64, codes in two's complement. The short block has its own scale."""
    values = torch.cat([torch.arange(-127.0, -63.0), torch.zeros(64), torch.tensor([12.7, -0.1])])
    scales = struct.pack("<3f", 1.0, 0.0, 12.7 / 127)
    codes = bytes(256 + code for code in range(-127, -63)) + bytes(64) + bytes([127, 255])
    codec = Int8(block_size=64)
    assert bytes(codec.encode(values)) == scales + bytes(64 - 12) + codes
    decoded = codec.decode(scales + bytes(64 - 12) + codes, 130)
    torch.testing.assert_close(decoded, values, rtol=0, atol=1e-6)


def test_blockwise8_layout() -> None:
    """Scales are maxima; code 255 is 1, 127 is 0, 0 is -0.9929688."""
    values = torch.cat([torch.full((64,), 2.0), torch.zeros(64), torch.tensor([-4.0])])
    scales = struct.pack("<3f", 2.0, 0.0, 4.0)
    payload = scales + bytes(64 - 12) + bytes([255]) * 64 + bytes([127]) * 64 + bytes([0])
    codec = Blockwise8(block_size=64)
    assert bytes(codec.encode(values)) == payload
    decoded = codec.decode(payload, 129)
    assert torch.equal(decoded[:128], values[:128])
    assert decoded[128].item() == pytest.approx(-4 * 0.9929688)


def test_ternary_layout() -> None:
    """A byte has the codes of elements 0, 13, 26, 39 and 52 of a block of 64, the first one in the lowest digit.

    The last digit of the block's last byte is that of no element. The short block has three bytes of its own.
    """
    block = torch.zeros(64)
    block[0], block[13], block[52], block[12], block[25] = 2.0, -4.0, 6.0, -4.0, 4.0
    block[1] = 0.1  # below 0.85 of the mean magnitude, which is 20.1 / 64
    values = torch.cat([block, torch.zeros(64), torch.tensor([0.0] * 10 + [-8.0])])
    scales = struct.pack("<3f", 4.0, 0.0, 8.0)
    nothing = 1 + 3 + 9 + 27 + 81
    codes = (
        [nothing + 1 - 3 + 81, *[nothing] * 11, nothing - 1 + 3]
        + [nothing] * 13
        + [nothing, nothing - 27, nothing]
    )
    codec = Ternary(block_size=64)
    assert list(codec.encode(values)) == list(scales + bytes(64 - 12) + bytes(codes))
    decoded = codec.decode(codec.encode(values), values.numel())
    assert torch.equal(decoded.nonzero().view(-1), torch.tensor([0, 12, 13, 25, 52, 138]))
    assert decoded[decoded != 0].tolist() == [4.0, -4.0, -4.0, 4.0, 4.0, -8.0]


def test_int8_scale_is_the_maximum_times_the_reciprocal() -> None:
    """For these maxima, division would round to a different scale."""
    for maximum, scale in {9.0: "4422913d", 13.0: "46a3d13d"}.items():
        assert bytes(Int8().encode(torch.tensor([maximum])))[:4].hex() == scale
