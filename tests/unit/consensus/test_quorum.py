"""Quorums, and the leaders of ballots."""

from __future__ import annotations

import pytest

from p2pavg.consensus.choice import ballot_leader, is_quorum, next_ballot
from p2pavg.consensus.votes import Members
from tests.unit.consensus.answers import some

NO_MEMBERS: Members = frozenset()


def test_more_than_half_are_a_quorum() -> None:
    assert is_quorum(some(1, 3, 4), 5, NO_MEMBERS)
    assert not is_quorum(some(0, 1), 5, NO_MEMBERS)


def test_the_half_with_the_first_member_is_a_quorum() -> None:
    assert is_quorum(some(0, 3), 4, NO_MEMBERS)
    assert not is_quorum(some(1, 2), 4, NO_MEMBERS)


def test_of_two_members_only_the_first_is_a_quorum_alone() -> None:
    assert is_quorum(some(0), 2, NO_MEMBERS)
    assert not is_quorum(some(1), 2, NO_MEMBERS)


def test_gone_members_do_not_count_in_the_total() -> None:
    assert not is_quorum(some(2), 3, NO_MEMBERS)
    assert not is_quorum(some(2), 3, some(0))
    assert is_quorum(some(1, 2), 3, some(0))
    assert is_quorum(some(2), 3, some(0, 1))


def test_the_half_with_the_first_remaining_member_is_a_quorum() -> None:
    assert is_quorum(some(1, 2), 5, some(0))
    assert not is_quorum(some(3, 4), 5, some(0))
    assert is_quorum(some(2), 3, some(0)) == is_quorum(some(1), 2, NO_MEMBERS)


def test_gone_members_do_not_count_for_a_quorum() -> None:
    assert not is_quorum(some(0, 3), 4, some(0))
    assert not is_quorum(some(0, 1, 4), 5, some(0, 1))


def test_the_empty_set_is_no_quorum() -> None:
    assert not is_quorum(NO_MEMBERS, 3, NO_MEMBERS)
    assert not is_quorum(NO_MEMBERS, 3, some(0, 1))
    assert not is_quorum(NO_MEMBERS, 3, some(0, 1, 2))


@pytest.mark.parametrize("size", range(1, 7))
def test_the_next_ballot_is_the_members_first_newer_one(size: int) -> None:
    for me in range(size):
        for above in range(4 * size):
            ballot = next_ballot(me, size, above)
            assert ballot_leader(ballot, size) == me
            assert above < ballot <= above + size


def test_the_first_member_leads_ballot_zero() -> None:
    assert ballot_leader(0, 5) == 0
    assert [next_ballot(me, 5, 0) for me in range(5)] == [5, 1, 2, 3, 4]
