"""The view of a new ballot, and the shares of which members name different digests."""

from __future__ import annotations

import pytest

from p2pavg.consensus.choice import choose_view, share_in_dispute, usual_digests
from p2pavg.consensus.votes import Members, Promise
from tests.unit.consensus.answers import promise, some


def digests(text: str) -> tuple[bytes, ...]:
    """Return one digest per letter; equal letters give equal digests."""
    return tuple(letter.encode() * 16 for letter in text)


class TestView:
    """``tests/properties/test_choice.py`` has what one liar, and any answers, can do."""

    @pytest.mark.parametrize(
        ("size", "changed", "view"),
        [
            # Neither the accusations nor the broken links of a removed member count.
            (4, {1: promise(hostile=[2]), 2: promise(hostile=[3])}, some(0, 1, 3)),
            (5, {1: promise(apart=[4]), 2: promise(apart=[4])}, some(0, 1, 2, 3)),
            (5, {0: promise(hostile=[3]), 1: promise(hostile=[4])}, some(0, 1, 2)),
            # Of two members that cannot exchange, the later one.
            (4, {1: promise(apart=[3])}, some(0, 1, 2)),
            (4, {3: promise(apart=[1])}, some(0, 1, 2)),
            # One that cannot exchange with several others, and not those others.
            (4, {1: promise(apart=[2, 3])}, some(0, 2, 3)),
            # Trouble with a member that does not answer removes none.
            (2, {1: promise(apart=[3], hostile=[2])}, some(0, 1)),
        ],
    )
    def test_the_members_that_are_left(self, size: int, changed: dict[int, Promise], view: Members) -> None:
        assert choose_view(0, {position: promise() for position in range(size)} | changed) == view

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
