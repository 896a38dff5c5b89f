"""The work that a volunteer's machine has given: as certificates show it, counted once."""

from __future__ import annotations

import pytest

from p2pavg.base.errors import ConfigError
from p2pavg.tools.jobs.given import GivenWork, read_given


def test_own_samples_are_counted_once_and_in_own_updates_only() -> None:
    given = GivenWork()
    assert given.sentence == ""
    for group, weights in (
        ("a", {"me": 30.0, "you": 70.0}),
        ("a", {"me": 30.0, "you": 70.0}),
        ("b", {"you": 9.0}),
    ):
        given.took("me", group, weights)
    given.took("me", "c", {"me": 20.0})
    given.measured(3, "loss", 4.0)
    given.measured(5, "loss", 2.5)
    given.seconds = 3700.0
    assert given.sentence == (
        "update 5, loss 2.5 (at first 4); this machine gave 50 samples in 2 updates, 42% of theirs, in 1 h 1 min"
    )


def test_a_file_brings_it_back_and_an_update_still_counts_once() -> None:
    given = GivenWork()
    given.took("me", "a", {"me": 30.0, "you": 70.0})
    given.measured(1, "loss\n\x1b[2J", 3.25)
    assert "loss??[2J 3.25" in given.sentence
    again = read_given(given.text)
    assert again.sentence == given.sentence
    again.took("me", "a", {"me": 30.0, "you": 70.0})
    assert again.updates == 1


@pytest.mark.parametrize(
    "text", ["", "[]", '{"samples": "x"}', '{"samples": 1e400}', '{"epoch": -1}', '{"more": 1}', "null"]
)
def test_a_damaged_file_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        read_given(text)


def test_a_file_that_was_edited_divides_by_nothing() -> None:
    assert read_given('{"updates": 3}').sentence == ""
