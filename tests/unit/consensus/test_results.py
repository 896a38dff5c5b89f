"""The value of a new ballot: a possible commit, a result that is still complete, or a new attempt."""

from __future__ import annotations

import dataclasses

import pytest

from p2pavg.consensus.choice import MemberAnswers, Stuck, choose, possibly_committed
from p2pavg.consensus.votes import Begin, Complete, Members
from tests.unit.consensus.answers import ALL, BALLOT, SIZE, accepted, answers, holds, promise, some

NO_MEMBERS: Members = frozenset()
FIRST = accepted()  # ballot 0, led by member 0
RESULT = Complete(0, ALL)


class TestPossiblyCommitted:
    def test_a_member_outside_the_view_proves_nothing(self) -> None:
        without_three = accepted(view=some(0, 1, 2))
        assert (
            possibly_committed(answers({1: holds(without_three), 2: holds(without_three), 3: promise()}))
            == without_three
        )

    def test_the_newest_possible_commit_counts(self) -> None:
        newer = accepted(ballot=4, view=some(0, 1))
        assert possibly_committed(answers({1: holds(newer), 2: holds(FIRST), 3: holds(FIRST)})) == newer

    def test_an_uncommitted_newer_ballot_does_not_hide_an_older_one(self) -> None:
        newer = accepted(ballot=5)  # its leader is member 1, which answers
        assert possibly_committed(answers({1: holds(FIRST), 2: holds(newer), 3: holds(FIRST)})) == FIRST

    def test_a_leader_that_gave_up_did_not_commit(self) -> None:
        group = answers({1: holds(FIRST), 2: holds(FIRST), 3: holds(FIRST)}, left={0: 0})
        assert possibly_committed(group) is None

    def test_a_member_that_gave_up_before_holding_proves_no_commit(self) -> None:
        group = answers({1: holds(FIRST), 2: holds(FIRST)}, left={3: -1})
        assert possibly_committed(group) is None

    def test_a_member_that_gave_up_while_holding_proves_nothing(self) -> None:
        group = answers({1: holds(FIRST), 2: holds(FIRST)}, left={3: 0})
        assert possibly_committed(group) == FIRST

    def test_a_dead_member_proves_nothing(self) -> None:
        group = answers({1: holds(FIRST), 2: holds(FIRST)}, dead=some(0, 3))
        assert possibly_committed(group) == FIRST


WITH_RESULT = promise(complete=RESULT)
OF_OTHERS = Complete(4, some(0, 2, 3))


@pytest.mark.parametrize(
    ("group", "found"),
    [
        pytest.param(answers({1: promise(), 2: WITH_RESULT}, dead=some(0, 3)), RESULT, id="several died"),
        pytest.param(answers(dict.fromkeys(range(SIZE), WITH_RESULT)), RESULT, id="all answer"),
        # A dead reducer answers no audit, for which the others would wait before they hold its averages.
        pytest.param(
            dataclasses.replace(answers({1: promise(), 2: WITH_RESULT}, dead=some(0, 3)), verify=True),
            None,
            id="one lacks it, with audits",
        ),
        pytest.param(
            dataclasses.replace(answers({1: WITH_RESULT, 2: WITH_RESULT}, dead=some(0, 3)), verify=True),
            RESULT,
            id="all that are left have it, with audits",
        ),
        # It keeps its contribution for the next round, so this round's result must not count it.
        pytest.param(answers({0: WITH_RESULT, 1: promise(), 2: promise()}), None, id="one may be alive"),
        pytest.param(
            answers({0: WITH_RESULT, 1: promise(), 2: promise()}, left={3: -1}), None, id="one gave up"
        ),
        pytest.param(
            answers(
                {0: promise(attempt=4, complete=OF_OTHERS), 1: promise(attempt=4), 2: promise(attempt=4)},
                dead=some(3),
            ),
            None,
            id="one that answers is not in it",
        ),
        pytest.param(
            answers({0: WITH_RESULT, 1: promise(attempt=4), 2: promise()}, dead=some(3)),
            None,
            id="one has begun a newer attempt",
        ),
        pytest.param(
            answers({0: promise(), 1: promise(), 2: WITH_RESULT}, holders=some(0, 1, 3), dead=some(3)),
            None,
            id="only an auxiliary has it",
        ),
        # Member 3 answers, and cannot exchange with another one.
        pytest.param(
            answers(
                {position: promise(complete=RESULT, apart=[3]) for position in range(3)} | {3: WITH_RESULT}
            ),
            None,
            id="one outside of the view is in it",
        ),
        pytest.param(
            answers(
                {position: promise(apart=[3]) for position in range(3)}
                | {3: promise(complete=Complete(0, some(0, 1, 2)))}
            ),
            None,
            id="only one outside of the view has it",
        ),
    ],
)
def test_a_complete_result_is_taken_only_if_it_counts_the_view_and_the_dead(
    group: MemberAnswers, found: Complete | None
) -> None:
    """No member waits for the votes of the dead any more."""
    begun = choose(group)
    assert isinstance(begun, Begin)
    assert (Complete(begun.attempt, begun.members) if begun.attempt != BALLOT else None) == found


