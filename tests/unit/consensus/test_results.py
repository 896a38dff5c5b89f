"""What a new ballot is about: what may have been committed, what is still good, or a new attempt."""

from __future__ import annotations

import dataclasses

import pytest

from p2pavg.consensus.choice import Answers, Stuck, _complete_without_the_dead, choose, possibly_committed
from p2pavg.consensus.votes import Begin, Complete, Members
from tests.unit.consensus.answers import ALL, BALLOT, SIZE, accepted, answers, holds, promise, some

NOBODY: Members = frozenset()
FIRST = accepted()  # ballot 0, which member 0 leads
RESULT = Complete(0, ALL)


class TestPossiblyCommitted:
    def test_what_nobody_accepted_was_not(self) -> None:
        assert possibly_committed(answers({1: promise(), 2: promise(complete=RESULT), 3: promise()})) is None

    def test_what_everybody_holds_whose_leader_does_not_answer_may_have_been(self) -> None:
        assert possibly_committed(answers({1: holds(FIRST), 2: holds(FIRST), 3: holds(FIRST)})) == FIRST

    def test_it_may_have_been_also_when_others_do_not_answer(self) -> None:
        assert possibly_committed(answers({2: holds(FIRST), 3: holds(FIRST)})) == FIRST

    def test_a_leader_that_answers_did_not_commit_it(self) -> None:
        assert possibly_committed(answers({0: promise(), 1: holds(FIRST), 2: holds(FIRST)})) is None

    def test_the_leader_itself_did_not_commit_what_it_holds(self) -> None:
        assert possibly_committed(answers({position: holds(FIRST) for position in range(SIZE)})) is None

    def test_one_of_the_view_that_holds_nothing_proves_that_it_was_not(self) -> None:
        assert possibly_committed(answers({1: holds(FIRST), 2: holds(FIRST), 3: promise()})) is None

    def test_one_of_the_view_that_has_not_come_so_far_proves_that_only_the_older_may_have_been(self) -> None:
        newer = accepted(ballot=4)
        assert possibly_committed(answers({1: holds(newer), 2: holds(newer), 3: holds(FIRST)})) == FIRST
        group = answers({1: holds(newer), 2: holds(newer), 3: promise(complete=RESULT)})
        assert possibly_committed(group) is None

    def test_one_outside_the_view_proves_nothing(self) -> None:
        without_three = accepted(view=some(0, 1, 2))
        assert (
            possibly_committed(answers({1: holds(without_three), 2: holds(without_three), 3: promise()}))
            == without_three
        )

    def test_of_several_the_newest(self) -> None:
        newer = accepted(ballot=4, view=some(0, 1))
        assert possibly_committed(answers({1: holds(newer), 2: holds(FIRST), 3: holds(FIRST)})) == newer

    def test_a_newer_one_that_was_not_does_not_hide_an_older_one(self) -> None:
        newer = accepted(ballot=5)  # its leader is member 1, who answers
        assert possibly_committed(answers({1: holds(FIRST), 2: holds(newer), 3: holds(FIRST)})) == FIRST

    def test_what_an_older_ballot_may_have_committed_still_may_have_been(self) -> None:
        """Whoever adopts it passes that on, whether or not its own ballot can still commit."""
        adopted = accepted(ballot=6, attempt=0, view=some(1, 2), must=True)  # led by 2, who answers
        found = possibly_committed(answers({1: holds(adopted), 2: promise(), 3: promise()}))
        assert found == adopted

    def test_a_leader_that_gave_up_did_not_commit(self) -> None:
        group = answers({1: holds(FIRST), 2: holds(FIRST), 3: holds(FIRST)}, left={0: 0})
        assert possibly_committed(group) is None

    def test_one_that_gave_up_before_it_held_anything_proves_that_it_was_not(self) -> None:
        group = answers({1: holds(FIRST), 2: holds(FIRST)}, left={3: -1})
        assert possibly_committed(group) is None

    def test_one_that_gave_up_when_it_held_it_proves_nothing(self) -> None:
        group = answers({1: holds(FIRST), 2: holds(FIRST)}, left={3: 0})
        assert possibly_committed(group) == FIRST

    def test_one_that_is_dead_proves_nothing(self) -> None:
        group = answers({1: holds(FIRST), 2: holds(FIRST)}, dead=some(0, 3))
        assert possibly_committed(group) == FIRST


