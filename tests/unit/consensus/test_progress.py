"""With a third of liars, honest members end with success after few attempts."""

from __future__ import annotations

import pytest

from p2pavg.consensus import conditions
from p2pavg.consensus.member import MemberState
from p2pavg.consensus.votes import Members
from tests.unit.consensus.progress import LyingFollower
from tests.unit.consensus.world import FoundError


@pytest.mark.parametrize("liar", [0, 1, 2])
def test_all_honest_members_succeed_whatever_digests_a_member_names(liar: int) -> None:
    """``scripts/faults explore --progress`` looks at groups of four as well."""
    assert LyingFollower(3, liar=liar, accuses=False, most_attempts=3).progress() > 50


@pytest.mark.parametrize("liar", [1, 2])
def test_accusations_cost_one_honest_member_its_place_at_most(liar: int) -> None:
    group = LyingFollower(3, liar=liar, accuses=True, most_attempts=4, most_left_out=1)
    assert group.progress() > 1000


def test_the_search_finds_a_rule_that_blames_the_other_side_of_a_dispute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wrong rule: where one member names a digest that no reducer has signed, the others are at fault."""

    def others(member: MemberState) -> Members:
        named = frozenset(position for position, digests in member.pending.held if digests)
        return named - {member.me} - real(member) if real(member) else frozenset()

    real = conditions.odd_members
    monkeypatch.setattr(conditions, "odd_members", others)
    with pytest.raises(FoundError, match=r"end with success|attempts|wait for ever|circle"):
        LyingFollower(3, liar=2, accuses=False, most_attempts=3).progress()
