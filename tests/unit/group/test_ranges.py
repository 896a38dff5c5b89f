"""The division of a vector after a loss: what is kept, what is divided, and what every member can compute."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from p2pavg.group.roster import Range, ranges_after_loss, whole_ranges
from p2pavg.group.shares import MemberLink, fastest_shares, largest_fraction


def equal(elements: int, members: int, granularity: int = 1) -> tuple[int, ...]:
    return fastest_shares(elements, [MemberLink(100.0)] * members, granularity)


def flat(divided: tuple[tuple[Range, ...], ...]) -> list[Range]:
    return sorted(each for ranges in divided for each in ranges)


def test_in_the_first_attempt_shares_follow_one_another() -> None:
    assert whole_ranges([10, 0, 5]) == (((0, 10),), (), ((10, 15),))


def test_the_others_keep_their_ranges_and_divide_that_of_the_lost_member() -> None:
    assert ranges_after_loss([30, 30, 30], [0, 2], [45, 45], 1) == (((0, 30), (30, 45)), ((60, 90), (45, 60)))


def test_a_lost_member_without_a_share_changes_nothing() -> None:
    assert ranges_after_loss([30, 0, 30], [0, 2], [40, 20], 1) == (((0, 30),), ((30, 60),))


def test_a_member_that_has_more_than_it_would_have_gets_nothing() -> None:
    assert ranges_after_loss([40, 20, 20], [0, 1], [30, 50], 1) == (((0, 40),), ((40, 60), (60, 80)))


def test_what_is_divided_may_lie_on_both_sides_of_what_is_kept() -> None:
    found = ranges_after_loss([10, 10, 10, 10], [1, 3], [10, 30], 1)
    assert found == (((10, 20),), ((30, 40), (0, 10), (20, 30)))


def test_a_member_without_a_share_may_get_one() -> None:
    assert ranges_after_loss([0, 20], [0], [20], 1) == (((0, 20),),)


def test_a_vector_of_nothing_is_divided() -> None:
    assert ranges_after_loss([0, 0, 0], [0, 1], [0, 0], 64) == ((), ())


@st.composite
def losses(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(2, 12))
    links = [
        MemberLink(draw(st.sampled_from([1.0, 5.0, 20.0, 100.0])), draw(st.booleans())) for _ in range(size)
    ]
    links[0] = MemberLink(10.0)
    elements, granularity = draw(st.integers(0, 5000)), draw(st.sampled_from([1, 7, 64]))
    left = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    some = [links[position] for position in left]
    return {
        "shares": fastest_shares(elements, links, granularity, largest_fraction(links)),
        "left": left,
        "wanted": fastest_shares(elements, some, granularity, largest_fraction(some)),
        "granularity": granularity,
    }


@given(losses())
def test_every_element_has_one_reducer_and_no_block_is_split(loss: dict[str, Any]) -> None:
    elements, granularity = sum(loss["shares"]), loss["granularity"]
    at = 0
    for start, stop in flat(ranges_after_loss(**loss)):
        assert start == at < stop
        assert stop % granularity == 0 or stop == elements
        at = stop
    assert at == elements


@given(losses())
def test_no_member_loses_a_range_or_gets_more_than_its_due(loss: dict[str, Any]) -> None:
    first = whole_ranges(loss["shares"])
    for position, want, ranges in zip(loss["left"], loss["wanted"], ranges_after_loss(**loss), strict=True):
        assert ranges[: len(first[position])] == first[position]
        size = sum(stop - start for start, stop in ranges)
        assert size <= max(want, loss["shares"][position]) + loss["granularity"]


@given(losses(), st.data())
def test_a_later_loss_leaves_the_first_ranges_in_place(loss: dict[str, Any], data: st.DataObject) -> None:
    """The ranges do not depend on the attempts between: a member that skipped one computes the same."""
    left = loss["left"]
    fewer = sorted(data.draw(st.sets(st.sampled_from(left), min_size=1)))
    wanted = equal(sum(loss["shares"]), len(fewer), loss["granularity"])
    again = ranges_after_loss(loss["shares"], fewer, wanted, loss["granularity"])
    first = whole_ranges(loss["shares"])
    assert [ranges[: len(first[at])] for at, ranges in zip(fewer, again, strict=True)] == [
        first[at] for at in fewer
    ]
