"""Peers are compared at the latest update that both have reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from p2pavg.telemetry.status import PeerStatus
from p2pavg.tools.monitor.lineages import MAX_BRANCHES, MAX_KNOWN, Reported, _agree, _Cluster, branches


def state(number: int) -> bytes:
    return bytes([number % 256]) * 8


def test_peers_of_one_lineage_at_different_updates_are_one_branch() -> None:
    (found,), apart = branches(
        {"one": {4: state(4), 7: state(7)}, "two": {4: state(4), 6: state(6)}, "three": {6: state(6)}}
    )
    assert (found.peers, found.epoch, found.state) == (("one", "three", "two"), 7, state(7))
    assert apart == ()


@pytest.mark.parametrize(
    ("reported", "expected", "alone"),
    [
        ({"one": {4: 4}, "two": {4: 4}, "three": {4: 9}}, [("one", "two"), ("three",)], ()),
        ({"one": {4: 4, 8: 8}, "two": {4: 4, 8: 9}}, [("one",), ("two",)], ()),
        ({"one": {4: 4}, "two": {4: 4}, "new": {0: 0}}, [("one", "two")], ("new",)),
        ({"one": {3: 3}}, [("one",)], ()),
        ({}, [], ()),
    ],
    ids=["they differ", "they agreed once", "one is not compared", "a single one", "none"],
)
def test_branches(
    reported: dict[str, dict[int, int]], expected: list[tuple[str, ...]], alone: tuple[str, ...]
) -> None:
    states = {peer: {epoch: state(each) for epoch, each in its.items()} for peer, its in reported.items()}
    found, apart = branches(states)
    assert [branch.peers for branch in found] == expected
    assert apart == alone


def test_number_of_branches_is_bounded() -> None:
    found, apart = branches({f"peer {index}": {1: index.to_bytes(8, "big")} for index in range(500)})
    assert len(found) == MAX_BRANCHES
    assert len(apart) == 500 - MAX_BRANCHES


def test_reported_states_include_marks_and_are_forgotten_when_the_peer_goes_back() -> None:
    reported = Reported()
    reported.receive(PeerStatus(epoch=9, lineage=state(9), marks=((4, state(4)), (8, state(8)))))
    reported.receive(PeerStatus(epoch=10, lineage=state(10), marks=((8, state(8)),)))
    assert reported.states == {4: state(4), 8: state(8), 9: state(9), 10: state(10)}
    reported.receive(PeerStatus(epoch=8, lineage=state(88)))
    assert reported.states == {4: state(4), 8: state(88)}
    for epoch in range(200):
        reported.receive(PeerStatus(epoch=epoch, lineage=state(epoch)))
    assert len(reported.states) == MAX_KNOWN
    reported.receive(PeerStatus())
    assert reported.states == {}


class OnlyLookedUp(dict[int, bytes]):
    """States that may be looked up, and not walked over."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("all states were walked over")

    keys = items = values = __iter__  # type: ignore[assignment]


def test_cost_of_a_comparison_is_that_of_the_smaller_side() -> None:
    many = OnlyLookedUp({epoch: state(epoch) for epoch in range(10_000)})
    assert _agree({4: state(4), 20_000: state(0)}, many) is True
    assert _agree(many, {4: state(4), 7: state(8)}) is False
    assert _agree({20_000: state(0)}, many) is None


def test_peers_that_join_a_branch_copy_none_of_its_states() -> None:
    known = {4: state(4)}
    cluster = _Cluster(["one"], known)
    cluster.take(["two"], {4: state(4), 5: state(5)})
    cluster.take(["three"], {5: state(5), 6: state(6)})
    assert cluster.states is known
    assert known == {4: state(4), 5: state(5), 6: state(6)}


def test_peer_that_invents_updates_pushes_no_shared_state_out() -> None:
    invented = {
        f"liar {index}": {
            3: state(3),
            **dict.fromkeys(range(1000 * index + 100, 1000 * index + 163), state(1)),
        }
        for index in range(20)
    }
    (found,), apart = branches({"one": {3: state(3)}, "two": {3: state(3)}, **invented})
    assert {"one", "two"} <= set(found.peers)
    assert apart == ()
