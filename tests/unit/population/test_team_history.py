"""The history of teams: one line each, copies from what they sign afterwards, and limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pavg.population import team_history
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.team_history import TeamHistory
from tests.unit.population.samples import SETTINGS
from tests.unit.population.test_team_rules import HALF, team


def filled() -> TeamHistory:
    """Team 1 has ended two generations, and copied team 2 after the first one."""
    history = TeamHistory(HALF)
    donor = team(2, [1.0, 1.0], generation=1, lineage=b"d" * 32)
    after = team(1, [1.1, 1.2], generation=2, parent=b"d" * 32, lineage=b"e" * 32)
    for words in (team(1, [9.0, 8.0], generation=1), donor, after, team(3, [0.0], named=2, generation=1)):
        for peer, word in words.items():
            history.note(peer, word)
    return history


def test_each_team_is_one_line() -> None:
    found = filled().generations
    assert [(each.member, each.generation, each.score, each.copied_from) for each in found] == [
        ("member 1", 1, 9.0, "member 2"),
        ("member 1", 2, 1.2, None),
        ("member 2", 1, 1.0, None),
    ]
    best = filled().best
    assert best is not None
    assert best.member == "member 2"


def test_the_picture_has_a_line_for_each_team_and_an_arrow_for_each_copy() -> None:
    picture = filled().svg("lr")
    assert picture == filled().svg("lr")
    assert "member 1" in picture
    assert "member 3" not in picture
    assert filled().svg("score") != picture
    with pytest.raises(ValueError, match="name must be"):
        filled().svg("rate")


def test_words_of_other_settings_are_left_out() -> None:
    history = TeamHistory(PopulationSettings(space=SETTINGS.space, interval=99))
    for peer, word in team(1, [1.0, 1.0]).items():
        history.note(peer, word)
    assert history.words() == []


def test_a_later_word_with_a_ballot_replaces_the_first_one() -> None:
    history = TeamHistory(HALF)
    words = team(1, [1.0, 1.0])
    made = replace(words["peer 1 0"], peers=words["peer 1 0"].peers)
    history.note("peer 1 0", made)
    history.note("peer 1 0", replace(made, standing=replace(made.standing, score=5.0)))
    assert [word.standing.score for _, word in history.words()] == [1.0]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_history, "MAX_TEAMS", 3)
    monkeypatch.setattr(team_history, "MAX_GENERATIONS", 4)
    monkeypatch.setattr(team_history, "MAX_WORDS", 10)
    history = TeamHistory(HALF)
    for generation in range(1, 17):
        # Two teams have more words than are remembered, and five are more teams.
        for number in range(2 if generation < 9 else 5):
            for peer, word in team(number, [1.0, 1.0], generation=generation).items():
                history.note(peer, word)
        assert len(history.words()) <= 10
        assert len({word.standing.member for _, word in history.words()}) <= 3
