"""The rules of cells: when they mix, which member holds which share, which cell a newcomer takes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.messages import pack
from p2pavg.optim import Cells
from p2pavg.optim.cells.between import values_of, write
from p2pavg.optim.cells.cells import (
    SPEAKERS,
    UNDECIDED,
    CellNews,
    bounds_of,
    choose_cell,
    holders,
    news_of,
    outer_state,
    read_news,
    refuge,
    reported,
    sizes_of,
    speakers,
)

CELLS = Cells(count=4)
peer_ids = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=64, unique=True)


def member(cell: int, members: int) -> CellNews:
    return news_of(CELLS, cell, members)


def newcomers(count: int, first: int = 0) -> dict[str, CellNews]:
    return {f"new {number}": member(UNDECIDED, 0) for number in range(first, first + count)}


# ---------------------------------------------------------------------- when


@given(every=st.integers(1, 20), data=st.data())
def test_outer_averages_begin_delay_updates_before_each_mix(every: int, data: st.DataObject) -> None:
    delay = data.draw(st.integers(0, every - 1))
    cells = Cells(count=2, every=every, delay=delay)
    mixes = [epoch for epoch in range(10 * (every + 1)) if cells.is_mix(epoch)]
    begins = [epoch for epoch in range(10 * (every + 1)) if cells.begins_outer(epoch)]
    assert mixes == list(range(every + 1, 10 * (every + 1), every + 1))
    assert begins[: len(mixes)] == [epoch - 1 - delay for epoch in mixes]


# ---------------------------------------------------------------------- shares


@given(shares=st.integers(1, 64), elements=st.integers(0, 1000))
def test_shares_cover_each_value_once(shares: int, elements: int) -> None:
    bounds = [bounds_of(share, shares, elements) for share in range(shares)]
    covered = [index for start, stop in bounds for index in range(start, stop)]
    assert covered == list(range(elements))
    assert max(stop - start for start, stop in bounds) - min(stop - start for start, stop in bounds) <= 1


@given(roster=peer_ids, shares=st.integers(1, 64))
def test_no_member_holds_more_than_its_part_and_all_members_compute_the_same(
    roster: list[str], shares: int
) -> None:
    found = holders(roster, shares)
    assert len(found) == shares
    assert max(Counter(found).values()) <= -(-shares // len(roster))
    assert holders(sorted(roster, reverse=True), shares) == found


def test_few_shares_change_their_holders_when_a_peer_is_lost() -> None:
    roster = [f"peer {number}" for number in range(32)]
    before, after = holders(roster, 16), holders(roster[1:], 16)
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 4


@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6), data=st.data())
def test_a_range_of_the_flat_vector_is_read_and_written(sizes: list[int], data: st.DataObject) -> None:
    tensors = [torch.randn(size) for size in sizes]
    flat = torch.cat(tensors)
    start = data.draw(st.integers(0, flat.numel()))
    stop = data.draw(st.integers(start, flat.numel()))
    assert torch.equal(values_of(tensors, start, stop), flat[start:stop])
    zeros = [torch.zeros(size) for size in sizes]
    write(zeros, start, flat[start:stop])
    expected = torch.zeros_like(flat)
    expected[start:stop] = flat[start:stop]
    assert torch.equal(torch.cat(zeros), expected)


def test_a_range_is_a_copy_in_float32() -> None:
    tensor = torch.ones(4, dtype=torch.bfloat16)
    values = values_of([tensor], 1, 3)
    tensor.zero_()
    assert values.dtype == torch.float32
    assert values.tolist() == [1.0, 1.0]


def test_peers_with_other_rules_have_other_recipes() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"every": 9},
        {"shares": 9},
        {"delay": 9},
        {"robust": "median"},
        {"count": 9},
    ]
    assert len({Cells(**{"count": 4, **change}).rules for change in changes}) == len(changes)


def test_holders_of_runs_with_other_settings_do_not_meet() -> None:
    states = {outer_state(cells, 100) for cells in (CELLS, Cells(count=5), Cells(count=4, every=9))}
    assert len(states | {outer_state(CELLS, 101)}) == 4


# ---------------------------------------------------------------------- which cell


@given(count=st.integers(2, 8), peers=st.integers(2, 80))
def test_peers_that_choose_at_once_fill_the_cells_evenly(count: int, peers: int) -> None:
    here = newcomers(peers)
    chosen = Counter(
        choose_cell(me, {peer: each for peer, each in here.items() if peer != me}, count=count, least=2)
        for me in here
    )
    sizes = [chosen[cell] for cell in range(count)]
    assert sum(sizes) == peers
    opened = [size for size in sizes if size]
    assert min(opened) >= 2 or peers % 2
    if peers >= 2 * count:
        assert max(sizes) - min(sizes) <= 1


@given(peers=st.integers(2, 12), data=st.data())
def test_peers_that_start_choose_alike_whatever_the_others_have_said(peers: int, data: st.DataObject) -> None:
    ids = [f"new {number}" for number in range(peers)]
    plan = {
        me: choose_cell(me, {peer: member(UNDECIDED, 0) for peer in ids if peer != me}, count=3, least=2)
        for me in ids
    }
    me = data.draw(st.sampled_from(ids))
    said = {peer: member(data.draw(st.sampled_from([UNDECIDED, 0, 1, 2])), 0) for peer in ids if peer != me}
    assert choose_cell(me, said, count=3, least=2) == plan[me]


@pytest.mark.parametrize(
    ("members", "count", "cell"),
    [
        pytest.param([(0, 9), (1, 7), (2, 8), (3, 9)], 4, 1, id="the smallest that trains"),
        pytest.param([(0, 9), (1, 8), (1, 0), (1, 0)], 2, 0, id="with those that have just chosen"),
        pytest.param([(0, 2), (1, 1), (2, 5)], 4, 1, id="first one that is too small to train"),
        pytest.param([(0, 40), (1, 50)], 3, 0, id="none in which it would be alone"),
        pytest.param([(0, 64), (1, 64)], 2, None, id="none of a full run"),
    ],
)
def test_a_newcomer_takes_a_cell(members: list[tuple[int, int]], count: int, cell: int | None) -> None:
    news = {f"peer {number}": member(*each) for number, each in enumerate(members)}
    assert choose_cell("me", news, count=count, least=2) == cell


def test_two_newcomers_may_open_a_cell() -> None:
    news = {"a": member(0, 40), "b": member(1, 50)}
    assert choose_cell("me", {**news, **newcomers(1)}, count=3, least=2) == 2 or (
        choose_cell("new 0", {**news, "me": member(UNDECIDED, 0)}, count=3, least=2) == 2
    )


def test_a_member_that_lies_about_its_cell_is_outvoted() -> None:
    honest = {"a": member(0, 9), "b": member(0, 9)}
    assert reported([*honest.values(), member(0, 64)]) == {0: 9}
    assert sizes_of([*honest.values(), member(0, 64)], 4) == [9, 0, 0, 0]


def test_a_few_members_speak_for_a_cell() -> None:
    roster = [f"peer {number}" for number in range(20)]
    assert len(speakers(roster)) == SPEAKERS
    assert speakers(roster) == speakers(reversed(roster))  # type: ignore[arg-type]
    assert speakers(["one"]) == {"one"}


def test_members_of_a_cell_that_is_too_small_move_to_the_smallest_that_trains() -> None:
    news = [member(0, 1), member(1, 6), member(2, 4)]
    assert refuge(0, news, count=4, least=2) == 2


def test_members_of_cells_that_are_all_too_small_meet_in_one() -> None:
    news = [member(0, 1), member(2, 1)]
    assert refuge(2, news, count=4, least=2) == 0
    assert refuge(0, news, count=4, least=2) is None


# ---------------------------------------------------------------------- news


def test_news_comes_as_it_was_said() -> None:
    said = {"a": member(2, 40).encode(), "b": member(UNDECIDED, 0).encode()}
    assert read_news(said, CELLS) == ({"a": member(2, 40), "b": member(UNDECIDED, 0)}, 0)


def test_peers_with_other_cells_are_counted_and_not_believed() -> None:
    said = {"a": news_of(Cells(count=5), 1, 9).encode(), "b": pack(2, 0, 1, (4, 50, 8, 1))}
    assert read_news(said, CELLS) == ({}, 2)


@given(st.binary(max_size=64))
def test_any_bytes_are_news_or_left_out(value: bytes) -> None:
    found, others = read_news({"a": value}, CELLS)
    assert len(found) + others <= 1


@pytest.mark.parametrize(("cell", "members"), [(-2, 1), (64, 1), (0, -1), (0, 65), (UNDECIDED, 1)])
def test_news_out_of_range_is_left_out(cell: int, members: int) -> None:
    assert read_news({"a": pack(2, cell, members, (4, 50, 8, 0))}, CELLS) == ({}, 0)


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"count": 1}, "count must be a number of cells from 2 to 64"),
        ({"count": 65}, "count must be a number of cells from 2 to 64"),
        ({"count": 2.0}, "count must be a whole number"),
        ({"every": 0}, "every must be a whole number above 0"),
        ({"shares": 0}, "shares must be a whole number above 0"),
        ({"shares": 65}, "shares must be from 1 to 64"),
        ({"delay": -1}, "delay must be a whole number from 0 to below every"),
        ({"delay": 50}, "delay must be a whole number from 0 to below every"),
        ({"delay": True}, "delay must be a whole number from 0"),
        ({"timeout": 0.0}, "timeout must be a number above 0"),
        ({"robust": "mode"}, "robust: "),
        ({"patience": float("nan")}, "patience must be a number above 0"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Cells(**{"count": 4, **given})
