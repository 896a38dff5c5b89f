"""Trimmed mean, median and centred clipping of one part: golden values, and the definitions in exact fractions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch

from p2pavg.allreduce import robust
from p2pavg.allreduce.reduction import PartContribution, average_part
from p2pavg.allreduce.robust import combine, largest_kept
from p2pavg.base.limits import MAX_WEIGHT
from p2pavg.base.numbers import bounded_weights, lower_median, units_of
from p2pavg.group.aggregation import CenteredClip, Median, RobustRule, TrimmedMean
from p2pavg_compression import MAX_MAGNITUDE, Blockwise8, Codec, Fp32

RULES: list[RobustRule] = [
    TrimmedMean(0.25),
    TrimmedMean(0.1),
    Median(),
    CenteredClip(),
    CenteredClip(0.5, 1),
]
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.text)
# Equal weights are combined by other code than unequal ones.
WEIGHTS = [[1.0] * 7, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [1e-300] * 7, [1e15] * 6 + [1.0]]
weighted = pytest.mark.parametrize("weights", WEIGHTS, ids=str)


def combined(
    rule: RobustRule, rows: Sequence[Sequence[float] | torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    tensors = [torch.as_tensor(row, dtype=torch.float32) for row in rows]
    out = torch.full_like(tensors[0], math.nan)
    combine(rule, tensors, weights, out)
    return out


def drawn(count: int, elements: int = 50) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(elements, generator=generator) for _ in range(count)]


def kept_mean(values: Sequence[float], weights: Sequence[float], fraction: Fraction) -> Fraction:
    """Return the trimmed mean by its definition: a line of weights in the order of values, cut at both ends."""
    total = sum(map(Fraction, weights))
    at, kept = Fraction(0), Fraction(0)
    for value, weight in sorted(zip(values, weights, strict=True)):
        end = at + Fraction(weight)
        length = min(end, total * (1 - fraction)) - max(at, total * fraction)
        kept += max(length, Fraction(0)) * Fraction(value)
        at = end
    return kept / (total * (1 - 2 * fraction))


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.25, 0.4, 0.499])
@pytest.mark.parametrize(
    "weights", [*WEIGHTS, [3.0, 1.0], [1.0, 1.0], [1.0, 2.0, 1.0], [1.0] * 8, [1.0] * 16], ids=str
)
def test_trimmed_mean_is_its_definition(weights: list[float], fraction: float) -> None:
    rows = drawn(len(weights))
    found = combined(TrimmedMean(fraction), rows, weights)
    exact = [
        float(kept_mean([float(row[at]) for row in rows], weights, Fraction(fraction)))
        for at in range(len(found))
    ]
    torch.testing.assert_close(found.double(), torch.tensor(exact, dtype=torch.float64), rtol=0, atol=3e-5)


@rules
@weighted
def test_rounding_is_in_proportion_to_what_is_kept(rule: RobustRule, weights: list[float]) -> None:
    """Rows in another order are summed otherwise. One row is huge."""
    rows = [*drawn(len(weights) - 1), torch.full((50,), 1e30)]
    kept = largest_kept(rule, rows, weights)
    back = combined(rule, rows[::-1], weights[::-1])
    assert bool(((combined(rule, rows, weights) - back).abs() <= 2**-20 * kept).all())


LARGEST: list[tuple[RobustRule, list[float], list[float], float]] = [
    (TrimmedMean(0.25), [4.0, -9.0, 2.0, 100.0], [1.0] * 4, 4.0),
    (TrimmedMean(0.25), [4.0, -9.0, 2.0, 100.0], [1.0, 1.0, 1.0, 2.0], 100.0),
    (TrimmedMean(0.4), [4.0, -9.0, 2.0, 100.0], [1.0, 2.0, 1.0, 1.0], 9.0),
    (Median(), [1.0, -3.0, 100.0], [1.0] * 3, 1.0),
    (Median(), [1.0, -3.0, 2.0, 100.0], [1.0] * 4, 2.0),
    (Median(), [7.0], [1.0], 7.0),
    # The distances from the median, 1, are 0, 4 and 99: of the last, 4 is left, and of the center, 1.
    (CenteredClip(1.0, 1), [1.0, -3.0, 100.0], [1.0] * 3, 5.0),
]


@pytest.mark.parametrize(("rule", "values", "weights", "largest"), LARGEST)
def test_the_largest_that_is_kept(
    rule: RobustRule, values: list[float], weights: list[float], largest: float
) -> None:
    assert float(largest_kept(rule, [torch.tensor([value]) for value in values], weights)) == largest


GOLDEN: list[tuple[RobustRule, list[float], list[float], float]] = [
    (TrimmedMean(0.25), [4.0, 1.0, 2.0, 100.0], [1.0] * 4, 3.0),
    (TrimmedMean(0.25), [1.0, 1e6], [1.0, 1.0], 500000.5),
    (TrimmedMean(0.25), [0.0, 3.0, 1e6], [1.0, 1.0, 1.0], (0.25 * 0 + 3 + 0.25 * 1e6) / 1.5),
    (TrimmedMean(0.25), [0.0, 4.0, 8.0], [1.0, 2.0, 1.0], 4.0),
    (TrimmedMean(0.125), [0.0, 4.0, 8.0], [1.0, 2.0, 1.0], 4.0),
    (TrimmedMean(0.125), [0.0, 4.0, 8.0], [2.0, 1.0, 1.0], (1.5 * 0 + 4 + 0.5 * 8) / 3),
    (Median(), [5.0, 1.0, 100.0], [1.0] * 3, 5.0),
    (Median(), [5.0, 1.0, 100.0, 7.0], [1.0] * 4, 6.0),
    (Median(), [5.0, 1.0, 100.0], [1.0, 1.0, 3.0], 100.0),
    (Median(), [5.0, 1.0, 100.0], [1.0, 1.0, 2.0], 52.5),
    (Median(), [5.0, 1.0, 100.0], [0.1, 0.1, 0.19], 5.0),
    (Median(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.1] * 6, 3.5),
    (Median(), [-0.0, -0.0, 1.0], [1.0] * 3, 0.0),
    # The center begins at 2; the distances 2, 0, 1, 1, 98 have the median 1.
    (CenteredClip(1.0, 1), [0.0, 2.0, 3.0, 1.0, 100.0], [1.0] * 5, 2 + (-1 + 0 + 1 - 1 + 1) / 5),
    (CenteredClip(1.0, 2), [0.0, 2.0, 3.0, 1.0, 100.0], [1.0] * 5, 2.0),
    # tau is 2, from the first center, which is 2; the second is 2.2.
    (CenteredClip(1.0, 2), [0.0, 1.0, 2.0, 10.0, 100.0], [1.0] * 5, 2.2 + (-2 - 1.2 - 0.2 + 2 + 2) / 5),
    (CenteredClip(2.0, 1), [0.0, 2.0, 3.0, 1.0, 100.0], [1.0] * 5, 2 + (-2 + 0 + 1 - 1 + 2) / 5),
    (CenteredClip(2.0, 1), [0.0, 2.0, 3.0, 1.0, 100.0], [2.0, 1.0, 1.0, 1.0, 1.0], 1.5),
    (CenteredClip(1e6, 1), [0.0, 2.0, 3.0, 1.0, 100.0], [1.0] * 5, 21.2),
    (CenteredClip(), [7.0, 7.0, 7.0, 1e6], [1.0] * 4, 7.0),
]


@pytest.mark.parametrize(("rule", "values", "weights", "result"), GOLDEN)
def test_golden_values(rule: RobustRule, values: list[float], weights: list[float], result: float) -> None:
    for order in itertools.islice(itertools.permutations(range(len(values))), 24):
        found = combined(rule, [[values[at]] for at in order], [weights[at] for at in order])
        assert found.item() == pytest.approx(result, rel=3e-6, abs=1e-6)
        assert math.copysign(1.0, found.item()) == math.copysign(1.0, result)


def test_clipping_measures_the_length_of_the_whole_part() -> None:
    """The three rows are 5, 13 and 0 from the center; the lower median of the lengths is 5."""
    rows = [[3.0, 4.0], [-5.0, -12.0], [0.0, 0.0]]
    found = combined(CenteredClip(1.0, 1), rows, [1.0] * 3)
    torch.testing.assert_close(found, torch.tensor([3.0 - 5 * 5 / 13, 4.0 - 12 * 5 / 13]) / 3)


@rules
@weighted
@pytest.mark.parametrize("elements", [0, 1, 63, 32_768, 65_537])
def test_a_result_does_not_depend_on_the_chunks(
    monkeypatch: pytest.MonkeyPatch, rule: RobustRule, weights: list[float], elements: int
) -> None:
    rows = drawn(7, elements)
    copies = [row.clone() for row in rows]
    found = combined(rule, rows, weights)
    assert all(map(torch.equal, rows, copies)), "the inputs were changed"
    assert found.shape == (elements,)
    assert bool(found.isfinite().all())
    if not isinstance(rule, CenteredClip):
        monkeypatch.setattr(robust, "CHUNK_ELEMENTS", 64)
        monkeypatch.setattr(robust, "PAIRED_ELEMENTS", 64)
        assert torch.equal(found, combined(rule, rows, weights))


@rules
@pytest.mark.parametrize("weight", [1.0, 0.1, 1e15])
def test_a_single_contribution_is_the_result_bit_by_bit(rule: RobustRule, weight: float) -> None:
    [row] = drawn(1)
    assert torch.equal(combined(rule, [row], [weight]), row)


@rules
@weighted
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_values_at_the_limit_do_not_overflow(rule: RobustRule, weights: list[float], sign: float) -> None:
    rows = [torch.full((3,), sign * MAX_MAGNITUDE * (1 if index < 4 else -1)) for index in range(7)]
    found = combined(rule, rows, weights)
    assert bool((found.abs() <= MAX_MAGNITUDE * (1 + 1e-6)).all())


def test_units_are_even_and_proportional() -> None:
    assert units_of([1.0] * 3) == [1_398_102] * 3
    assert units_of([1.0, 3.0]) == [2**20, 3 * 2**20]
    assert units_of([1e15] * 64 + [5e-324]) == [2**16] * 64 + [0]
    assert units_of([5e-324] * 2) == [2**21] * 2


def test_no_weight_counts_more_than_the_median_weight() -> None:
    assert bounded_weights([3.0, 1.0, 2.0]) == [2.0, 1.0, 2.0]
    assert bounded_weights([1.0, 1e15]) == [1.0, 1.0]
    assert bounded_weights([1e15, 4.0, 1.0, 2.0]) == [2.0, 2.0, 1.0, 2.0]
    assert bounded_weights([7.0]) == [7.0]


@pytest.mark.parametrize("rule", [TrimmedMean(0.25), Median(), CenteredClip()], ids=lambda rule: rule.text)
@pytest.mark.parametrize("honest", [3, 8])
def test_one_liar_that_claims_the_largest_weight_counts_as_one_peer(rule: RobustRule, honest: int) -> None:
    """Without the bound, a weight of 1e15 makes the liar's values the median of any group: -6.9 in place of 1.0."""
    contributions = [PartContribution(str(index), 16.0, torch.full((8,), 1.0)) for index in range(honest)]
    contributions.insert(1, PartContribution("liar", MAX_WEIGHT, torch.full((8,), -6.9)))
    out = torch.empty(8)
    average_part(Fp32(), contributions, math.fsum(each.weight for each in contributions), out, robust=rule)
    assert torch.equal(out, torch.ones(8))


