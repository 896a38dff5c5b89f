"""The error of the codecs: relative L2 error of one leg, and of the two legs of an all-reduce.

One leg: encode and decode. Two legs: four peers encode their contributions, the reducer decodes and averages
them, encodes the average, and all peers decode that. The error is relative to the exact mean. The figures
are bounded from both sides, so that an improvement is noticed too.
"""

from collections.abc import Callable

import pytest
import torch

from p2pavg_compression import Codec, resolve_codec

ELEMENTS = 1 << 18
PEERS = 4

Draw = Callable[[torch.Generator], torch.Tensor]


def normal(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=generator)


def student_t3(generator: torch.Generator) -> torch.Tensor:
    """Draw numbers with heavy tails, like gradients: the fourth moment of the distribution is infinite."""
    chi_square = torch.randn(3, ELEMENTS, generator=generator).square().sum(0)
    return normal(generator) / (chi_square / 3).sqrt()


def relative_l2(approximate: torch.Tensor, exact: torch.Tensor) -> float:
    return float((approximate.double() - exact.double()).norm() / exact.double().norm())


def one_leg(codec: Codec, draw: Draw) -> float:
    values = draw(torch.Generator().manual_seed(0))
    return relative_l2(codec.decode(codec.encode(values), ELEMENTS), values)


def two_legs(codec: Codec, draw: Draw) -> float:
    generator = torch.Generator().manual_seed(0)
    contributions = [draw(generator) for _ in range(PEERS)]
    average = torch.zeros(ELEMENTS)
    for contribution in contributions:
        codec.accumulate(codec.encode(contribution), average, 1 / PEERS)
    mean = torch.stack([contribution.double() for contribution in contributions]).mean(0)
    return relative_l2(codec.decode(codec.encode(average), ELEMENTS), mean)


#                    N(0,1): one leg, two legs; Student-t3: one leg, two legs
MEASURED = {
    "fp16": (2.08e-4, 2.97e-4, 2.07e-4, 2.90e-4),
    "bf16": (1.66e-3, 2.38e-3, 1.65e-3, 2.35e-3),
    "int8:64": (5.93e-3, 8.40e-3, 1.08e-2, 1.44e-2),
    "int8:256": (6.97e-3, 9.85e-3, 1.70e-2, 2.29e-2),
    "blockwise8:64": (9.50e-3, 1.35e-2, 1.18e-2, 1.67e-2),
    "blockwise8:256": (1.08e-2, 1.53e-2, 1.49e-2, 2.11e-2),
    "blockwise8:4096": (1.30e-2, 1.83e-2, 1.98e-2, 2.84e-2),
    "int4:64": (1.08e-1, 1.53e-1, 1.84e-1, 2.43e-1),
    "nf4:64": (9.21e-2, 1.30e-1, 1.25e-1, 1.67e-1),
    "ternary:256": (4.38e-1, 5.91e-1, 6.46e-1, 7.16e-1),
}


@pytest.mark.parametrize("name", MEASURED)
def test_normal(name: str) -> None:
    codec = resolve_codec(name)
    assert one_leg(codec, normal) == pytest.approx(MEASURED[name][0], rel=0.03)
    assert two_legs(codec, normal) == pytest.approx(MEASURED[name][1], rel=0.03)


@pytest.mark.parametrize("name", MEASURED)
def test_heavy_tailed(name: str) -> None:
    codec = resolve_codec(name)
    assert one_leg(codec, student_t3) == pytest.approx(MEASURED[name][2], rel=0.05)
    assert two_legs(codec, student_t3) == pytest.approx(MEASURED[name][3], rel=0.05)


def test_fp32_loses_only_the_rounding_of_the_average() -> None:
    codec = resolve_codec("fp32")
    assert one_leg(codec, normal) == 0.0
    assert two_legs(codec, normal) < 1e-7


def test_the_default_stays_within_one_and_a_half_percent() -> None:
    assert two_legs(resolve_codec("blockwise8"), normal) <= 0.015


def test_dynamic_levels_keep_small_elements_that_linear_ones_lose() -> None:
    """Elements that `int8` rounds to zero change the second moments of an optimizer such as Adam."""
    values = normal(torch.Generator().manual_seed(0))
    lost = {}
    for name in ("int8:256", "blockwise8:256"):
        codec = resolve_codec(name)
        decoded = codec.decode(codec.encode(values), ELEMENTS)
        lost[name] = (decoded == 0).double().mean().item()
    assert lost["blockwise8:256"] < 1e-5
    assert 0.003 < lost["int8:256"] < 0.03


def test_blocks_do_not_affect_each_others_error() -> None:
    """Errors are relative to each block, so a layer with small gradients is as exact as one with large ones."""
    values = normal(torch.Generator().manual_seed(0))
    values[ELEMENTS // 2 :] *= 1e-12
    for name in ("int8:256", "blockwise8:64"):
        codec = resolve_codec(name)
        decoded = codec.decode(codec.encode(values), ELEMENTS)
        small = slice(ELEMENTS // 2, None)
        assert relative_l2(decoded[small], values[small]) < 0.012


#           N(0,1) and Student-t3: error of the values that are sent, and of the whole vector
SPARSE = {
    "topk:4096:64:2": (6.48e-2, 9.38e-1, 3.58e-1, 7.98e-1),
    "topk:4096:64:1": (1.10e-1, 9.39e-1, 4.98e-1, 8.28e-1),
}


@pytest.mark.parametrize("name", SPARSE)
def test_values_that_a_sparse_codec_sends(name: str) -> None:
    codec, found = resolve_codec(name), []
    for draw in (normal, student_t3):
        values = draw(torch.Generator().manual_seed(0))
        decoded = codec.decode(codec.encode(values), ELEMENTS)
        sent = decoded != 0
        found += [relative_l2(decoded[sent], values[sent]), relative_l2(decoded, values)]
    assert found == pytest.approx(SPARSE[name], rel=0.03)
