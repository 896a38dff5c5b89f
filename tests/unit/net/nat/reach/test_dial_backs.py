"""Votes on endpoints: which are enough, and when they are replaced."""

from __future__ import annotations

from p2pavg.net.nat.reach.facts import DialBacks

ENDPOINT = ("203.0.113.1", 4001)


def verdict(votes: DialBacks, *, others: bool = True, routed: bool = True) -> bool | None:
    return votes.verdict(ENDPOINT, others=others, routed=routed)


def test_one_failure_is_believed_only_without_other_peers() -> None:
    votes = DialBacks()
    votes.vote(0.0, ENDPOINT, "a", "198.51.100.1", reached=False)
    assert verdict(votes) is None
    assert verdict(votes, others=False) is False


def test_votes_of_one_network_count_once() -> None:
    votes = DialBacks()
    votes.vote(0.0, ENDPOINT, "a", "5.0.0.1", reached=True)
    for number in range(1, 9):
        votes.vote(0.0, ENDPOINT, f"liar {number}", f"9.9.9.{number}", reached=False)
    assert verdict(votes) is True


def test_votes_of_peers_that_have_left_give_way_to_two_new_ones() -> None:
    votes = DialBacks()
    for name, host in (("a", "5.0.0.1"), ("b", "6.0.0.1")):
        votes.vote(0.0, ENDPOINT, name, host, reached=True)
    votes.vote(400.0, ENDPOINT, "c", "7.0.0.1", reached=False)
    assert verdict(votes) is True  # one liar does not decide
    votes.vote(400.0, ENDPOINT, "d", "8.0.0.1", reached=False)
    assert verdict(votes) is False


def test_silence_closes_the_port_of_a_router_and_not_that_of_a_public_host() -> None:
    votes = DialBacks()
    votes.unanswered(ENDPOINT)
    assert verdict(votes) is None
    votes.unanswered(ENDPOINT)
    assert verdict(votes) is False
    assert verdict(votes, routed=False) is None


def test_endpoints_of_other_hosts_and_ports_are_forgotten() -> None:
    votes = DialBacks()
    votes.vote(0.0, ENDPOINT, "a", "5.0.0.1", reached=True)
    votes.keep_hosts([ENDPOINT[0]])
    votes.forget_port(80)
    assert votes.has_voted(ENDPOINT, "a")
    votes.forget_port(ENDPOINT[1])
    assert not votes.has_voted(ENDPOINT, "a")
    votes.vote(0.0, ENDPOINT, "a", "5.0.0.1", reached=True)
    votes.keep_hosts([])
    assert not votes.has_voted(ENDPOINT, "a")
