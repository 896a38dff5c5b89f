"""Warnings about waiting calls: their times and texts."""

from __future__ import annotations

import itertools

from p2pavg.base.limits import MAX_BACKOFF_SECONDS
from p2pavg.optim.coordination.ending import MAX_NAMED, Waiting, named


def test_long_wait_is_warned_of_with_growing_pauses() -> None:
    waiting = Waiting()
    said = [now for now in range(4000) if waiting.waits("no peer came", (), float(now)) is not None]
    assert said[:5] == [10, 20, 40, 80, 160]
    pauses = [later - now for now, later in itertools.pairwise(said)]
    assert max(pauses) == MAX_BACKOFF_SECONDS


def test_warning_names_peers_and_reason() -> None:
    waiting = Waiting()
    assert waiting.waits("they compute", ["12D3KooWabcdef", "12D3KooWuvwxyz"], 5.0) is None
    warning = waiting.waits("they compute", ["12D3KooWabcdef", "12D3KooWuvwxyz"], 15.0)
    assert warning == "has waited 10 s for other peers (for …abcdef, …uvwxyz): they compute"
    assert waiting.reason == "they compute"
    assert waiting.peers == ("12D3KooWabcdef", "12D3KooWuvwxyz")


def test_many_peers_are_counted() -> None:
    assert named(["a" * 50] * (MAX_NAMED + 3)).endswith("…aaaaaa and 3 more")
    assert named(["abc"]) == "…abc"


def test_the_waits_of_one_call_add_up() -> None:
    waiting = Waiting()
    waiting.waits("first", (), 0.0)
    waiting.ends(4.0)
    waiting.waits("then", (), 100.0)
    waiting.waits("then", (), 103.0)
    waiting.ends(104.0)
    assert waiting.seconds == 8.0
    waiting.begin()
    assert (waiting.seconds, waiting.reason, waiting.peers) == (0.0, None, ())


def test_long_wait_after_a_quick_update_is_warned_of_at_once() -> None:
    waiting = Waiting()
    for now in (0.0, 10.0):
        said = waiting.waits("a", (), now)
    assert said is not None
    waiting.updated()
    waiting.begin()
    for now in (12.0, 23.0):
        said = waiting.waits("a", (), now)
    assert said is not None, "its pause was over"
    waiting.begin()
    waiting.updated()
    for now in (24.0, 34.0):
        said = waiting.waits("a", (), now)
    assert said is not None
