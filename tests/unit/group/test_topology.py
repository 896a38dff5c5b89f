"""Topologies as values, their texts, and the reducer that the members of a star elect."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import MAX_AUXILIARY_ELEMENTS
from p2pavg.group.aggregation import Aggregation, Median, read_aggregation, topology_in
from p2pavg.group.candidate import Candidate
from p2pavg.group.reach import Reach
from p2pavg.group.roster import MAX_AUXILIARY_INPUTS, ShareCutter, elect
from p2pavg.group.topology import BUTTERFLY, Butterfly, Gossip, Star, Topology, resolve_topology
from tests.unit.group.samples import candidate, roster

ELEMENTS = 1000


def members(*bandwidths: float, **changes: Any) -> list[Candidate]:
    return [
        candidate(index, bandwidth=bandwidth, **changes.get(f"of_{index}", {}))
        for index, bandwidth in enumerate(bandwidths)
    ]


def elected(group: list[Candidate], elements: int = ELEMENTS) -> int:
    return elect(group, elements)


@pytest.mark.parametrize("topology", [Butterfly(), Star(), Gossip(), Gossip(63)])
def test_a_topology_is_read_from_its_text(topology: Topology) -> None:
    assert resolve_topology(topology.text) == resolve_topology(topology) == topology


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "ring",
        "Star",
        "star:1",
        None,
        1,
        Star,
        b"star",
        "gossip:",
        "gossip:01",
        "gossip:٣",
        "gossip:100",
        "gossip:1:grid:2",
    ],
)
def test_other_topologies_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="a topology is 'butterfly', 'star', 'hierarchical', 'gossip' or"):
        resolve_topology(wrong)


def test_gossip_has_one_text_however_it_is_named() -> None:
    assert {resolve_topology(text).text for text in ("gossip", "gossip:1", "gossip:1:grid")} == {
        "gossip:1:grid"
    }
    assert resolve_topology("gossip:7") == Gossip(degree=7)
    assert read_aggregation("topology:gossip:7:grid") == Aggregation(topology=Gossip(7))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"degree": 0}, "degree must be a whole number from 1 to 63"),
        ({"degree": 64}, "degree must be"),
        ({"degree": True}, "degree must be"),
        ({"degree": 1.0}, "degree must be"),
        ({"graph": "base"}, "graph must be 'grid'"),
    ],
)
def test_gossip_out_of_range_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gossip(**values)


def test_a_group_that_gossips_shares_the_vector_like_a_butterfly() -> None:
    group = members(20.0, 50.0)
    assert ShareCutter(ELEMENTS, 64, Gossip()).cut(group) == ShareCutter(ELEMENTS, 64).cut(group)


def test_a_butterfly_changes_no_key_and_a_star_does() -> None:
    assert Aggregation(topology=Butterfly()).text == ""
    assert Aggregation(Median(), topology=Star()).text == "median topology:star"
    for each in (Aggregation(), Aggregation(Median(), 2.0, None, Star())):
        assert read_aggregation(each.text) == each


@pytest.mark.parametrize("text", ["topology:butterfly", "topology:", "topology:ring", "topology:star median"])
def test_a_text_that_no_aggregation_has_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_aggregation(text)


def test_the_topology_of_a_later_version_has_a_name() -> None:
    assert topology_in("median topology:ring:4") == "ring:4"
    assert topology_in("median") == BUTTERFLY.text


class TestElection:
    def test_the_largest_bandwidth_is_elected(self) -> None:
        assert elected(members(20.0, 1000.0, 999.0)) == 1

    def test_the_first_peer_id_of_equal_members_is_elected(self) -> None:
        group = members(100.0, 100.0, 100.0)
        first = min(range(3), key=lambda index: group[index].peer_id)
        assert elected(group) == first

    def test_a_member_of_unknown_bandwidth_comes_after_all_others(self) -> None:
        assert elected(members(0.0, 5.0, 0.0)) == 1
        group = members(0.0, 0.0, 0.0)
        assert elected(group) == min(range(3), key=lambda index: group[index].peer_id)

    def test_an_observer_may_reduce(self) -> None:
        assert elected(members(20.0, 20.0, 1000.0, of_2={"weight": 0.0})) == 2

    def test_an_auxiliary_may_reduce_and_has_more_traffic_than_a_contributor(self) -> None:
        assert elected(members(90.0, 90.0, 300.0, of_2={"auxiliary": True})) == 2
        # Three vectors each way at 140 Mbit/s take longer than two at 100.
        assert elected(members(100.0, 90.0, 90.0, 140.0, of_3={"auxiliary": True})) == 0

    def test_an_auxiliary_reduces_no_more_than_it_may_hold(self) -> None:
        group = members(10.0, 10.0, 1000.0, of_2={"auxiliary": True})
        assert elected(group, MAX_AUXILIARY_ELEMENTS) == 2
        assert elected(group, MAX_AUXILIARY_ELEMENTS + 1) != 2
        large = members(*[10.0] * 7, 1000.0, of_7={"auxiliary": True})
        assert elected(large, MAX_AUXILIARY_INPUTS // 7) == 7
        assert elected(large, MAX_AUXILIARY_INPUTS // 7 + 1) != 7

    def test_a_member_that_all_others_reach_is_elected_before_a_faster_one_behind_relays(self) -> None:
        relayed = {"reach": Reach.RELAYED}
        assert elected(members(50.0, 1000.0, 100.0, of_1=relayed, of_2=relayed)) == 0
        punched = {"reach": Reach.PUNCHABLE}
        assert elected(members(50.0, 1000.0, 100.0, of_1=punched, of_2=punched)) == 1, "both connect directly"
        # Of a vector of 1 Mbit the relays carry 2 Mbit at 10 Mbit/s, and the first member 2 at 5.
        assert elected(members(5.0, 1000.0, 100.0, of_1=punched, of_2=relayed)) == 1
        assert elected(members(20.0, 1000.0, 100.0, of_1=punched, of_2=relayed)) == 0

    @given(st.lists(st.floats(0.1, 1e5) | st.just(0.0), min_size=2, max_size=8), st.integers(0, 2**32))
    def test_each_member_elects_the_same_in_any_order(self, bandwidths: list[float], seed: int) -> None:
        group = members(*bandwidths)
        shuffled = random.Random(seed).sample(group, len(group))
        assert shuffled[elect(shuffled, ELEMENTS)] is group[elect(group, ELEMENTS)]


class TestShares:
    cutter = ShareCutter(ELEMENTS, 64, Star())

    def test_one_member_has_the_whole_vector(self) -> None:
        assert self.cutter.cut(members(20.0, 1000.0, 20.0)) == (0, ELEMENTS, 0)

    def test_those_that_are_left_elect_anew(self) -> None:
        group = members(20.0, 1000.0, 50.0, 20.0)
        whole = roster(group, self.cutter.cut(group))
        left = whole.among(1, [0, 2, 3], self.cutter)
        assert left.shares == (0, ELEMENTS, 0)
        assert left.ranges == ((), ((0, ELEMENTS),), ())
        last = whole.among(2, [0, 3], self.cutter)
        assert sorted(last.shares) == [0, ELEMENTS]

    def test_a_reducer_that_is_left_goes_on(self) -> None:
        group = members(20.0, 1000.0, 50.0, 20.0)
        whole = roster(group, self.cutter.cut(group))
        assert whole.among(1, [0, 1, 3], self.cutter).ranges == ((), ((0, ELEMENTS),), ())
