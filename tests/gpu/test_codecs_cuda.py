"""Encoding on a GPU writes the wire format of the CPU: run with `pytest -m gpu tests/gpu`.

Scales, sizes, layout, and the whole payload of every codec but `blockwise8` are the same bit for bit. In
`blockwise8` the GPU's codes come from bitsandbytes' kernel, which does not round to half precision before it
looks for the nearest level, and divides approximately: next to the middle between two levels it may take the
other one. That is a difference of one code for less than one element in fifty. Zeros, and blocks too small to
scale, are the same.
"""

import numpy as np
import pytest
import torch

from p2pavg_compression import MAX_MAGNITUDE, Blockwise8, Codec, CodecError, Int8, resolve_codec
from p2pavg_compression.kernels import ZERO_CODE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Less than a block, a short last block, more than a chunk of the GPU.
LENGTHS = [0, 1, 63, 64, 65, 4096, 100_001, (1 << 22) + 12_345]
CODECS = [
    "fp32",
    "fp16",
    "bf16",
    "int8:64",
    "int8:256",
    "blockwise8:64",
    "blockwise8:256",
    "blockwise8:4096",
    "ternary:256",
]


def sample(elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(elements)
    values = torch.randn(elements, generator=generator) * torch.exp(
        torch.randn(elements, generator=generator)
    )
    values[::7] = 0.0
    return values


def scales_and_codes(codec: Blockwise8, payload: memoryview, elements: int) -> tuple[bytes, torch.Tensor]:
    codes_begin = codec.encoded_nbytes(elements) - elements
    codes = np.frombuffer(payload, dtype=np.uint8)[codes_begin:].astype(np.int32)
    return bytes(payload[:codes_begin]), torch.from_numpy(codes)


@pytest.mark.parametrize("elements", LENGTHS)
@pytest.mark.parametrize("name", [name for name in CODECS if not name.startswith("blockwise8")])
def test_payload_equals_that_of_the_cpu(name: str, elements: int) -> None:
    codec = resolve_codec(name)
    values = sample(elements)
    assert bytes(codec.encode(values.cuda())) == bytes(codec.encode(values))


@pytest.mark.parametrize("elements", LENGTHS)
@pytest.mark.parametrize("block_size", [64, 256, 4096])
def test_blockwise8_differs_by_one_code_at_most(block_size: int, elements: int) -> None:
    codec = Blockwise8(block_size=block_size)
    values = sample(elements)
    cpu_scales, cpu_codes = scales_and_codes(codec, codec.encode(values), elements)
    gpu_scales, gpu_codes = scales_and_codes(codec, codec.encode(values.cuda()), elements)
    assert gpu_scales == cpu_scales
    apart = (gpu_codes - cpu_codes).abs()
    assert int((apart > 1).sum()) == 0
    assert int((apart > 0).sum()) <= 1 + elements // 50
    assert bool((gpu_codes[values == 0] == ZERO_CODE).all())


def test_blockwise8_blocks_of_zeros_and_of_denormals() -> None:
    values = torch.zeros(256)
    values[64:128] = 1e-40
    values[128:192] = 2.0**-126
    values[192:] = MAX_MAGNITUDE
    assert bytes(Blockwise8().encode(values.cuda())) == bytes(Blockwise8().encode(values))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("name", CODECS)
def test_bad_numbers_are_refused(name: str, bad: float) -> None:
    elements = LENGTHS[-1]
    for place in (0, elements // 2, elements - 1):
        values = torch.ones(elements, device="cuda")
        values[place] = bad
        with pytest.raises(CodecError, match=f"element {place}, "):
            resolve_codec(name).encode(values)


@pytest.mark.parametrize("codec", [Blockwise8(), Int8(), resolve_codec("bf16")], ids=lambda codec: codec.name)
def test_encoding_waits_for_the_current_stream(codec: Codec) -> None:
    """The work that is queued on the current stream is done before the values are read."""
    elements = 1 << 22
    expected = bytes(codec.encode(torch.full((elements,), 3.0)))
    values = torch.zeros(elements, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # clock cycles, about 50 ms
        values.fill_(3.0)
        assert bytes(codec.encode(values)) == expected
        assert torch.cuda.current_stream() == stream


def test_payload_goes_into_the_buffer_given() -> None:
    values = sample(10_000)
    for name in CODECS:
        codec = resolve_codec(name)
        expected = bytes(codec.encode(values.cuda()))
        buffer = bytearray(b"\xff" * (len(expected) + 1))
        codec.encode(values.cuda(), memoryview(buffer)[1:])
        assert bytes(buffer[1:]) == expected


def test_payload_of_the_gpu_decodes_like_any_other() -> None:
    values = sample(100_001)
    for name in CODECS:
        codec = resolve_codec(name)
        decoded = codec.decode(codec.encode(values.cuda()), values.numel())
        assert ((decoded - values).norm() / values.norm()).item() < 0.02