class TestStillGood:
    """A result that counts the dead, although nobody waits for their votes any more."""

    def complete(self, group: Answers) -> Complete | None:
        return _complete_without_the_dead(group, frozenset(group.promises))

    def test_when_one_died_after_it_had_delivered(self) -> None:
        group = answers({0: promise(complete=RESULT), 1: promise(), 2: promise()}, dead=some(3))
        assert self.complete(group) == RESULT

    def test_when_several_died(self) -> None:
        group = answers({1: promise(), 2: promise(complete=RESULT)}, dead=some(0, 3))
        assert self.complete(group) == RESULT

    def test_when_all_are_there(self) -> None:
        group = answers({position: promise(complete=RESULT) for position in range(SIZE)})
        assert self.complete(group) == RESULT

    def test_not_when_nobody_has_it(self) -> None:
        assert self.complete(answers({0: promise(), 1: promise(), 2: promise()}, dead=some(3))) is None

    def test_not_when_one_was_lost_that_may_live(self) -> None:
        """It keeps its contribution for the next round, which must not be in this one's result too."""
        group = answers({0: promise(complete=RESULT), 1: promise(), 2: promise()})
        assert self.complete(group) is None

    def test_not_when_one_gave_up(self) -> None:
        group = answers({0: promise(complete=RESULT), 1: promise(), 2: promise()}, left={3: -1})
        assert self.complete(group) is None

    def test_not_when_one_that_answers_is_not_counted_on_and_lives(self) -> None:
        group = answers({position: promise(complete=RESULT) for position in range(SIZE)})
        assert _complete_without_the_dead(group, some(0, 1, 2)) is None

    def test_not_when_only_such_a_one_has_it(self) -> None:
        without_three = Complete(0, some(0, 1, 2))
        group = answers({0: promise(), 1: promise(), 2: promise(), 3: promise(complete=without_three)})
        assert _complete_without_the_dead(group, some(0, 1, 2)) is None

    def test_not_when_one_that_answers_is_not_in_it(self) -> None:
        without_one = Complete(4, some(0, 2, 3))
        group = answers(
            {0: promise(attempt=4, complete=without_one), 1: promise(attempt=4), 2: promise(attempt=4)},
            dead=some(3),
        )
        assert self.complete(group) is None

    def test_not_when_one_has_begun_a_newer_attempt_and_has_nothing_of_this_any_more(self) -> None:
        group = answers({0: promise(complete=RESULT), 1: promise(attempt=4), 2: promise()}, dead=some(3))
        assert self.complete(group) is None

    def test_not_when_only_an_auxiliary_has_what_it_needs_of_it(self) -> None:
        group = answers(
            {0: promise(), 1: promise(), 2: promise(complete=RESULT)},
            holders=some(0, 1, 3),
            dead=some(3),
        )
        assert self.complete(group) is None


