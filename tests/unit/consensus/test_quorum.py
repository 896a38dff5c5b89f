"""Quorums, and the leaders of ballots."""

from __future__ import annotations

import pytest

from p2pavg.consensus.choice import ballot_leader, is_quorum, next_ballot
from p2pavg.consensus.votes import Members
from tests.unit.consensus.answers import some


@pytest.mark.parametrize(
    ("members", "size", "gone", "is_one"),
    [
        # More than half.
        (some(1, 3, 4), 5, some(), True),
        (some(0, 1), 5, some(), False),
        # The half with the first member that is not gone.
        (some(0, 3), 4, some(), True),
        (some(1, 2), 4, some(), False),
        (some(1), 2, some(), False),
        (some(1, 2), 5, some(0), True),
        (some(3, 4), 5, some(0), False),
        # Gone members count neither in the total nor for a quorum.
        (some(2), 3, some(0), False),
        (some(2), 3, some(0, 1), True),
        (some(0, 3), 4, some(0), False),
        (some(0, 1, 4), 5, some(0, 1), False),
        # Not even if all are gone.
        (some(), 3, some(0, 1, 2), False),
    ],
)
def test_the_quorums(members: Members, size: int, gone: Members, is_one: bool) -> None:
    """The same in every version. ``tests/properties/test_choice.py`` has what any of them must keep."""
    assert is_quorum(members, size, gone) == is_one


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
