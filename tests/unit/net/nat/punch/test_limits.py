"""The limits of tries that other peers ask for."""

from p2pavg.net.nat.punch.meeting import (
    ALL_AT_ONCE,
    ALL_TRIES,
    MAX_ACCOUNTS,
    PEER_AT_ONCE,
    PEER_TRIES,
    PEER_TRIES_PER_SECOND,
    PunchLimits,
)


def tried(limits: PunchLimits, now: float, peer_id: str) -> bool:
    """Carry out a try, if it is allowed."""
    if limits.refusal(now, peer_id):
        return False
    limits.begin(now, peer_id)
    limits.end(peer_id)
    return True


def test_a_peer_has_a_burst_and_then_a_rate() -> None:
    limits = PunchLimits()
    assert sum(tried(limits, 0.0, "A") for _ in range(100)) == PEER_TRIES
    assert "has asked for too many" in limits.refusal(0.0, "A")
    assert limits.refusal(1.0 / PEER_TRIES_PER_SECOND, "A") == ""
    assert tried(limits, 0.0, "B"), "another peer pays nothing for it"


def test_all_peers_together_have_a_rate() -> None:
    limits = PunchLimits()
    assert sum(tried(limits, 0.0, f"peer {number}") for number in range(1000)) == ALL_TRIES
    assert "other peers" in limits.refusal(0.0, "A")
    assert limits.refusal(1.0, "A") == ""


def test_tries_under_way_are_limited_for_each_peer_and_in_all() -> None:
    limits = PunchLimits()
    for _ in range(PEER_AT_ONCE):
        limits.begin(0.0, "A")
    assert "under way" in limits.refusal(0.0, "A")
    for number in range(ALL_AT_ONCE - PEER_AT_ONCE):
        assert limits.refusal(0.0, f"peer {number}") == ""
        limits.begin(0.0, f"peer {number}")
    assert "under way" in limits.refusal(0.0, "B")
    limits.end("A")
    assert limits.refusal(0.0, "B") == limits.refusal(0.0, "A") == ""


def test_accounts_are_bounded() -> None:
    limits = PunchLimits()
    for number in range(2 * MAX_ACCOUNTS):
        limits.begin(float(number), f"peer {number}")
        limits.end(f"peer {number}")
    assert len(limits._peers) == MAX_ACCOUNTS
    assert not limits._under_way
