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


def test_time_is_counted_from_the_first_step() -> None:
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
