"""Matchmaking in a run with an authority: candidates that are no members are refused at every step, with the reason."""

from __future__ import annotations

import dataclasses

from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.actions import Actions, Open, Send
from p2pavg.matchmaking.attempt_state import AttemptPhase
from p2pavg.matchmaking.messages import Accept, Declined, GroupProposal, Joined, JoinRequest, Refuse
from p2pavg.matchmaking.rules import Matchmaking
from tests.unit.matchmaking.bus import EPOCH, roster_of, row, settings

EXPIRED = "its certificate expired on 2027-01-15 08:00:00 UTC"
FIRST, ME, THIRD = row(3, 2.0)


def refusing(*refused: Candidate, me: Candidate = ME, minimum: int = 2) -> Matchmaking:
    """Return the rules of a peer that takes these candidates for no members."""
    ids = {each.peer_id for each in refused}

    def refuses(candidate: Candidate, _now: float) -> str | None:
        return EXPIRED if candidate.peer_id in ids else None

    how = dataclasses.replace(settings(target=3, minimum=minimum), refuses=refuses)
    return Matchmaking(me, how, EPOCH)


def sent(actions: Actions) -> list[object]:
    return [action.message for action in actions if isinstance(action, Send | Open)]


def test_a_candidate_that_is_no_member_is_neither_asked_nor_nudged() -> None:
    rules = refusing(FIRST, THIRD)
    assert sent(rules.discovered([FIRST, THIRD], EPOCH)) == []
    assert EXPIRED in rules.waits_for()


def test_a_member_is_asked() -> None:
    assert sent(refusing(THIRD).discovered([FIRST], EPOCH)) == [JoinRequest(ME)]


def test_a_peer_that_is_no_member_hears_why_it_cannot_join() -> None:
    assert Declined(EXPIRED) in sent(refusing(THIRD).asked(THIRD, EPOCH))


def test_a_leader_that_is_no_member_is_not_followed() -> None:
    rules = refusing()
    rules.discovered([FIRST], EPOCH)
    later = refusing(FIRST)
    rules.state.settings = later.state.settings
    rules.told_by_leader(FIRST.peer_id, Joined(FIRST), EPOCH)
    assert rules.state.phase is AttemptPhase.LEADING


def test_a_roster_with_a_peer_that_is_no_member_is_refused() -> None:
    for refused, answer in ((THIRD, Refuse), (None, Accept)):
        rules = refusing(*([refused] if refused else []))
        rules.discovered([FIRST], EPOCH)
        rules.told_by_leader(FIRST.peer_id, Joined(FIRST), EPOCH)
        roster = roster_of(FIRST, ME, THIRD)
        answers = sent(rules.told_by_leader(FIRST.peer_id, GroupProposal(roster), EPOCH))
        first = answers[0]
        assert type(first) is answer, answers
        if isinstance(first, Refuse):
            assert first.reason == f"a roster with {THIRD.peer_id}: {EXPIRED}"


def test_a_peer_that_knows_of_its_own_refusal_gives_up_with_the_reason() -> None:
    rules = refusing(ME)
    rules.discovered([THIRD], EPOCH)
    actions = rules.tick(rules.state.report_at)
    reasons = [getattr(action, "reason", "") for action in actions]
    assert rules.state.phase is AttemptPhase.OVER
    assert any(f"this peer is not admitted to the run: {EXPIRED}" in reason for reason in reasons)
