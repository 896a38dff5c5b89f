"""Limits of liars under a robust rule: those below the breaking point never leave the honest range."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2pavg.allreduce.robust import combine
from p2pavg.base.numbers import units_of
from p2pavg.group.aggregation import CenteredClip, Median, RobustRule, TrimmedMean
from p2pavg_compression import MAX_MAGNITUDE

ROUNDING = 1e-5
ELEMENTS = 3
numbers = st.floats(-1e6, 1e6, width=32)
lies = st.floats(-MAX_MAGNITUDE, MAX_MAGNITUDE, width=32) | st.sampled_from(
    [MAX_MAGNITUDE, -MAX_MAGNITUDE, 0.0]
)
rows = st.lists(st.lists(numbers, min_size=ELEMENTS, max_size=ELEMENTS), min_size=2, max_size=9)
weights = st.floats(0.01, 100.0) | st.just(1.0)
trims = st.floats(0.01, 0.499).map(TrimmedMean)
rules: st.SearchStrategy[RobustRule] = (
    trims | st.just(Median()) | st.builds(CenteredClip, st.floats(0.1, 10.0), st.integers(1, 4))
)


def combined(
    rule: RobustRule, given_rows: Sequence[Sequence[float]], given_weights: Sequence[float]
) -> torch.Tensor:
    out = torch.empty(ELEMENTS)
    combine(rule, [torch.tensor(row, dtype=torch.float32) for row in given_rows], given_weights, out)
    return out


@settings(deadline=None)
@given(trims | st.just(Median()), rows, st.data())
def test_liars_below_the_breaking_point_stay_in_the_honest_range(
    rule: TrimmedMean | Median, honest: list[list[float]], data: st.DataObject
) -> None:
    liars = data.draw(st.lists(st.lists(lies, min_size=ELEMENTS, max_size=ELEMENTS), max_size=6))
    count = len(honest) + len(liars)
    drawn = data.draw(st.lists(weights, min_size=count, max_size=count) | st.just([1.0] * count))
    units = units_of(drawn)
    fraction = sum(units[len(honest) :]) / sum(units)
    # Shares are rounded to a four-millionth; at half or more, the median belongs to the liars.
    assume(fraction <= rule.fraction - 1e-5 if isinstance(rule, TrimmedMean) else fraction < 0.499999)
    order = data.draw(st.permutations(range(count)))
    everything = honest + liars
    found = combined(rule, [everything[at] for at in order], [drawn[at] for at in order])
    for at, value in enumerate(found.tolist()):
        column = [row[at] for row in honest]
        # A sum rounds by the size of what is kept, and all of that is honest or between honest values.
        slack = ROUNDING * max(map(abs, column))
        assert min(column) - slack <= value <= max(column) + slack


@settings(deadline=None)
@given(st.floats(0.1, 5.0), st.integers(1, 4), st.integers(3, 9), st.data())
def test_liars_move_centered_clipping_by_a_few_honest_distances(
    radius: float, iterations: int, count: int, data: st.DataObject
) -> None:
    """Fewer than half of equal weights: the result is within iterations * radius * the largest honest distance."""
    column = st.lists(numbers, min_size=ELEMENTS, max_size=ELEMENTS)
    honest = data.draw(st.lists(column, min_size=count // 2 + 1, max_size=count))
    lie = st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=ELEMENTS, max_size=ELEMENTS)
    liars = data.draw(st.lists(lie, max_size=len(honest) - 1))
    everything = honest + liars
    equal = [1.0] * len(everything)
    start = combined(Median(), everything, equal).double()
    reach = max((torch.tensor(row).double() - start).norm().item() for row in honest)
    moved = combined(CenteredClip(radius, iterations), everything, equal).double() - start
    size = max(abs(value) for row in honest for value in row)
    assert moved.norm().item() <= iterations * radius * reach * (1 + ROUNDING) + ROUNDING * size


@settings(deadline=None)
@given(rules, rows, st.data())
def test_the_order_of_contributions_does_not_matter(
    rule: RobustRule, given_rows: list[list[float]], data: st.DataObject
) -> None:
    count = len(given_rows)
    drawn = data.draw(st.lists(weights, min_size=count, max_size=count) | st.just([1.0] * count))
    order = data.draw(st.permutations(range(count)))
    found = combined(rule, given_rows, drawn)
    again = combined(rule, [given_rows[at] for at in order], [drawn[at] for at in order])
    slack = ROUNDING * max(abs(value) for row in given_rows for value in row)
    torch.testing.assert_close(found, again, rtol=0, atol=slack)
    if len(set(drawn)) == 1 and not isinstance(rule, CenteredClip):
        assert torch.equal(found, again), "equal weights: sorted values are summed, in one order"


@settings(deadline=None)
@given(rules, rows, st.data(), st.integers(-20, 20), st.booleans())
def test_scaled_contributions_and_weights_scale_the_result(
    rule: RobustRule, given_rows: list[list[float]], data: st.DataObject, power: int, negative: bool
) -> None:
    count = len(given_rows)
    assume(all(value == 0 or abs(value) > 1e-6 for row in given_rows for value in row))
    drawn = data.draw(st.lists(weights, min_size=count, max_size=count) | st.just([1.0] * count))
    factor = math.ldexp(-1.0 if negative else 1.0, power)
    scaled = [[value * factor for value in row] for row in given_rows]
    found = combined(rule, scaled, [weight * 8 for weight in drawn])
    wanted = combined(rule, given_rows, drawn) * factor
    slack = ROUNDING * abs(factor) * max(abs(value) for row in given_rows for value in row)
    torch.testing.assert_close(found, wanted, rtol=0, atol=slack)


@settings(deadline=None)
@given(rules, rows, st.data())
def test_the_same_contributions_give_the_same_bits(
    rule: RobustRule, given_rows: list[list[float]], data: st.DataObject
) -> None:
    count = len(given_rows)
    drawn = data.draw(st.lists(weights, min_size=count, max_size=count))
    first = combined(rule, given_rows, drawn)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again = combined(rule, given_rows, drawn)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(first.view(torch.int32), again.view(torch.int32))
