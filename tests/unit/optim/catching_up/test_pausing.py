"""Pauses of a peer alone for peers that join it."""

from __future__ import annotations

from p2pavg.optim.catching_up.pausing import LONGEST_PAUSE_SECONDS, Pausing


def test_a_peer_pauses_while_it_is_wanted() -> None:
    pausing = Pausing()
    assert not pausing.is_due(False, 0.0)
    assert pausing.is_due(True, 1.0)
    assert pausing.is_due(True, 5.0)
    assert not pausing.is_due(False, 6.0)


def test_a_pause_ends() -> None:
    """A stranger that asks for ever must not stop this peer."""
    pausing = Pausing()
    assert pausing.is_due(True, 0.0)
    assert pausing.is_due(True, LONGEST_PAUSE_SECONDS - 1.0)
    assert not pausing.is_due(True, LONGEST_PAUSE_SECONDS)


def test_pauses_take_a_tenth_of_the_time_at_most() -> None:
    pausing = Pausing()
    seconds = 20_000
    paused = sum(pausing.is_due(True, float(now)) for now in range(seconds))
    assert 0.05 * seconds < paused <= 0.11 * seconds
