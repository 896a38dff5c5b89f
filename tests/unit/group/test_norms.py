"""Factors that shorten long contributions: from signed norms alone, so the same for all members."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.limits import MAX_NORM
from p2pavg.group.roster import Roster, ShareCutter, norm_factors
from tests.unit.group.samples import SIGNERS, candidate, roster

IDS = [signer.peer_id for signer in SIGNERS]


def of_norms(
    norms: list[float], weights: list[float] | None = None, observers: tuple[int, ...] = ()
) -> Roster:
    weights = weights or [1.0] * len(norms)
    members = [
        candidate(index, norm=norm, weight=weight)
        for index, (norm, weight) in enumerate(zip(norms, weights, strict=True))
    ]
    return roster(members, observers=[members[index] for index in observers])


@pytest.mark.parametrize(
    ("norms", "most", "factors"),
    [
        ([1.0, 1.0, 1.0], 2.0, {}),
        ([1.0, 2.0, 3.0], 1.5, {}),
        ([1.0, 2.0, 3.0], 1.0, {2: 2 / 3}),
        ([1.0, 2.0, 3e6], 2.0, {2: 4 / 3e6}),
        ([8.0, 2.0, 16.0, 2.0], 2.0, {0: 0.5, 2: 0.25}),
        ([1.0, 5.0], 1.0, {1: 0.2}),  # of two, the lower norm is the median
        ([0.0, 0.0, 5.0], 3.0, {2: 0.0}),
        ([0.0, 0.0], 1.0, {}),
        ([MAX_NORM, MAX_NORM, 1.0], 1e6, {}),
    ],
)
def test_golden_factors(norms: list[float], most: float, factors: dict[int, float]) -> None:
    assert norm_factors(of_norms(norms), most) == {IDS[index]: factor for index, factor in factors.items()}


def test_no_bound_changes_nothing() -> None:
    assert norm_factors(of_norms([1.0, 2.0, 3e6]), None) == {}


def test_the_median_is_by_weight_and_of_contributors() -> None:
    by_weight = of_norms([1.0, 1.0, 9.0, 9.0, 9.0], [3.0, 3.0, 1.0, 1.0, 3.0])
    assert list(norm_factors(by_weight, 1.0)) == [IDS[2], IDS[3], IDS[4]]
    assert norm_factors(of_norms([1.0, 2.0, 6.0, 9.0], observers=(0,)), 1.0) == {IDS[3]: 6 / 9}


def test_a_weight_that_is_a_lie_does_not_make_the_liars_norm_the_median() -> None:
    assert norm_factors(of_norms([1.0, 1.0, 9.0], [1.0, 1.0, 1e15]), 1.0) == {IDS[2]: 1 / 9}


def test_a_later_attempt_has_the_median_of_its_own_members() -> None:
    group = of_norms([1.0, 1.0, 4.0, 8.0, 8.0])
    assert norm_factors(group, 1.0) == {IDS[3]: 0.5, IDS[4]: 0.5}
    cutter = ShareCutter(sum(group.shares), 1)
    left = group.among(5, range(1, 5), cutter)
    assert norm_factors(left, 1.0) == {IDS[3]: 0.5, IDS[4]: 0.5}
    left = group.among(5, range(2, 5), cutter)
    assert norm_factors(left, 1.0) == {}


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=5),
    st.lists(st.floats(0.0, MAX_NORM), max_size=3),
    st.floats(1.0, 10.0),
)
def test_a_minority_of_liars_counts_at_most_as_the_longest_honest(
    honest: list[float], lies: list[float], most: float
) -> None:
    lies = lies[: len(honest) - 1]
    group = of_norms(honest + lies)
    factors = norm_factors(group, most)
    longest = most * max(honest) * (1 + 1e-12)
    assert all(member.norm * factors.get(member.peer_id, 1.0) <= longest for member in group.members)
    assert all(0 <= factor < 1 for factor in factors.values())