class TestChoice:
    def test_a_new_attempt_with_those_that_answer(self) -> None:
        assert choose(answers({0: promise(), 1: promise(), 3: promise()})) == Begin(
            BALLOT, BALLOT, some(0, 1, 3), some(0, 1, 3), 0, NOBODY
        )

    def test_a_new_attempt_takes_an_auxiliary_along(self) -> None:
        group = answers({0: promise(), 1: promise(), 3: promise()}, holders=some(0, 1, 2))
        assert choose(group) == Begin(BALLOT, BALLOT, some(0, 1, 3), some(0, 1, 3), 0, NOBODY)

    def test_not_with_who_cannot_exchange_with_the_others(self) -> None:
        found = choose(answers({0: promise(), 1: promise(apart=[3]), 2: promise(), 3: promise()}))
        assert isinstance(found, Begin)
        assert found.members == found.view == some(0, 1, 2)

    def test_too_few_wait_for_what_the_others_decide(self) -> None:
        for found in (
            choose(answers({1: promise(), 2: promise()})),
            choose(answers({3: promise(complete=RESULT)}, dead=some(0))),
        ):
            assert isinstance(found, Stuck)
            assert not found.final, "others may be found dead yet"

    def test_those_that_remain_when_the_others_are_dead_decide(self) -> None:
        found = choose(answers({2: promise(), 3: promise()}, dead=some(0), left={1: -1}))
        assert found == Begin(BALLOT, BALLOT, some(2, 3), some(2, 3), 2, NOBODY)

    def test_who_answers_but_is_not_counted_on_makes_no_majority(self) -> None:
        found = choose(answers({1: promise(), 2: promise(apart=[3]), 3: promise()}))
        assert isinstance(found, Stuck)
        assert not found.final

    @pytest.mark.parametrize("minimum", [3, 4])
    def test_too_few_contributors_end_the_round(self, minimum: int) -> None:
        group = answers({0: promise(), 1: promise(), 3: promise()}, holders=some(0, 1, 2), minimum=minimum)
        found = choose(group)
        assert isinstance(found, Stuck)
        assert found.final
        assert found.reason == f"2 of the members are left, at least {minimum} are needed"

    def test_what_may_have_been_committed_is_adopted(self) -> None:
        found = choose(answers({1: holds(FIRST), 2: holds(FIRST), 3: holds(FIRST)}))
        assert found == Begin(BALLOT, 0, ALL, some(1, 2, 3), 1, NOBODY, must=True)

    def test_it_is_adopted_although_who_is_in_it_may_live(self) -> None:
        """Not so what is merely good: see TestStillGood."""
        group = answers({1: holds(FIRST), 2: holds(FIRST), 3: holds(FIRST)}, dead=NOBODY)
        assert choose(group) == Begin(BALLOT, 0, ALL, some(1, 2, 3), 1, NOBODY, must=True)

    def test_it_is_adopted_although_a_new_attempt_would_have_too_few(self) -> None:
        group = answers({1: holds(FIRST), 2: holds(FIRST)}, dead=some(0, 3), minimum=4)
        assert choose(group) == Begin(BALLOT, 0, ALL, some(1, 2), 1, NOBODY, must=True)

    def test_the_first_that_has_it_passes_it_on_to_those_that_lack_it(self) -> None:
        smaller = accepted(ballot=4, attempt=0, view=some(0, 3))
        group = answers({1: promise(), 2: promise(), 3: holds(smaller)})
        assert choose(group) == Begin(BALLOT, 0, ALL, some(1, 2, 3), 3, some(1, 2), must=True)

    def test_who_is_not_in_it_lacks_nothing(self) -> None:
        without_two = accepted(ballot=4, attempt=4, members=some(0, 1, 3), view=some(0, 1, 3))
        group = answers({1: holds(without_two), 2: promise(), 3: holds(without_two)})
        assert choose(group) == Begin(BALLOT, 4, some(0, 1, 3), some(1, 2, 3), 1, NOBODY, must=True)

    def test_observers_alone_end_the_round(self) -> None:
        """There is nothing to average: who could have contributed is lost."""
        group = answers({1: promise(), 2: promise(), 3: promise()}, holders=ALL, contributors=some(0))
        found = choose(group)
        assert isinstance(found, Stuck)
        assert found.final
        assert found.reason == "none of the members that are left has a contribution"

    def test_one_contributor_and_a_listener_go_on(self) -> None:
        group = answers({0: promise(), 1: promise(), 2: promise()}, holders=ALL, contributors=some(1, 3))
        assert choose(group) == Begin(BALLOT, BALLOT, some(0, 1, 2), some(0, 1, 2), 0, NOBODY)

    def test_observers_count_for_the_minimum(self) -> None:
        group = answers(
            {0: promise(), 1: promise(), 3: promise()}, holders=some(0, 1, 2), contributors=some(0), minimum=2
        )
        assert isinstance(choose(group), Begin)
        found = choose(dataclasses.replace(group, minimum=3))
        assert found == Stuck("2 of the members are left, at least 3 are needed", True)

    def test_observers_that_have_the_result_finish_without_its_contributor(self) -> None:
        """It was complete, and is as good without the one that is dead."""
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
            {1: holds(FIRST), 2: promise(attempt=0, accepted=FIRST), 3: holds(FIRST)},
            holders=some(0, 2, 3),
        )
        assert choose(group) == Begin(BALLOT, 0, ALL, some(1, 2, 3), 3, some(2), must=True)

    def test_it_is_adopted_by_those_that_need_nothing_of_it(self) -> None:
        """Everybody in it is gone: the others are witnesses of what was decided."""
        of_two = accepted(ballot=4, attempt=4, members=some(0, 1), view=some(0, 1, 2), must=True)
        group = answers({2: promise(attempt=0, accepted=of_two), 3: promise()}, dead=some(0, 1))
        assert choose(group) == Begin(BALLOT, 4, some(0, 1), some(2, 3), 2, NOBODY, must=True)

    def test_what_nobody_has_who_answers_cannot_be_adopted(self) -> None:
        must = accepted(must=True)
        group = answers({1: promise(accepted=must), 2: promise(), 3: promise()}, holders=some(0, 2, 3))
        found = choose(group)
        assert isinstance(found, Stuck)
        assert not found.final, "somebody who has it may tell how the round ended"

    def test_who_has_begun_a_newer_attempt_cannot_be_given_what_it_lacks(self) -> None:
        must = accepted(must=True)
        group = answers({1: holds(must), 2: promise(attempt=4), 3: holds(must)})
        found = choose(group)
        assert isinstance(found, Stuck)
        assert not found.final

    def test_what_may_have_been_committed_goes_before_what_is_good(self) -> None:
        newer = Complete(5, some(1, 2, 3))
        group = answers(
            {
                1: promise(attempt=5, complete=newer, accepted=FIRST),
                2: promise(attempt=5, complete=newer, accepted=FIRST),
                3: promise(attempt=5, complete=newer, accepted=FIRST),
            },
            dead=some(0),
        )
        assert isinstance(choose(group), Stuck), "it was committed, and nobody has it any more"

    def test_what_is_good_goes_before_a_new_attempt(self) -> None:
        group = answers(
            {0: promise(), 1: promise(complete=RESULT), 2: promise(complete=RESULT)}, dead=some(3)
        )
        assert choose(group) == Begin(BALLOT, 0, ALL, some(0, 1, 2), 1, some(0), must=False)

    def test_what_is_good_is_enough_for_a_last_one(self) -> None:
        group = answers({2: promise(complete=RESULT)}, dead=some(0, 1, 3))
        assert choose(group) == Begin(BALLOT, 0, ALL, some(2), 2, NOBODY)

    def test_without_a_result_a_last_one_has_nobody_to_average_with(self) -> None:
        found = choose(answers({2: promise()}, dead=some(0, 1, 3)))
        assert isinstance(found, Stuck)
        assert found.final
