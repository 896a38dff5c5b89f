"""The view of a new ballot, and the members at fault when members hold different results."""

from __future__ import annotations

import pytest

from p2pavg.consensus.choice import choose_view, disputed
from p2pavg.consensus.votes import Members
from tests.unit.consensus.answers import promise, some

NO_MEMBERS: Members = frozenset()


def digests(text: str) -> tuple[bytes, ...]:
    """Return one digest per letter; equal letters give equal digests."""
    return tuple(letter.encode() * 16 for letter in text)


class TestView:
    def test_all_members_that_answer_without_trouble(self) -> None:
        assert choose_view(1, {1: promise(), 2: promise(), 4: promise()}) == some(1, 2, 4)

    def test_a_member_accused_of_breaking_the_protocol_is_removed(self) -> None:
        answers = {0: promise(), 1: promise(hostile=[3]), 2: promise(), 3: promise()}
        assert choose_view(0, answers) == some(0, 1, 2)

    def test_the_accused_is_removed_even_if_the_accuser_is_later(self) -> None:
        answers = {0: promise(), 1: promise(), 3: promise(hostile=[1])}
        assert choose_view(0, answers) == some(0, 3)

    def test_only_one_accusation_of_each_accuser_counts(self) -> None:
        """A liar that accuses all members removes one of them, and is then removed itself for its broken links."""
        liar = promise(hostile=[1, 2, 4])
        answers = {0: promise(), 1: promise(), 2: promise(), 3: liar, 4: promise()}
        assert choose_view(0, answers) == some(0, 2, 4)

    def test_accusations_of_a_removed_member_do_not_count(self) -> None:
        answers = {0: promise(), 1: promise(hostile=[2]), 2: promise(hostile=[3]), 3: promise()}
        assert choose_view(0, answers) == some(0, 1, 3)

    def test_several_accusers_may_accuse_several_members(self) -> None:
        answers = {0: promise(hostile=[3]), 1: promise(hostile=[4]), 2: promise(), 3: promise(), 4: promise()}
        assert choose_view(0, answers) == some(0, 1, 2)

    def test_the_later_of_two_members_that_cannot_exchange_is_removed(self) -> None:
        for one, other in [(1, 3), (3, 1)]:
            answers = {position: promise() for position in range(4)} | {one: promise(apart=[other])}
            assert choose_view(0, answers) == some(0, 1, 2)

    def test_the_member_with_most_broken_links_is_removed_first(self) -> None:
        """A member that cannot exchange with several others is removed, and not those others."""
        answers = {0: promise(), 1: promise(apart=[2, 3]), 2: promise(), 3: promise()}
        assert choose_view(0, answers) == some(0, 2, 3)

    def test_broken_links_of_a_removed_member_do_not_count(self) -> None:
        answers = {0: promise(), 1: promise(apart=[4]), 2: promise(apart=[4]), 3: promise(), 4: promise()}
        assert choose_view(0, answers) == some(0, 1, 2, 3)

    def test_members_are_removed_until_all_can_exchange(self) -> None:
        answers = {position: promise() for position in range(6)}
        answers[1], answers[3] = promise(apart=[2]), promise(apart=[4])
        assert choose_view(0, answers) == some(0, 1, 3, 5)

    def test_trouble_with_a_member_that_does_not_answer_removes_no_member(self) -> None:
        answers = {0: promise(), 1: promise(apart=[3], hostile=[2])}
        assert choose_view(0, answers) == some(0, 1)

    @pytest.mark.parametrize("me", [0, 2])
    def test_the_leader_never_removes_itself(self, me: int) -> None:
        answers = {position: promise(hostile=[me]) for position in range(4)} | {me: promise()}
        assert choose_view(me, answers) == some(me), "the others cannot exchange with it"

    def test_an_accusation_of_the_leader_does_not_hide_another_one(self) -> None:
        answers = {0: promise(), 1: promise(hostile=[0, 2]), 2: promise()}
        assert choose_view(0, answers) == some(0)
        answers = {0: promise(), 1: promise(), 2: promise(hostile=[0, 1])}
        assert choose_view(0, answers) == some(0)

    def test_the_earlier_member_is_removed_if_the_later_one_leads(self) -> None:
        assert choose_view(3, {1: promise(apart=[3]), 2: promise(), 3: promise()}) == some(2, 3)


class TestDisputed:
    REDUCERS = (0, 1, 2, 4)

    def test_no_member_is_at_fault_when_all_hold_the_same(self) -> None:
        agreed = {0: digests("abcd"), 1: digests("abcd"), 4: digests("abcd")}
        assert disputed(agreed, self.REDUCERS) == NO_MEMBERS
        assert disputed({}, self.REDUCERS) == NO_MEMBERS

    def test_a_member_that_differs_in_several_shares_is_odd(self) -> None:
        held = {0: digests("abcd"), 1: digests("abcd"), 2: digests("axxd"), 4: digests("abcd")}
        assert disputed(held, self.REDUCERS) == some(2)

    def test_the_reducer_of_the_one_share_that_differs_is_odd(self) -> None:
        held = {0: digests("abcd"), 1: digests("abcd"), 2: digests("abcx"), 4: digests("abcd")}
        assert disputed(held, self.REDUCERS) == some(4)

    def test_a_reducer_that_sends_each_member_another_average(self) -> None:
        held = {0: digests("avcd"), 1: digests("awcd"), 2: digests("axcd"), 4: digests("aycd")}
        assert disputed(held, self.REDUCERS) == some(1)

    def test_a_reducer_that_divides_the_group_in_two(self) -> None:
        held = {0: digests("abcd"), 1: digests("abcd"), 2: digests("xbcd"), 4: digests("xbcd")}
        assert disputed(held, self.REDUCERS) == some(0)

    def test_two_odd_reducers(self) -> None:
        held = {0: digests("abcd"), 1: digests("xbcd"), 2: digests("abcx"), 4: digests("abcd")}
        assert disputed(held, self.REDUCERS) == some(0, 4)

    def test_an_odd_member_and_an_odd_reducer(self) -> None:
        held = {0: digests("abcd"), 1: digests("xyzd"), 2: digests("abcx"), 4: digests("abcd")}
        assert disputed(held, self.REDUCERS) == some(1, 4)

    def test_a_source_that_changed_a_dead_reducers_share(self) -> None:
        held = {0: digests("abcd"), 1: digests("abcd"), 2: digests("abcx")}
        assert disputed(held, self.REDUCERS, source=0) == some(0)
        assert disputed(held, self.REDUCERS, source=None) == some(2)

    def test_an_auxiliary_holds_nothing_and_is_not_asked(self) -> None:
        held = {0: digests("abcd"), 1: (), 2: digests("abcd"), 4: ()}
        assert disputed(held, self.REDUCERS) == NO_MEMBERS
        held[3] = digests("abxd")
        assert disputed(held, self.REDUCERS) == some(2)

    @pytest.mark.parametrize("odd", ["abc", "abcde", "a"])
    def test_a_member_with_another_number_of_digests_is_odd(self, odd: str) -> None:
        held = {0: digests("abcd"), 1: digests("abcd"), 2: digests(odd)}
        assert disputed(held, self.REDUCERS) == some(2)

    def test_the_order_of_members_does_not_matter(self) -> None:
        """If two members hold different results, either may be right. The decision must only be the same for both."""
        one, other = digests("abcd"), digests("xbcd")
        assert disputed({0: one, 1: other}, self.REDUCERS) == disputed({1: other, 0: one}, self.REDUCERS)
        assert disputed({0: one, 1: other}, self.REDUCERS) == some(0)
