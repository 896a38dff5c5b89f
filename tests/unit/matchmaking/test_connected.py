"""A candidate that could not be reached is asked as soon as there is a connection with it, once for each attempt."""

from __future__ import annotations

from p2pavg.matchmaking.actions import Actions, Open
from p2pavg.matchmaking.attempt_state import AttemptPhase
from p2pavg.matchmaking.messages import JoinRequest
from p2pavg.matchmaking.rules import Matchmaking
from tests.unit.matchmaking.bus import EPOCH, MATCH_TIMEOUT, candidate, settings

early, me = (candidate(index, EPOCH + MATCH_TIMEOUT + index) for index in range(2))


def unreached() -> Matchmaking:
    """Return an attempt that has not reached the peer that it has to ask."""
    rules = Matchmaking(me, settings(), EPOCH)
    rules.discovered([early], EPOCH)
    assert rules.state.phase is AttemptPhase.ASKING
    assert not asked(rules.lost_leader(early.peer_id, "no answer", EPOCH + 1, reachable=False))
    assert not rules.state.follows
    return rules


def asked(actions: Actions) -> list[str]:
    return [
        action.candidate.peer_id
        for action in actions
        if isinstance(action, Open) and isinstance(action.message, JoinRequest)
    ]


def test_a_connection_or_a_nudge_ends_the_pause() -> None:
    rules = unreached()
    assert not asked(rules.tick(EPOCH + 2))
    assert asked(rules.connected(early.peer_id, EPOCH + 3)) == [early.peer_id]
    assert asked(unreached().nudged(early, EPOCH + 3)) == [early.peer_id]


def test_it_does_so_once_for_each_attempt() -> None:
    """Otherwise a peer that answers nothing, and connects again and again, would be asked without end."""
    rules = unreached()
    rules.connected(early.peer_id, EPOCH + 3)
    rules.lost_leader(early.peer_id, "no answer", EPOCH + 4, reachable=False)
    assert not asked(rules.connected(early.peer_id, EPOCH + 5))
    assert not asked(rules.nudged(early, EPOCH + 5))
    again = candidate(0, EPOCH + MATCH_TIMEOUT + 0.5)
    rules.discovered([again], EPOCH + 6)
    rules.lost_leader(early.peer_id, "no answer", EPOCH + 7, reachable=False)
    assert asked(rules.connected(early.peer_id, EPOCH + 8)) == [early.peer_id]


def test_a_connection_with_a_peer_that_was_reached_changes_nothing() -> None:
    rules = Matchmaking(me, settings(), EPOCH)
    rules.discovered([early], EPOCH)
    rules.lost_leader(early.peer_id, "the stream broke", EPOCH + 1)
    assert rules.connected(early.peer_id, EPOCH + 1) == []
    assert rules.connected("a stranger", EPOCH + 1) == []
