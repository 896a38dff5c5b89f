"""Which peers are excluded, with which reasons, and what is given up when there are too many."""

from __future__ import annotations

import pytest

from p2pavg.verification.evidence import inquiries as exclusions
from p2pavg.verification.evidence.inquiries import Exclusions
from tests.unit.group.samples import candidate
from tests.unit.verification.evidence.samples import accusation, named


def test_an_accused_peer_is_excluded_once_with_its_lie_as_the_reason() -> None:
    known = Exclusions("me")
    assert known.refusal("liar") is None
    assert known.learn(accusation("liar"))
    assert not known.learn(accusation("liar", b"other evidence"))
    assert known.reasons == {"liar": "liar lied"}
    assert known.refusal("liar") == "it is excluded from the run by evidence: liar lied"
    assert known.refusal("other") is None


def test_a_candidate_is_refused_if_it_is_excluded() -> None:
    known, me = Exclusions("me"), candidate(0)
    assert known.refuses(me, 0.0) is None
    known.learn(accusation(me.peer_id))
    assert "lied" in (known.refuses(me, 0.0) or "")


def test_a_peer_never_excludes_itself_and_remembers_the_first_accusation() -> None:
    known = Exclusions("me")
    assert not known.knows(named("me"))
    assert not known.learn(accusation("me"))
    assert not known.learn(accusation("me", b"another"))
    assert known.reasons == {}
    assert known.refusal("me") is None
    assert known.against_me == "me lied"
    assert known.knows(named("me"))
    assert known.newest(16) == ()


def test_evidence_is_shown_newest_first_and_peers_that_were_met_before_others() -> None:
    known = Exclusions("me")
    for peer_id in ("a", "b", "c", "d"):
        known.learn(accusation(peer_id))
    assert [each.peer_id for each in known.newest(3)] == ["d", "c", "b"]
    known.meets("a")
    assert [each.peer_id for each in known.newest(3)] == ["a", "d", "c"]
    assert known.evidence(accusation("b").digest) == b"evidence"
    assert known.evidence(bytes(32)) is None


def test_evidence_beyond_the_bound_is_let_go_and_the_exclusion_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusions, "MAX_KEPT_BYTES", 250)
    known = Exclusions("me")
    known.meets("met")
    for peer_id in ("met", "first", "second"):
        known.learn(accusation(peer_id, b"x" * 100))
    assert known.evidence(accusation("first", b"x" * 100).digest) is None
    assert [each.peer_id for each in known.newest(16)] == ["met", "second"]
    assert known.reasons.keys() == {"met", "first", "second"}
    assert not known.learn(accusation("first", b"x" * 100))


def test_beyond_the_largest_number_the_oldest_that_was_not_met_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exclusions, "MAX_EXCLUDED", 3)
    known = Exclusions("me")
    known.meets("met")
    for number in range(10):
        known.learn(accusation("met" if number == 0 else f"invented {number}"))
    assert known.reasons.keys() == {"met", "invented 8", "invented 9"}
    assert len(known.newest(16)) == 3


def test_the_number_of_peers_that_were_met_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusions, "MAX_MET", 2)
    known = Exclusions("me")
    for peer_id in ("a", "b", "a", "c"):
        known.meets(peer_id)
    assert [known.has_met(peer_id) for peer_id in ("a", "b", "c", "me")] == [True, False, True, True]


def test_reasons_are_a_copy() -> None:
    known = Exclusions("me")
    before = known.reasons
    known.learn(accusation("liar"))
    assert before == {}
