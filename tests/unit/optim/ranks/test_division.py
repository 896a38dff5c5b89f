"""How a peer's ranks divide a model, and which of them hold the same parts."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.optim.ranks.mesh import Division
from p2pavg.optim.ranks.shards import are_common, first_difference, sharing_of

NAMES = ("pp", "dp", "tp")
sizes = st.tuples(*[st.integers(1, 3)] * 3)


def division(given: tuple[int, ...], stages: str | None = "pp", copies: str | None = "dp") -> Division:
    return Division(NAMES, given, stages, copies)


class TestDivision:
    @given(sizes)
    def test_each_part_is_held_once_by_each_copy(self, given: tuple[int, ...]) -> None:
        mine = division(given)
        everyone = list(product(*map(range, given)))
        held = Counter((mine.copy(at), mine.part(at)) for at in everyone)
        assert set(held.values()) == {1}
        assert len({mine.part(at) for at in everyone}) == mine.ranks // given[1]
        assert {mine.stage(at) for at in everyone} == set(range(given[0]))

    @given(sizes)
    def test_the_groups_are_the_copies_in_the_order_of_the_mesh(self, given: tuple[int, ...]) -> None:
        mine = division(given)
        everyone = list(product(*map(range, given)))
        groups = mine.groups()
        assert sorted(position for group in groups for position in group) == list(range(math.prod(given)))
        for copy, group in enumerate(groups):
            assert {mine.copy(everyone[position]) for position in group} == {copy}
            assert [mine.part(everyone[position]) for position in group] == [
                mine.part(everyone[position]) for position in groups[0]
            ]

    def test_parts_name_the_dimensions_that_divide(self) -> None:
        assert division((2, 2, 2)).part((1, 0, 1)) == "pp 1 of 2, tp 1 of 2"
        assert division((2, 2, 1)).part((1, 0, 0)) == "pp 1 of 2"
        assert division((1, 3, 1)).part((0, 2, 0)) == ""
        assert division((2, 2, 2), None, None).part((1, 0, 1)) == "pp 1 of 2, dp 0 of 2, tp 1 of 2"

    @pytest.mark.parametrize(
        ("stages", "copies", "message"),
        [
            ("stage", None, "stages is 'stage', and mesh has the dimensions pp, dp, tp: give one of these"),
            (None, "replica", "copies is 'replica', and mesh has the dimensions pp, dp, tp"),
            ("pp", "pp", "copies is 'pp', as stages is: ranks of different stages hold different parameters"),
        ],
    )
    def test_a_wrong_name_is_told_with_the_right_ones(
        self, stages: str | None, copies: str | None, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            division((2, 2, 1), stages, copies)


keys = st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=5)


class TestCopies:
    @given(keys)
    def test_every_part_has_one_first_holder_from_which_the_others_take_it(
        self, keys: list[list[int]]
    ) -> None:
        all_ranks = [sharing_of(keys, rank) for rank in range(len(keys))]
        for index in range(3):
            for part in {mine[index] for mine in keys}:
                holders = [rank for rank, mine in enumerate(keys) if mine[index] == part]
                assert [all_ranks[rank].is_first[index] for rank in holders] == [True] + [False] * (
                    len(holders) - 1
                )
                for rank in holders[1:]:
                    assert (index, holders[0]) in all_ranks[rank].takes
                    assert (index, rank) in all_ranks[holders[0]].gives
        taken = sum(len(each.takes) for each in all_ranks)
        assert taken == sum(len(each.gives) for each in all_ranks)
        assert taken == sum(not first for each in all_ranks for first in each.is_first)
        assert any(are_common(keys)) == bool(taken)

    def test_ranks_may_have_different_numbers_of_parameters(self) -> None:
        """A stage may have more parameters than another one."""
        keys = [[("a",)], [("b",), ("b",)], [("b",), ("b",)]]
        assert sharing_of(keys, 0).is_first == (True,)
        assert sharing_of(keys, 1).gives == ((0, 2), (1, 2))
        assert sharing_of(keys, 2).takes == ((0, 1), (1, 1))
        assert are_common(keys) == [True, True]

    def test_copies_with_other_values_are_found(self) -> None:
        keys = [[0, 1], [1, 1], [0, 1]]
        same = [[b"x", b"y"], [b"z", b"y"], [b"x", b"y"]]
        assert first_difference(keys, same) is None
        assert first_difference(keys, [*same[:2], [b"x", b"!"]]) == (1, 0, 2)
        assert first_difference(keys, [*same[:2], [b"!", b"y"]]) == (0, 0, 2)
