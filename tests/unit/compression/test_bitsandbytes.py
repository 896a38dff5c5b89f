"""`blockwise8` against the CPU kernels of bitsandbytes: where they agree, and where and why they do not.

Both give an element the level nearest to x / max|x|, up to how each rounds that quotient first: this package
to half precision, bitsandbytes to steps of about 3e-5. So they may disagree by one code next to the middle
between two levels, about 0.5 % of the elements of a normal vector. Below 1e-5 bitsandbytes sends plus or
minus 2.1e-5 for everything, zeros included; this package sends the nearest level, and zeros as zeros.
"""

import functools
import sys

import pytest
import torch

from p2pavg_compression import MAX_MAGNITUDE, Blockwise8, CodecError
from p2pavg_compression.blockwise8 import _quantize_cpu, _quantize_cuda
from p2pavg_compression.kernels import LEVELS, ZERO_CODE

ELEMENTS = 1 << 18
BLOCK_SIZES = [64, 256, 4096]


def normal(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=generator)


def heavy_tailed(generator: torch.Generator) -> torch.Tensor:
    chi_square = torch.randn(3, ELEMENTS, generator=generator).square().sum(0)
    return normal(generator) / (chi_square / 3).sqrt()


def over_many_decades(generator: torch.Generator) -> torch.Tensor:
    signs = torch.randint(0, 2, (ELEMENTS,), generator=generator) * 2 - 1
    return torch.exp(-18 * torch.rand(ELEMENTS, generator=generator)) * signs


def sparse(generator: torch.Generator) -> torch.Tensor:
    return normal(generator) * (torch.rand(ELEMENTS, generator=generator) < 0.1)


VECTORS = {function.__name__: function for function in (normal, heavy_tailed, over_many_decades, sparse)}


@functools.cache
def encoded_by_both(
    name: str, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x / scale, the scales (which determine x together with it), our codes and those of bitsandbytes."""
    from bitsandbytes.functional import quantize_blockwise

    values = VECTORS[name](torch.Generator().manual_seed(1))
    payload = torch.frombuffer(Blockwise8(block_size=block_size).encode(values), dtype=torch.uint8)
    scales = payload[: 4 * ELEMENTS // block_size].view(torch.float32)
    codes, state = quantize_blockwise(values, blocksize=block_size)
    assert torch.equal(scales, state.absmax)
    quotients = values.double().view(-1, block_size) / scales.double().view(-1, 1)
    return torch.nan_to_num(quotients).view(-1), scales, payload[-ELEMENTS:].int(), codes.int()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", VECTORS)
def test_codes_differ_by_at_most_one_above_1e_5(name: str, block_size: int) -> None:
    quotients, _, ours, theirs = encoded_by_both(name, block_size)
    apart = (ours - theirs).abs()[quotients.abs() >= 1e-5]
    assert apart.max().item() <= 1
    # Many small elements, for which the steps of bitsandbytes are coarse.
    allowed = 0.15 if name == "over_many_decades" else 0.01
    assert (apart > 0).double().mean().item() < allowed


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", VECTORS)
def test_our_codes_are_the_nearest_or_next_to_it(name: str, block_size: int) -> None:
    quotients, _, ours, _ = encoded_by_both(name, block_size)
    levels = LEVELS.double()
    nearest = torch.searchsorted((levels[1:] + levels[:-1]) / 2, quotients)
    apart = (ours - nearest).abs()
    assert apart.max().item() <= 1
    assert (apart > 0).double().mean().item() < 0.007
    # The second nearest level is chosen only if it is as near, within the rounding to half precision.
    loss = (levels[ours] - quotients).abs() - (levels[nearest] - quotients).abs()
    half_rounding = quotients.abs() * 2.0**-10 + 2.0**-24
    assert bool((loss <= half_rounding).all())


def test_zeros() -> None:
    quotients, _, ours, theirs = encoded_by_both("sparse", 4096)
    zeros = quotients == 0
    assert zeros.double().mean().item() > 0.85
    assert set(ours[zeros].tolist()) == {ZERO_CODE}
    assert set(theirs[zeros].tolist()) == {131}  # +2.1e-5


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("elements", [1, 63, 4096, 100_000, ELEMENTS])
def test_decoding_agrees_bit_for_bit(block_size: int, elements: int) -> None:
    from bitsandbytes.functional import dequantize_blockwise

    codec = Blockwise8(block_size=block_size)
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (elements,), dtype=torch.uint8, generator=generator)
    scales = torch.exp(10 * torch.randn(-(-elements // block_size), generator=generator))
    scales[::5] = 0.0
    scales[0], scales[-1] = MAX_MAGNITUDE, 2.0**-140
    payload = bytearray(codec.encoded_nbytes(elements))
    payload[: 4 * scales.numel()] = scales.numpy().tobytes()
    payload[-elements:] = codes.numpy().tobytes()
    theirs = dequantize_blockwise(codes, absmax=scales, code=LEVELS, blocksize=block_size)
    ours = codec.decode(payload, elements)
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_accuracy_is_the_same() -> None:
    for name in ("normal", "heavy_tailed"):
        quotients, scales, ours, theirs = encoded_by_both(name, 64)
        weights = scales.double().repeat_interleave(64)
        errors = [(weights * (LEVELS.double()[codes] - quotients)).norm() for codes in (ours, theirs)]
        assert (errors[0] / errors[1]).item() == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_call_for_gpu_tensors(block_size: int) -> None:
    """Run the steps for CUDA tensors on the CPU: the call of bitsandbytes, the checks, and tiny blocks."""
    rows = normal(torch.Generator().manual_seed(3)).view(-1, block_size)
    rows[1], rows[2], rows[3, 5:] = 0.0, 1e-40, 0.0
    scales, codes = _quantize_cuda(rows.clone(), 0)
    expected_scales, expected_codes = _quantize_cpu(rows.clone()[:8], 0)
    assert torch.equal(scales[:8], expected_scales)
    assert codes.dtype is torch.uint8
    assert codes.shape == rows.shape
    assert bool((codes[1:3] == ZERO_CODE).all())
    assert bool((codes[3, 5:] == ZERO_CODE).all())
    large = rows[:8].abs() > 1e-5 * rows[:8].abs().amax(1, keepdim=True).clamp(min=1e-30)
    assert (codes[:8].int() - expected_codes.int()).abs()[large].max().item() <= 1
    rows[4, 7] = float("nan")
    with pytest.raises(CodecError, match=f"element {100 + 4 * block_size + 7}, nan"):
        _quantize_cuda(rows, 100)


def test_a_missing_bitsandbytes_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    rows = normal(torch.Generator().manual_seed(4)).view(-1, 64)
    with pytest.raises(ImportError, match=r"^blockwise8 .* pip install 'p2pavg\[cuda\]'$"):
        _quantize_cuda(rows, 0)
    assert len(Blockwise8().encode(rows.view(-1))) > 0, "the encoder for CPUs does not need it"


def test_a_missing_bitsandbytes_is_found_before_anything_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    Blockwise8().check_device(torch.device("cuda"))
    monkeypatch.setattr("p2pavg_compression.blockwise8.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install 'p2pavg\[cuda\]'$"):
        Blockwise8().check_device(torch.device("cuda"))
    Blockwise8().check_device(torch.device("cpu"))
