"""Who may decide, and whose turn it is."""

from __future__ import annotations

import pytest

from p2pavg.consensus.choice import ballot_leader, is_quorum, next_ballot
from p2pavg.consensus.votes import Members

NOBODY: Members = frozenset()


def some(*members: int) -> Members:
    return frozenset(members)


def test_more_than_half_decide() -> None:
    assert is_quorum(some(1, 3, 4), 5, NOBODY)
    assert not is_quorum(some(0, 1), 5, NOBODY)


def test_of_two_halves_the_one_with_the_first_decides() -> None:
    assert is_quorum(some(0, 3), 4, NOBODY)
    assert not is_quorum(some(1, 2), 4, NOBODY)


def test_of_two_members_the_first_goes_on_alone_and_the_other_does_not() -> None:
    assert is_quorum(some(0), 2, NOBODY)
    assert not is_quorum(some(1), 2, NOBODY)


def test_who_is_gone_is_not_waited_for() -> None:
    assert not is_quorum(some(2), 3, NOBODY)
    assert not is_quorum(some(2), 3, some(0))
    assert is_quorum(some(1, 2), 3, some(0))
    assert is_quorum(some(2), 3, some(0, 1))


def test_of_two_halves_of_those_that_are_left_the_one_with_the_first_of_them_decides() -> None:
    assert is_quorum(some(1, 2), 5, some(0))
    assert not is_quorum(some(3, 4), 5, some(0))
    assert is_quorum(some(2), 3, some(0)) == is_quorum(some(1), 2, NOBODY)


def test_who_is_gone_does_not_count_for_those_that_name_it() -> None:
    assert not is_quorum(some(0, 3), 4, some(0))
    assert not is_quorum(some(0, 1, 4), 5, some(0, 1))


def test_nobody_decides_nothing() -> None:
    assert not is_quorum(NOBODY, 3, NOBODY)
    assert not is_quorum(NOBODY, 3, some(0, 1))
    assert not is_quorum(NOBODY, 3, some(0, 1, 2))


@pytest.mark.parametrize("size", range(1, 7))
def test_the_next_ballot_is_ones_own_and_the_first_that_is_newer(size: int) -> None:
    for me in range(size):
        for above in range(4 * size):
            ballot = next_ballot(me, size, above)
            assert ballot_leader(ballot, size) == me
            assert above < ballot <= above + size


def test_the_first_ballot_is_the_first_members() -> None:
    assert ballot_leader(0, 5) == 0
    assert [next_ballot(me, 5, 0) for me in range(5)] == [5, 1, 2, 3, 4]
