"""The contributions of processes are combined as a group of peers would combine them."""

from __future__ import annotations

import math

import pytest
import torch

from p2pavg.attached.combining import SLICE, Part, ProcessContributionError, combine
from p2pavg.group.aggregation import Median


def parts(count: int, elements: int) -> list[Part]:
    generator = torch.Generator().manual_seed(count)
    return [Part(f"p{i}", 1.0 + i, torch.randn(elements, generator=generator)) for i in range(count)]


@pytest.mark.parametrize("elements", [0, 1, 7, SLICE, SLICE + 5])
def test_the_weighted_mean_of_all_slices(elements: int) -> None:
    given, out = parts(3, elements), torch.empty(elements)
    combine(given, out)
    expected = sum(part.values.double() * part.weight for part in given) / 6.0
    assert isinstance(expected, torch.Tensor)
    assert torch.allclose(out.double(), expected, atol=1e-6)


def test_one_process_has_its_own_values() -> None:
    [part], out = parts(1, 1000), torch.empty(1000)
    combine([part], out)
    assert torch.equal(out, part.values)


def test_a_robust_rule_holds_among_processes_too() -> None:
    out = torch.empty(1)
    combine([Part(str(value), 1.0, torch.tensor([value])) for value in (1.0, 2.0, 900.0)], out, Median())
    assert out.item() == 2.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("position", [0, SLICE + 3])
def test_values_that_cannot_be_averaged_name_their_process(wrong: float, position: int) -> None:
    given = parts(2, SLICE + 5)
    given[1].values[position] = wrong
    with pytest.raises(ProcessContributionError, match="process p1 holds NaN") as error:
        combine(given, torch.empty(SLICE + 5))
    assert error.value.name == "p1"
