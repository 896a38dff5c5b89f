"""The generations of a team, in states and over updates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import StateError
from p2pavg.population.team_life import TeamLife, pack_life, read_life
from p2pavg.state.values import pack_values, unpack_values
from tests.unit.population.samples import SETTINGS, standing

FIRST = SETTINGS.first("red")
LIFE = TeamLife(team="red", hyperparameters=FIRST)


def after(life: TeamLife, updates: int) -> TeamLife:
    for _ in range(updates):
        life = life.trained()
    return life


def test_the_update_that_brings_the_decision_belongs_to_the_next_generation() -> None:
    life = after(LIFE, SETTINGS.interval)
    assert life.is_over(SETTINGS.interval)
    assert not after(LIFE, SETTINGS.interval - 1).is_over(SETTINGS.interval)
    kept = life.trained().kept(SETTINGS.interval, 2.5)
    assert (kept.generation, kept.steps, kept.since) == (1, SETTINGS.interval, 1)
    assert [(each.generation, each.score) for each in kept.ancestors] == [(1, 2.5)]
    said = life.standing(SETTINGS, score=1.0, root=bytes(32), size=10)
    assert kept.lineage == said.lineage
    assert said.parent == LIFE.lineage


def test_a_generation_without_an_agreed_score_is_no_ancestor() -> None:
    kept = after(LIFE, SETTINGS.interval + 1).kept(SETTINGS.interval, None)
    assert kept.ancestors == ()
    assert kept.generation == 1


def test_a_copy_brings_the_steps_and_the_lineage_of_its_donor() -> None:
    donor = standing(2, 0.5, steps=70, generation=7)
    new = SETTINGS.first("blue")
    found = after(LIFE, SETTINGS.interval + 1).copied(donor, (), new)
    assert (found.generation, found.steps, found.since) == (1, 70, 0)
    assert found.lineage == donor.lineage
    assert found.hyperparameters == new
    assert [(each.member, each.generation, each.score) for each in found.ancestors] == [("member 2", 7, 0.5)]


@given(st.integers(0, 40))
def test_a_life_goes_through_a_state(updates: int) -> None:
    life = LIFE
    for _ in range(updates):
        was_over = life.is_over(SETTINGS.interval)
        life = life.trained()
        life = life.kept(SETTINGS.interval, 1.0) if was_over else life
    through = unpack_values(pack_values({"life": pack_life(life)}))["life"]
    assert read_life(through, "red", SETTINGS) == life


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"team": "blue"}, "another team"),
        ({"hyperparameters": {"lr": 0.1}}, "hyperparameters"),
        ({"hyperparameters": {**FIRST, "lr": 1e9}}, "ranges"),
        ({"hyperparameters": {1: 2}}, "malformed"),
        ({"generation": -1}, "numbers out of range"),
        ({"since": 11}, "numbers out of range"),
        ({"steps": True}, "numbers out of range"),
        ({"lineage": b"short"}, "lineage"),
        ({"ancestors": [1]}, "generation"),
        ({"more": 1}, "malformed"),
    ],
)
def test_a_life_that_is_not_this_teams_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(StateError, match=why):
        read_life({**pack_life(LIFE), **changes}, "red", SETTINGS)


@pytest.mark.parametrize("value", [None, 3, [], {}])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(StateError, match="malformed"):
        read_life(value, "red", SETTINGS)