class TestChoice:
    def test_a_new_attempt_takes_an_auxiliary_along(self) -> None:
        group = answers({0: promise(), 1: promise(), 3: promise()}, holders=some(0, 1, 2))
        assert choose(group) == Begin(BALLOT, BALLOT, some(0, 1, 3), some(0, 1, 3), 0, NO_MEMBERS)

    def test_a_member_that_cannot_exchange_is_left_out(self) -> None:
        found = choose(answers({0: promise(), 1: promise(apart=[3]), 2: promise(), 3: promise()}))
        assert isinstance(found, Begin)
        assert found.members == found.view == some(0, 1, 2)

    def test_too_few_members_wait_for_the_decision_of_the_others(self) -> None:
        for found in (
            choose(answers({1: promise(), 2: promise()})),
            choose(answers({3: promise(complete=RESULT)}, dead=some(0))),
        ):
            assert isinstance(found, Stuck)
            assert not found.final, "others may be found dead yet"

    def test_the_remaining_members_decide_when_the_others_are_dead(self) -> None:
        found = choose(answers({2: promise(), 3: promise()}, dead=some(0), left={1: -1}))
        assert found == Begin(BALLOT, BALLOT, some(2, 3), some(2, 3), 2, NO_MEMBERS)

    def test_a_member_outside_the_view_does_not_count_for_the_quorum(self) -> None:
        found = choose(answers({1: promise(), 2: promise(apart=[3]), 3: promise()}))
        assert isinstance(found, Stuck)
        assert not found.final

    def test_too_few_contributors_end_the_round(self) -> None:
        group = answers({0: promise(), 1: promise(), 3: promise()}, holders=some(0, 1, 2), minimum=3)
        found = choose(group)
        assert isinstance(found, Stuck)
        assert found.final
        assert found.reason == "2 of the members are left, at least 3 are needed"

    def test_a_possible_commit_is_adopted_although_a_lost_member_may_be_alive(self) -> None:
        """A complete result without a possible commit is not: see the test before."""
        group = answers({1: holds(FIRST), 2: holds(FIRST), 3: holds(FIRST)}, dead=NO_MEMBERS)
        assert choose(group) == Begin(BALLOT, 0, ALL, some(1, 2, 3), 1, NO_MEMBERS, must=True)

    def test_a_possible_commit_is_adopted_below_the_minimum(self) -> None:
        group = answers({1: holds(FIRST), 2: holds(FIRST)}, dead=some(0, 3), minimum=4)
        assert choose(group) == Begin(BALLOT, 0, ALL, some(1, 2), 1, NO_MEMBERS, must=True)

    def test_a_member_outside_the_result_lacks_nothing(self) -> None:
        without_two = accepted(ballot=4, attempt=4, members=some(0, 1, 3), view=some(0, 1, 3))
        group = answers({1: holds(without_two), 2: promise(), 3: holds(without_two)})
        assert choose(group) == Begin(BALLOT, 4, some(0, 1, 3), some(1, 2, 3), 1, NO_MEMBERS, must=True)

    def test_observers_alone_end_the_round(self) -> None:
        """There is nothing to average, because the contributors are lost."""
        group = answers({1: promise(), 2: promise(), 3: promise()}, holders=ALL, contributors=some(0))
        found = choose(group)
        assert isinstance(found, Stuck)
        assert found.final
        assert found.reason == "none of the members that are left has a contribution"

    def test_observers_count_for_the_minimum(self) -> None:
        group = answers(
            {0: promise(), 1: promise(), 3: promise()}, holders=some(0, 1, 2), contributors=some(0), minimum=2
        )
        assert isinstance(choose(group), Begin)
        found = choose(dataclasses.replace(group, minimum=3))
        assert found == Stuck("2 of the members are left, at least 3 are needed", True)

    def test_observers_that_have_the_result_finish_without_its_contributor(self) -> None:
        """The result is complete, although its contributor is dead."""
        group = answers(
            {1: holds(FIRST), 2: promise(attempt=0), 3: promise(attempt=0)},
            contributors=some(0),
            dead=some(0),
        )
        assert choose(group) == Begin(BALLOT, 0, ALL, some(1, 2, 3), 1, some(2, 3))

    def test_an_auxiliary_lacks_nothing(self) -> None:
        smaller = accepted(ballot=4, attempt=0, view=some(0, 3))
        group = answers({1: promise(), 2: promise(), 3: holds(smaller)}, holders=some(0, 2, 3))
        assert choose(group) == Begin(BALLOT, 0, ALL, some(1, 2, 3), 3, some(2), must=True)

    def test_an_auxiliary_passes_nothing_on(self) -> None:
        group = answers(
            {1: holds(FIRST), 2: promise(attempt=0, accepted=FIRST), 3: holds(FIRST)}, holders=some(0, 2, 3)
        )
        assert choose(group) == Begin(BALLOT, 0, ALL, some(1, 2, 3), 3, some(2), must=True)

    def test_a_result_is_adopted_by_members_that_do_not_need_it(self) -> None:
        """All members of the result are gone. The others only witness the decision."""
        of_two = accepted(ballot=4, attempt=4, members=some(0, 1), view=some(0, 1, 2), must=True)
        group = answers({2: promise(attempt=0, accepted=of_two), 3: promise()}, dead=some(0, 1))
        assert choose(group) == Begin(BALLOT, 4, some(0, 1), some(2, 3), 2, NO_MEMBERS, must=True)

    def test_a_result_that_no_answering_member_has_is_not_adopted(self) -> None:
        must = accepted(must=True)
        group = answers({1: promise(accepted=must), 2: promise(), 3: promise()}, holders=some(0, 2, 3))
        found = choose(group)
        assert isinstance(found, Stuck)
        assert not found.final, "a member that has it may tell how the round ended"

    def test_a_member_in_a_newer_attempt_cannot_receive_an_older_result(self) -> None:
        must = accepted(must=True)
        group = answers({1: holds(must), 2: promise(attempt=4), 3: holds(must)})
        found = choose(group)
        assert isinstance(found, Stuck)
        assert not found.final

    def test_a_possible_commit_goes_before_a_complete_result(self) -> None:
        newer = Complete(5, some(1, 2, 3))
        group = answers(
            {
                1: promise(attempt=5, complete=newer, accepted=FIRST),
                2: promise(attempt=5, complete=newer, accepted=FIRST),
                3: promise(attempt=5, complete=newer, accepted=FIRST),
            },
            dead=some(0),
        )
        assert isinstance(choose(group), Stuck), "it was committed, and no member has it any more"

    def test_a_complete_result_goes_before_a_new_attempt(self) -> None:
        group = answers(
            {0: promise(), 1: promise(complete=RESULT), 2: promise(complete=RESULT)}, dead=some(3)
        )
        assert choose(group) == Begin(BALLOT, 0, ALL, some(0, 1, 2), 1, some(0), must=False)

    def test_the_last_member_takes_a_complete_result(self) -> None:
        group = answers({2: promise(complete=RESULT)}, dead=some(0, 1, 3))
        assert choose(group) == Begin(BALLOT, 0, ALL, some(2), 2, NO_MEMBERS)
