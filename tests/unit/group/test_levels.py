"""Levels: places are large enough for groups and small enough for keepers, and all peers meet in the end."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.group.places.levels import (
    ANYWAY_SECONDS,
    FACTOR,
    LEAST,
    MAX_LEVEL,
    SLOT_SECONDS,
    Ladder,
    adapted,
    level_for,
    level_key,
    place_key,
    place_of,
    slot_at,
)

KEY = b"k" * 32
PEERS = [f"peer {number}" for number in range(1000)]


def test_small_runs_stay_in_the_common_place() -> None:
    assert {level_for(peers) for peers in range(FACTOR * LEAST)} == {0}
    assert {level_for(peers, 64) for peers in range(256)} == {0}


@given(st.integers(0, 10**7), st.integers(0, 64))
def test_places_have_enough_peers_for_a_group_and_no_more_than_a_key_holds(peers: int, wanted: int) -> None:
    level = level_for(peers, wanted)
    assert 0 <= level <= MAX_LEVEL
    if level:
        assert peers / FACTOR**level >= max(LEAST, wanted)
    if level < MAX_LEVEL:
        assert peers / FACTOR**level < FACTOR * max(LEAST, wanted) <= 256


def test_peers_spread_evenly_over_the_places_of_a_level() -> None:
    found = Counter(place_of(peer, 7, 2) for peer in PEERS)
    assert set(found) == set(range(FACTOR**2))
    assert max(found.values()) < 2 * len(PEERS) / FACTOR**2


def test_places_of_a_level_lie_in_those_of_the_level_below() -> None:
    for peer in PEERS[:50]:
        for level in range(MAX_LEVEL):
            assert place_of(peer, 3, level + 1) // FACTOR == place_of(peer, 3, level)


def test_neighbours_change_with_the_time() -> None:
    assert slot_at(SLOT_SECONDS - 0.1) == 0
    assert slot_at(SLOT_SECONDS) == 1
    assert any(place_of(peer, 0, 2) != place_of(peer, 1, 2) for peer in PEERS[:20])


def test_keys_of_places_are_frozen_and_differ() -> None:
    assert level_key(KEY, "peer", 5, 0) == KEY
    assert place_key(KEY, 5, 2, 9).hex() == "be0292bfd1c03cdeda18b86a4e9f5d1eead0d1fffcbd51488b14dbebd52be24f"
    keys = [place_key(KEY, slot, level, cell) for slot in (0, 1) for level in (1, 2) for cell in range(4)]
    assert len({*keys, place_key(b"o" * 32, 0, 1, 0)}) == len(keys) + 1


def tried(ladder: Ladder, *, full: bool = False) -> list[int]:
    """Return all levels of a ladder in the order in which they are tried."""
    levels = [ladder.start]
    while math.isfinite(ladder.patience(enough=True, follows=False, full=full)):
        levels.append(ladder.take(full=full))
    return levels


@pytest.mark.parametrize(
    ("start", "deepest", "full", "order"),
    [
        (0, 0, False, [0]),
        (2, 2, False, [2, 1, 0]),
        (2, 4, False, [2, 1, 0, 3, 4]),
        (0, 2, False, [0, 1, 2]),
        (1, 3, True, [1, 2, 3, 0]),
        (1, 1, True, [1, 0]),
    ],
)
def test_order_of_levels(start: int, deepest: int, full: bool, order: list[int]) -> None:
    assert tried(Ladder(start, deepest), full=full) == order


@given(st.integers(0, MAX_LEVEL), st.integers(0, MAX_LEVEL), st.booleans(), st.booleans(), st.booleans())
def test_every_peer_reaches_the_common_place_within_seconds_whatever_it_sees(
    start: int, deepest: int, enough: bool, follows: bool, full: bool
) -> None:
    ladder = Ladder(start, max(start, deepest))
    reached, waited = [start], 0.0
    while 0 not in reached:
        waited += ladder.patience(enough=enough, follows=follows, full=full)
        reached.append(ladder.take(full=full))
    assert waited <= MAX_LEVEL * 2 * ANYWAY_SECONDS


def test_patience() -> None:
    ladder = Ladder(1, 1)
    assert ladder.patience(enough=False, follows=False, full=False) == GLANCE_SECONDS
    assert ladder.patience(enough=True, follows=False, full=False) == ANYWAY_SECONDS
    assert ladder.patience(enough=False, follows=True, full=False) == 2 * ANYWAY_SECONDS
    assert ladder.patience(enough=True, follows=True, full=True) == 0.0
    ladder.take(full=False)
    assert ladder.patience(enough=False, follows=False, full=True) == math.inf


@pytest.mark.parametrize(
    ("level", "seen", "wanted", "after"),
    [
        (2, 6, 8, 1),  # too few for a group of eight
        (2, 7, 8, 2),
        (2, 78, 8, 2),
        (2, 79, 8, 3),  # with this peer as many as four places need
        (0, 0, 8, 0),
        (0, 79, 8, 1),
        (MAX_LEVEL, 500, 8, MAX_LEVEL),
    ],
)
def test_the_next_search_begins_where_there_are_enough(
    level: int, seen: int, wanted: int, after: int
) -> None:
    assert adapted(level, seen, wanted) == after


@given(st.integers(0, MAX_LEVEL), st.integers(1, 10**5), st.integers(2, 64))
def test_searches_settle_on_a_level_with_enough_peers(level: int, ready: int, wanted: int) -> None:
    for _ in range(2 * MAX_LEVEL):
        level = adapted(level, ready // FACTOR**level - 1, wanted)
    assert level == adapted(level, ready // FACTOR**level - 1, wanted)
    assert level == 0 or ready // FACTOR**level >= wanted
