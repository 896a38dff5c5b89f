"""Intervals between outer steps: in steps, in seconds, and divided by the number of fragments."""

from __future__ import annotations

import pytest

from p2pavg.optim.local.local_options import Boundaries, Interval, checked_interval


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (50, Interval(steps=50)),
        ("30s", Interval(seconds=30.0)),
        ("2.5 s", Interval(seconds=2.5)),
        ("5min", Interval(seconds=300.0)),
        ("1h", Interval(seconds=3600.0)),
    ],
)
def test_interval_is_a_number_of_steps_or_a_time(value: int | str, expected: Interval) -> None:
    assert checked_interval(value) == expected


@pytest.mark.parametrize(
    "value", [0, -1, True, 1.5, "0s", "30", "s", "-3s", "1d", "1000h", "30s ", None, b"30s"]
)
def test_other_intervals_are_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match="sync_every"):
        checked_interval(value)  # type: ignore[arg-type]


def test_interval_is_divided_among_fragments() -> None:
    assert Interval(steps=12).part(4) == Interval(steps=3)
    assert Interval(seconds=30.0).part(4) == Interval(seconds=7.5)
    with pytest.raises(ValueError, match="sync_every must be a multiple of fragments: 10 steps"):
        Interval(steps=10).part(4)


class TestBoundaries:
    def test_steps_are_counted_from_the_last_boundary(self) -> None:
        boundaries = Boundaries(Interval(steps=2))
        found = []
        for now in range(5):
            boundaries.stepped(float(now))
            found.append(boundaries.is_due(float(now)))
            if found[-1]:
                boundaries.passed(float(now))
        assert found == [False, True, False, True, False]

    def test_time_is_counted_from_the_first_step(self) -> None:
        boundaries = Boundaries(Interval(seconds=30.0))
        assert not boundaries.is_due(1000.0), "nothing is computed yet"
        boundaries.stepped(100.0)
        assert not boundaries.is_due(129.9)
        assert boundaries.is_due(130.0)
        boundaries.passed(131.0)
        assert not boundaries.is_due(1000.0), "nothing is computed since"
        boundaries.stepped(160.0)
        assert not boundaries.is_due(160.9)
        assert boundaries.is_due(161.0)

    def test_peers_of_one_group_go_on_from_the_same_moment(self) -> None:
        fast, slow = Boundaries(Interval(seconds=30.0)), Boundaries(Interval(seconds=30.0))
        fast.passed(30.0)
        slow.passed(37.0)
        for boundaries in (fast, slow):
            boundaries.align(37.5)
            boundaries.stepped(60.0)
            assert not boundaries.is_due(67.4)
            assert boundaries.is_due(67.5)

    def test_after_a_round_without_a_group_the_next_step_is_a_boundary(self) -> None:
        boundaries = Boundaries(Interval(steps=3))
        boundaries.passed(0.0)
        boundaries.again()
        assert not boundaries.is_due(0.0), "nothing is computed since"
        boundaries.stepped(1.0)
        assert boundaries.is_due(1.0)
        boundaries.passed(1.0)
        boundaries.stepped(2.0)
        assert not boundaries.is_due(2.0)