def test_lower_median() -> None:
    assert lower_median([3.0, 1.0, 2.0], [1.0] * 3) == 2.0
    assert lower_median([3.0, 1.0, 2.0, 4.0], [1.0] * 4) == 2.0
    assert lower_median([3.0, 1.0], [2.0, 1.0]) == 3.0
    assert lower_median([3.0, 1.0], [1.0, 1.0]) == 1.0
    assert lower_median([5.0], [0.1]) == 5.0


@pytest.mark.parametrize("codec", [Fp32(), Blockwise8(block_size=64)], ids=lambda codec: codec.name)
@rules
@weighted
def test_the_reducers_own_contribution_counts_as_the_others(
    codec: Codec, rule: RobustRule, weights: list[float]
) -> None:
    """Any member's values unencoded give the same as the same values decoded, and every decoder holds these bits."""
    rows = [codec.decode(codec.encode(row), 128) for row in drawn(7, 128)]
    results = []
    for own in (None, 0, 6):
        contributions = [
            PartContribution(str(index), weight, row if index == own else bytearray(codec.encode(row)))
            for index, (row, weight) in enumerate(zip(rows, weights, strict=True))
        ]
        out = torch.empty(128)
        payload = average_part(codec, contributions, math.fsum(weights), out, robust=rule)
        assert torch.equal(codec.decode(bytes(payload), 128), out)
        results.append(out)
    if codec.is_identity:
        assert torch.equal(results[0], combined(rule, rows, bounded_weights(weights)))
        assert all(torch.equal(results[0], result) for result in results)
