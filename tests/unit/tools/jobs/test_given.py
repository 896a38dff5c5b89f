"""What a volunteer's machine has given: what certificates show, counted once."""

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


def test_a_file_brings_it_back() -> None:
    given = GivenWork()
    given.took("me", "a", {"me": 30.0, "you": 70.0})
    given.measured(1, "loss", 3.25)
    assert read_given(given.text).sentence == given.sentence


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"samples": "x"}', "null"])
def test_a_damaged_file_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        read_given(text)
