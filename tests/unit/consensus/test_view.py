"""The view of a new ballot, and the shares of which members name different digests."""

from __future__ import annotations

import pytest

from p2pavg.consensus.choice import choose_view, share_in_dispute, usual_digests
from tests.unit.consensus.answers import promise, some


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

    @pytest.mark.parametrize("accused", [[1, 2, 4], [1, 4], [0, 4]], ids=str)
    def test_a_member_that_accuses_several_is_removed_and_they_are_not(self, accused: list[int]) -> None:
        liar = promise(hostile=accused)
        answers = {0: promise(), 1: promise(), 2: promise(), 3: liar, 4: promise()}
        assert choose_view(0, answers) == some(0, 1, 2, 4)

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

    def test_a_member_that_accuses_the_leader_is_removed(self) -> None:
        assert choose_view(0, {0: promise(), 1: promise(hostile=[0]), 2: promise()}) == some(0, 2)

    def test_the_earlier_member_is_removed_if_the_later_one_leads(self) -> None:
        assert choose_view(3, {1: promise(apart=[3]), 2: promise(), 3: promise()}) == some(2, 3)


class TestDispute:
    """A leader compares what the members name with what each reducer has signed to it."""

    OWN = digests("abcd")
    SIGNED = digests("wxyz")

    def test_the_first_share_that_differs_is_shown(self) -> None:
        assert share_in_dispute(self.OWN, self.SIGNED, digests("abxx")) == 2
        assert share_in_dispute(self.OWN, self.SIGNED, digests("xxxx")) == 0

    def test_nothing_is_shown_to_a_member_that_names_the_same(self) -> None:
        assert share_in_dispute(self.OWN, self.SIGNED, self.OWN) is None

    def test_a_share_without_parts_has_no_signature(self) -> None:
        signed = (b"", *self.SIGNED[1:])
        assert share_in_dispute(self.OWN, signed, digests("xbcd")) is None
        assert share_in_dispute(self.OWN, signed, digests("xbcx")) == 3

    @pytest.mark.parametrize("other", ["abc", "abcde", "a"])
    def test_another_number_of_digests_is_about_no_share(self, other: str) -> None:
        assert share_in_dispute(self.OWN, self.SIGNED, digests(other)) is None

    def test_a_leader_without_a_result_takes_what_most_members_name(self) -> None:
        assert usual_digests([self.OWN, digests("abcx"), self.OWN]) == self.OWN
        assert usual_digests([]) == ()

    def test_the_order_of_members_does_not_matter(self) -> None:
        one, other = self.OWN, digests("xbcd")
        assert usual_digests([one, other]) == usual_digests([other, one]) == other
