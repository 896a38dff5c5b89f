"""Gossip: the cells and places where peers meet, and the rotation of an averager."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2pavg.group.places.gossip import (
    EVERYWHERE,
    MAX_LAG,
    ROUND,
    Rotation,
    SearchPlace,
    SearchStage,
    cell_of,
    cells_for,
    place_of,
    stages_at,
    stages_of,
)

ids = st.text(st.characters(codec="ascii"), min_size=1, max_size=60)
rounds = st.integers(0, 2**53)


def stages(number: int, peers: int, last: set[str]) -> tuple[SearchStage, ...]:
    return stages_of("me", number, peers, last, group_size=2, seconds=4.0, patience=3.0)


class TestCells:
    @given(st.integers(1, 10**6), st.integers(2, 64))
    def test_a_cell_has_enough_peers_for_two_groups_and_no_more_than_for_four(
        self, peers: int, group_size: int
    ) -> None:
        cells = cells_for(peers, group_size)
        assert cells & (cells - 1) == 0
        if cells > 1:
            assert 2 * group_size <= peers / cells < 4 * group_size
        else:
            assert peers < 4 * group_size

    @given(ids, ids, rounds, st.sampled_from([2, 4, 64]))
    def test_peers_look_in_one_place_if_their_cells_are_the_same(
        self, one: str, other: str, number: int, cells: int
    ) -> None:
        same = cell_of(one, number, cells) == cell_of(other, number, cells)
        assert (place_of(one, number, cells) == place_of(other, number, cells)) == same

    @given(ids, rounds, st.sampled_from([2, 4, 64]))
    def test_places_of_two_rounds_and_of_two_numbers_of_cells_differ(
        self, peer: str, number: int, cells: int
    ) -> None:
        places = {
            place_of(peer, number, cells),
            place_of(peer, number + 1, cells),
            place_of(peer, number, 2 * cells),
        }
        assert len(places) == 3

    def test_cells_of_a_few_peers_are_the_common_place(self) -> None:
        assert place_of("peer", 7, cells_for(7, 2)) == b""
        assert place_of("peer", 7, cells_for(8, 2)) != b""

    def test_cells_are_evenly_filled_in_each_round(self) -> None:
        for number in range(5):
            filled = Counter(cell_of(f"peer {index}", number, 8) for index in range(8000))
            assert all(850 < filled[cell] < 1150 for cell in range(8))


class TestStages:
    def test_a_peer_looks_in_ever_larger_cells_and_in_the_end_in_the_common_place(self) -> None:
        found = stages(3, 1000, {"last"})
        places = [stage.meeting.place for stage in found]
        assert places == [*(place_of("me", 3, cells) for cells in (128, 16, 2)), b"", b""]
        assert [bool(stage.meeting.avoid) for stage in found] == [True] * 4 + [False]
        assert found[-1].seconds == math.inf
        assert sum(stage.seconds for stage in found[:-1]) == 4.0
        assert found[-1].meeting.patience == 3.0

    def test_two_peers_avoid_nobody(self) -> None:
        (only,) = stages(3, 2, {"last"})
        assert not only.meeting.avoid

    def test_three_peers_avoid_the_last_partner_for_a_while(self) -> None:
        first, last = stages(3, 3, {"last"})
        assert first.meeting.avoid == {"last"}
        assert not last.meeting.avoid


class TestSearches:
    def test_one_place_has_no_end(self) -> None:
        here = SearchPlace(place=b"here")
        assert stages_at(None) == (SearchStage(EVERYWHERE),)
        assert stages_at(here) == (SearchStage(here, math.inf),)

    @pytest.mark.parametrize(
        "wrong", [[], [SearchStage(EVERYWHERE), SearchStage(EVERYWHERE)], [SearchStage(EVERYWHERE, 0.0)] * 2]
    )
    def test_a_stage_that_no_other_can_follow_is_refused(self, wrong: list[SearchStage]) -> None:
        with pytest.raises(ValueError, match="meeting must have"):
            stages_at(wrong)


class TestRotation:
    def test_a_peer_looks_elsewhere_in_its_next_round_and_avoids_its_last_group(self) -> None:
        rotation = Rotation("me", 2, 30.0)
        first = rotation.stages(100)
        assert rotation.stages(100) == first, "a round that came to nothing is looked for in the same places"
        rotation.took(("me", "other"), {"me": 1.0, "other": 1.0}, {ROUND: 0.0})
        second = rotation.stages(100)
        assert rotation.metrics == {ROUND: 1.0}
        assert not first[0].meeting.avoid
        assert second[0].meeting.avoid == {"other"}
        places = [{each.meeting.place for each in stages if each.meeting.place} for stages in (first, second)]
        assert places[0]
        assert not places[0] & places[1]

    def test_a_search_takes_the_match_timeout_at_most(self) -> None:
        for timeout in (2.0, 30.0):
            for peers in (2, 5, 1000):
                *others, last = Rotation("me", 2, timeout).stages(peers)
                assert sum(each.seconds for each in others) + (last.meeting.patience or math.inf) <= timeout

    def test_a_peer_that_was_behind_continues_from_its_partner_s_count(self) -> None:
        rotation = Rotation("me", 2, 30.0)
        rotation.took(("me", "other"), {"me": 1.0, "other": 3.0}, {ROUND: 10.0})
        assert rotation.number == 21

    def test_no_claim_advances_a_peer_far(self) -> None:
        rotation = Rotation("me", 2, 30.0)
        rotation.took(("me", "other"), {"me": 1.0, "other": 1.0}, {ROUND: 1e99})
        assert rotation.number == MAX_LAG + 1

    def test_a_peer_that_was_ahead_takes_one_round(self) -> None:
        rotation = Rotation("me", 2, 30.0)
        rotation.took(("me", "other"), {"me": 1.0, "other": 1.0}, {ROUND: 10.0})
        before = rotation.number
        rotation.took(("me", "other"), {"me": 1.0, "other": 1.0}, {ROUND: before / 2})
        assert rotation.number == before + 1

    @given(
        st.floats(-1e100, 1e100),
        st.floats(0.0, 1e15, exclude_min=True),
        st.floats(0.0, 1e15, exclude_min=True),
    )
    @example(0.1, 1.0, 5e-324)
    def test_every_claim_is_a_number_of_rounds(self, mean: float, mine: float, weight: float) -> None:
        """A weight of 5e-324 makes the number of the others infinite, or no number."""
        rotation = Rotation("me", 2, 30.0)
        rotation.took(("me", "other"), {"me": mine, "other": weight}, {ROUND: mean})
        assert 1 <= rotation.number <= MAX_LAG + 1
        assert rotation.metrics == {ROUND: float(rotation.number)}

    def test_a_member_without_a_number_counts_for_nothing(self) -> None:
        """The mean is over the members that gave one: this peer."""
        rotation = Rotation("me", 3, 30.0)
        rotation.took(("a", "me"), {"a": 5.0, "me": 1.0}, {ROUND: 0.0})
        assert rotation.number == 1

    def test_a_round_of_another_caller_changes_nothing(self) -> None:
        rotation = Rotation("me", 2, 30.0)
        rotation.took(("me", "other"), {"me": 1.0, "other": 1.0}, {"outer_step": 3.0})
        assert rotation.number == 0
        assert not rotation.stages(100)[0].meeting.avoid
