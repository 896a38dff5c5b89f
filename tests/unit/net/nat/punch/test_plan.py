"""The rules of punches: whether, where, when and how often."""

import pytest

from p2pavg.net.nat.punch.plan import (
    LONGEST_ROUND_TRIP,
    Endpoint,
    begin_of_asker,
    choose,
    hosts_to_propose,
    refusal,
    round_trip,
)
from p2pavg.net.nat.reach.reachability import Kind, Reachability

HERE = Reachability(
    kind=Kind.PUNCHABLE, sentence="", punch_hosts=("203.0.113.1", "2001:db8::1", "203.0.113.9")
)


@pytest.mark.parametrize(
    "own",
    [
        Reachability(kind=Kind.RELAYED, sentence="the reason"),
        Reachability(kind=Kind.PUBLIC, sentence="the reason", punch_hosts=("203.0.113.1",)),
        Reachability(kind=Kind.UNKNOWN, sentence="the reason"),
    ],
    ids=lambda own: str(own.kind),
)
def test_a_peer_that_takes_part_in_no_punch_has_a_reason(own: Reachability) -> None:
    assert refusal(HERE) == ""
    assert "(the reason)" in refusal(own)


class TestEndpoints:
    def test_one_host_of_each_version_is_proposed(self) -> None:
        assert hosts_to_propose(HERE) == {4: "203.0.113.1", 6: "2001:db8::1"}

    @pytest.mark.parametrize(
        ("host", "port"),
        [
            ("203.0.113.1", 1023),
            ("203.0.113.1", 22),
            ("203.0.113.1", 0),
            ("203.0.113.1", -1),
            ("203.0.113.1", 65536),
            ("example.org", 4001),
            ("", 4001),
            ("::ffff:203.0.113.1", 4001),
            ("2001:DB8::1", 4001),
            ("fe80::1%eth0", 4001),
            ("203.0.113.01", 4001),
        ],
    )
    def test_other_hosts_and_ports_of_services_are_no_endpoints(self, host: str, port: int) -> None:
        with pytest.raises(ValueError, match="is not"):
            Endpoint(host, port)

    def test_an_endpoint_is_an_address_of_a_peer(self) -> None:
        assert Endpoint("203.0.113.1", 4001).address_of("X") == "/ip4/203.0.113.1/tcp/4001/p2p/X"
        assert Endpoint("2001:db8::1", 4001).address_of("X") == "/ip6/2001:db8::1/tcp/4001/p2p/X"


class TestChoice:
    FOUR, SIX = Endpoint("203.0.113.2", 4002), Endpoint("2001:db8::2", 4002)

    def test_ipv6_comes_first_and_the_next_try_takes_the_other_version(self) -> None:
        chosen = [choose(attempt, HERE, [self.FOUR, self.SIX]) for attempt in (1, 2, 3)]
        six, four = ("2001:db8::1", self.SIX), ("203.0.113.1", self.FOUR)
        assert chosen == [six, four, six]

    def test_only_a_common_version_is_taken(self) -> None:
        assert [choose(attempt, HERE, [self.FOUR]) for attempt in (1, 2)] == [("203.0.113.1", self.FOUR)] * 2

    def test_without_a_common_version_there_is_a_reason(self) -> None:
        own = Reachability(kind=Kind.PUNCHABLE, sentence="", punch_hosts=("203.0.113.1",))
        assert choose(1, own, [self.SIX]) == "its outer addresses are of IPv4, and the proposed ones of IPv6"


class TestTimes:
    def test_the_asker_begins_half_a_round_trip_after_its_signal(self) -> None:
        assert begin_of_asker(100.0, 0.3) == pytest.approx(100.15)

    def test_the_other_peers_own_work_is_no_part_of_the_round_trip(self) -> None:
        assert round_trip(sent=10.0, answered=11.5, busy=1.2) == pytest.approx(0.3)

    @pytest.mark.parametrize(("busy", "found"), [(50.0, 0.0), (0.0, LONGEST_ROUND_TRIP)])
    def test_a_lie_about_it_shifts_the_begin_by_a_second_at_most(self, busy: float, found: float) -> None:
        assert round_trip(sent=0.0, answered=30.0, busy=busy) == found
