"""The history of a population."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2pavg.population import Decision, History, Word
from p2pavg.population import history as history_module
from p2pavg.population.history import MAX_GENERATIONS, MAX_PEERS
from tests.unit.population.samples import SETTINGS, standing


def history() -> History:
    found = History(SETTINGS)
    good = [standing(0, 0.5 - 0.1 * number, generation=number) for number in (1, 2, 3)]
    bad = [standing(1, 0.9, generation=number) for number in (1, 2, 3)]
    for one, other in zip(good, bad, strict=True):
        found.note("peer 0", Word(standing=one))
        found.note("peer 1", Word(standing=other))
    copied = Decision(donor=good[1].digest, hyperparameters=good[1].hyperparameters, basis=(good[1].digest,))
    found.note("peer 1", Word(standing=bad[1], decision=copied))
    return found


def test_generations_are_in_order_with_the_copies() -> None:
    found = history().generations
    expected = [(peer, number) for peer in ("peer 0", "peer 1") for number in (1, 2, 3)]
    assert [(each.peer_id, each.generation) for each in found] == expected
    assert [each.copied_from for each in found] == [None, None, None, None, "peer 0", None]


def test_the_best_generation_is_that_of_the_best_score() -> None:
    best = history().best
    assert best is not None
    assert (best.member, best.generation) == ("member 0", 3)
    assert History(SETTINGS).best is None


def test_a_word_without_its_decision_does_not_replace_one_with_it() -> None:
    found = history()
    found.note("peer 1", Word(standing=standing(1, 0.9, generation=2)))
    assert found.generations[4].copied_from == "peer 0"


def test_words_of_other_settings_are_left_out() -> None:
    found = History(SETTINGS)
    found.note("peer", Word(standing=standing(0, 0.5, settings=replace(SETTINGS, seed=5))))
    assert found.generations == ()


def test_memory_is_bounded() -> None:
    found = History(SETTINGS)
    for number in range(MAX_GENERATIONS + 10):
        found.note("peer", Word(standing=standing(0, 0.5, generation=number + 1)))
    assert len(found.generations) == MAX_GENERATIONS
    assert found.generations[0].generation == 11
    for number in range(MAX_PEERS + 5):
        found.note(f"stranger {number}", Word(standing=standing(1, 0.5)))
    assert len({each.peer_id for each in found.generations}) == MAX_PEERS


def test_the_words_of_many_publishers_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_WORDS", 50)
    found = History(SETTINGS)
    for number in range(40):
        found.note("talks much", Word(standing=standing(0, 0.5, generation=number + 1)))
        found.note(f"stranger {number}", Word(standing=standing(1, 0.5)))
    assert len(found.generations) == 50
    assert len({each.peer_id for each in found.generations}) == 41
