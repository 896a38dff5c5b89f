"""The history of a population, and its picture."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from p2pavg.population import Decision, History, Word
from p2pavg.population import history as history_module
from p2pavg.population.history import MAX_GENERATIONS, MAX_PEERS
from tests.unit.population.samples import SETTINGS, standing

MARK = "{http://www.w3.org/2000/svg}"


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
    assert [(each.peer_id, each.generation) for each in found] == [
        ("peer 0", 1),
        ("peer 0", 2),
        ("peer 0", 3),
        ("peer 1", 1),
        ("peer 1", 2),
        ("peer 1", 3),
    ]
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


def test_the_picture_has_a_line_for_each_member_and_an_arrow_for_each_copy() -> None:
    text = history().svg("lr")
    tree = ElementTree.fromstring(text)
    assert len(tree.findall(f"{MARK}polyline")) == 2
    assert sum("marker-end" in line.attrib for line in tree.findall(f"{MARK}line")) == 1
    assert text == history().svg("lr")
    widths = [line.attrib["stroke-width"] for line in tree.findall(f"{MARK}polyline")]
    assert widths == ["3.0", "1.4"], "the best member's line is thick"


def test_scores_and_an_empty_history_have_a_picture() -> None:
    for text in (history().svg("score"), History(SETTINGS).svg("momentum")):
        ElementTree.fromstring(text)


def test_a_name_in_a_picture_is_text_only() -> None:
    found = History(SETTINGS)
    found.note("peer", Word(standing=standing(0, 0.5, member='<script x="1">')))
    assert "<script" not in found.svg("lr")


@pytest.mark.parametrize(
    ("name", "message"), [("other", "must be score or one of"), ("kind", "has texts as values")]
)
def test_what_cannot_be_drawn_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        history().svg(name)
