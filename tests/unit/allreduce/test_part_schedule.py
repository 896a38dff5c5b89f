"""The order of parts on a lane: contributions first, back-pressure, and the ends."""

from __future__ import annotations

from p2pavg.allreduce.messages import MAX_WAITING_PARTS, Lane, incoming, outgoing
from p2pavg.group.shares import cut_into_parts

MINE = cut_into_parts(0, 70, 1, 10)
THEIRS = cut_into_parts(70, 100, 1, 10)
MADE = [("me", part, part.index) for part in MINE]
CAME = [("other", part) for part in THEIRS]


def test_contributions_are_sent_before_averages_and_wait_for_nothing() -> None:
    steps = outgoing(THEIRS, MADE)
    assert [step.part for step in steps] == [*THEIRS, *MINE]
    assert all(step.after is None for step in steps[: len(THEIRS)])
    assert [step.after for step in steps[len(THEIRS) :]] == [part.index for part in MINE], (
        "each when it is averaged"
    )


def test_contribution_ahead_of_the_others_waits_for_an_average() -> None:
    steps = incoming(MINE, CAME)
    waits = [step.after for step in steps if step.kind is Lane.CONTRIBUTIONS]
    assert waits == [None] * MAX_WAITING_PARTS + list(range(len(MINE) - MAX_WAITING_PARTS))
    assert all(step.after is None for step in steps if step.kind is Lane.AVERAGES)


def test_last_steps_of_each_kind_and_the_end_of_the_lane_are_marked() -> None:
    steps = incoming(MINE, CAME)
    assert [step.part for step in steps if step.last] == [MINE[-1], THEIRS[-1]]
    assert [step for step in steps if step.ends] == steps[-1:]
    alone = incoming(MINE, [])
    assert (alone[-1].last, alone[-1].ends) == (True, True)
    assert outgoing([], []) == []


def test_a_relay_ends_the_share_of_each_reducer_that_it_passes_on() -> None:
    """A signature of the reducer follows each share, not only the last one on the lane."""
    third = cut_into_parts(100, 120, 1, 10)
    averages = [*CAME, *(("third", part) for part in third)]
    for steps in (incoming(MINE, averages), outgoing(MINE, [(*average, None) for average in averages])):
        assert [step.part for step in steps if step.last] == [MINE[-1], THEIRS[-1], third[-1]]
        assert [step for step in steps if step.ends] == steps[-1:]


def test_both_ends_of_a_lane_move_the_same_parts_in_the_same_order() -> None:
    sent, received = outgoing(THEIRS, MADE), incoming(THEIRS, [("me", part) for part in MINE])
    assert [(step.kind, step.part) for step in sent] == [(step.kind, step.part) for step in received]
    assert [step.reducer for step in sent] == [step.reducer for step in received]


def test_mean_of_a_site_waits_for_the_task_that_makes_it() -> None:
    steps = outgoing(THEIRS, MADE, sums_at=5)
    assert [step.after for step in steps[: len(THEIRS)]] == [5, 6, 7]


def test_part_after_skipped_ones_waits_as_if_they_had_come_now() -> None:
    assert incoming(MINE, CAME, skipped=2) == incoming(MINE, CAME)[2:]


def test_a_contributor_to_the_last_tasks_only_waits_for_none_of_the_first() -> None:
    own = MINE[2:]
    waits = [step.after for step in incoming(own, [])]
    assert waits == [None] * MAX_WAITING_PARTS + [part.index for part in own[: len(own) - MAX_WAITING_PARTS]]
