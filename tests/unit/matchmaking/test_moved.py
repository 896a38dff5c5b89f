"""A peer that others reach in another way than it has signed begins a new attempt, unless it is in a group."""

from __future__ import annotations

from p2pavg.matchmaking.actions import Close, Renew
from p2pavg.matchmaking.attempt_state import AttemptPhase
from p2pavg.matchmaking.messages import Joined
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.matchmaking.timing import DUE_SECONDS
from tests.unit.matchmaking.bus import EPOCH, MATCH_TIMEOUT, candidate, settings

early, me, late = (candidate(index, EPOCH + MATCH_TIMEOUT + index) for index in range(3))


def test_it_begins_anew_at_nearly_the_same_deadline() -> None:
    rules = Matchmaking(me, settings(), EPOCH)
    rules.discovered([early], EPOCH)
    [*closing, renewed] = rules.moved(EPOCH)
    assert closing == [Close(early.peer_id, closing[0].reason, upward=True)], (
        "the peer that was asked is told"
    )
    assert isinstance(renewed, Renew)
    assert renewed.deadline == me.deadline + 0.001
    assert rules.state.phase is AttemptPhase.OVER
    assert candidate(1, renewed.deadline).record.sequence > me.record.sequence


def test_others_have_time_to_read_the_new_record() -> None:
    rules = Matchmaking(me, settings(), EPOCH)
    [renewed] = rules.moved(me.deadline - 1.0)
    assert isinstance(renewed, Renew)
    assert renewed.deadline == me.deadline - 1.0 + 2 * DUE_SECONDS


def test_a_leader_with_followers_goes_on() -> None:
    rules = Matchmaking(me, settings(), EPOCH)
    rules.asked(late, EPOCH)
    assert rules.moved(EPOCH) == []


def test_a_follower_goes_on() -> None:
    rules = Matchmaking(me, settings(), EPOCH)
    rules.discovered([early], EPOCH)
    rules.told_by_leader(early.peer_id, Joined(early), EPOCH)
    assert rules.state.phase is AttemptPhase.FOLLOWING
    assert rules.moved(EPOCH) == []
