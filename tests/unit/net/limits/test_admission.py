"""The connections that are admitted, and those that give way, when there are too many."""

import pytest

from p2pavg.base.hosts import prefix_of
from p2pavg.net.limits.admission import (
    Acquaintances,
    Admission,
    ConnectionArrival,
    ConnectionLimits,
    TrustClass,
)

SMALL = ConnectionLimits(
    connections=12,
    inbound=8,
    per_host=4,
    per_prefix=6,
    per_peer=2,
    unfinished=8,
    unfinished_per_host=4,
    unfinished_per_prefix=6,
)


class House:
    """An admission with settable acquaintances, which records the connections that it dropped."""

    def __init__(self, limits: ConnectionLimits = SMALL) -> None:
        self.known = Acquaintances()
        self.admission = Admission(limits, self.known)
        self.dropped: list[ConnectionArrival] = []

    def arrive(self, host: str) -> ConnectionArrival:
        arrival, victims = self.admission.arrive(host)
        self.dropped += victims
        return arrival

    def connect(self, host: str, peer_id: str) -> ConnectionArrival | None:
        arrival = self.arrive(host)
        self.admission.speaks(arrival)
        victims = self.admission.connect(arrival, peer_id)
        self.dropped += victims or []
        return None if victims is None else arrival

    def connected(self, host: str, peer_id: str) -> ConnectionArrival:
        arrival = self.connect(host, peer_id)
        assert arrival is not None
        return arrival

    def dial(self, host: str, peer_id: str) -> ConnectionArrival:
        arrival, victims = self.admission.dialled(host, peer_id)
        self.dropped += victims
        return arrival

    @property
    def names(self) -> list[str]:
        return [arrival.peer_id for arrival in self.dropped]


@pytest.mark.parametrize(
    ("host", "prefix"),
    [
        ("203.0.113.7", "203.0.113.0/24"),
        ("::ffff:203.0.113.7", "203.0.113.0/24"),
        ("2001:db8:1:2:3::4", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/48"),
        ("", ""),
        ("no address", "no address"),
    ],
)
def test_the_network_of_an_address(host: str, prefix: str) -> None:
    assert prefix_of(host) == prefix


class TestUnfinished:
    def test_one_address_competes_with_itself(self) -> None:
        house = House()
        honest = house.arrive("198.51.100.1")
        greedy = [house.arrive("203.0.113.7") for _ in range(100)]
        assert house.dropped == greedy[:-4]
        assert honest in house.admission.unfinished

    def test_one_prefix_competes_with_itself(self) -> None:
        house = House()
        honest = house.arrive("198.51.100.1")
        for number in range(100):
            house.arrive(f"203.0.113.{number}")
        assert honest in house.admission.unfinished
        assert len(house.admission.unfinished) == 7

    def test_the_greediest_prefix_gives_way_when_all_places_are_taken(self) -> None:
        house = House()
        few = [house.arrive("198.51.100.1"), house.arrive("192.0.2.1")]
        for number in range(100):
            house.arrive(f"203.0.113.{number % 9}")
        house.arrive("192.0.2.77")
        assert {arrival.prefix for arrival in house.dropped} == {"203.0.113.0/24"}
        assert set(few) <= set(house.admission.unfinished)

    def test_a_host_at_which_a_known_peer_was_met_gives_way_last(self) -> None:
        house = House()
        house.known.met("friend", "198.51.100.1")
        house.known.remember("friend", TrustClass.ANSWERED)
        friends = [house.arrive("198.51.100.1") for _ in range(3)]
        for number in range(100):
            house.arrive(f"203.0.{number}.1")
        assert set(friends) <= set(house.admission.unfinished)

    def test_connections_that_stop_in_one_stage_give_way_to_each_other(self) -> None:
        """The attack comes from the honest peer's own address, in any stage of the handshake."""
        for speaks in (False, True):
            house = House()
            for _ in range(3):
                arrival = house.arrive("203.0.113.7")
                if speaks:
                    house.admission.speaks(arrival)
            honest = house.arrive("203.0.113.7")
            if not speaks:
                house.admission.speaks(honest)
            for _ in range(2 if speaks else 100):
                arrival = house.arrive("203.0.113.7")
                if speaks:
                    house.admission.speaks(arrival)
            assert honest in house.admission.unfinished

    def test_a_dropped_connection_cannot_connect(self) -> None:
        house = House()
        first = house.arrive("203.0.113.7")
        for _ in range(4):
            house.arrive("203.0.113.7")
        assert house.admission.connect(first, "late") is None
        house.admission.leave(first)


class TestConnected:
    def test_one_address_keeps_out_neither_others_nor_its_newest(self) -> None:
        house = House()
        house.connected("198.51.100.1", "honest")
        for number in range(100):
            house.connected("203.0.113.7", f"attacker {number}")
        neighbour = house.connected("203.0.113.7", "neighbour")
        assert "honest" not in house.names
        assert neighbour not in house.dropped

    def test_a_peer_that_has_answered_stays_when_its_neighbours_connect(self) -> None:
        house = House()
        house.known.remember("neighbour", TrustClass.ANSWERED)
        house.connected("203.0.113.7", "neighbour")
        for number in range(100):
            house.connected("203.0.113.7", f"attacker {number}")
        assert "neighbour" not in house.names

    def test_companions_are_not_counted_against_their_address(self) -> None:
        house = House(ConnectionLimits(per_host=4, per_prefix=6))
        for number in range(20):
            house.known.remember(f"friend {number}", TrustClass.COMPANION)
            house.connected("203.0.113.7", f"friend {number}")
        assert house.dropped == []

    def test_a_companion_gets_in_when_strangers_of_many_networks_fill_all(self) -> None:
        house = House()
        for number in range(8):
            house.connected(f"203.0.{number}.1", f"stranger {number}")
        assert house.connect("198.51.100.1", "one more stranger") is None
        house.known.remember("friend", TrustClass.COMPANION)
        house.connected("198.51.100.1", "friend")
        assert house.names == ["stranger 0"]

    def test_strangers_never_displace_companions(self) -> None:
        house = House()
        for number in range(8):
            house.known.remember(f"friend {number}", TrustClass.COMPANION)
            house.connected(f"203.0.{number}.1", f"friend {number}")
        assert house.connect("198.51.100.1", "stranger") is None
        assert house.dropped == []

    def test_a_prefix_with_many_connections_gives_way_to_one_with_few(self) -> None:
        house = House()
        for number in range(8):
            house.connected(f"203.0.{number % 2}.{number}", f"attacker {number}")
        house.connected("198.51.100.1", "honest")
        assert house.names == ["attacker 0"]

    def test_the_oldest_connection_of_one_peer_gives_way_to_its_newest(self) -> None:
        house = House()
        first = house.connected("203.0.113.7", "same")
        others = [house.connected("203.0.113.7", "same") for _ in range(2)]
        assert house.dropped == [first]
        assert not set(others) & set(house.dropped)

    def test_outbound_connections_are_never_refused(self) -> None:
        house = House()
        for number in range(8):
            house.known.remember(f"friend {number}", TrustClass.COMPANION)
            house.connected(f"203.0.{number}.1", f"friend {number}")
        for number in range(20):
            house.dial(f"198.51.{number}.1", f"dialled {number}")
        assert len(house.admission) == 12
        assert not [name for name in house.names if name.startswith("friend")]

    def test_a_connection_that_has_left_makes_room(self) -> None:
        house = House()
        arrivals = [house.connected(f"203.0.{number}.1", f"stranger {number}") for number in range(8)]
        house.admission.leave(arrivals[3])
        house.connected("198.51.100.1", "another")
        assert house.dropped == []


def test_scaled_limits_stay_positive() -> None:
    scaled = ConnectionLimits().scaled(0.25)
    assert (scaled.connections, scaled.inbound, scaled.per_peer) == (128, 96, ConnectionLimits().per_peer)
    assert ConnectionLimits().scaled(0.0001).connections == 4


def test_acquaintances_are_bounded() -> None:
    known = Acquaintances(most=3, most_hosts=2)
    for number in range(10):
        known.remember(f"peer {number}", TrustClass.ANSWERED)
        known.met(f"peer {number}", f"203.0.113.{number}")
    for number in range(5):
        known.met("peer 9", f"198.51.100.{number}")
    assert [known.standing_of(f"peer {number}") for number in (6, 7, 9)] == [0, 1, 1]
    assert known.standing_at("203.0.113.6") is TrustClass.STRANGER
    assert known.standing_at("198.51.100.4") is TrustClass.ANSWERED
    assert [known.has_met("peer 9", f"198.51.100.{number}") for number in range(5)] == [False] * 3 + [
        True
    ] * 2
    assert len(known._peers_at) <= 4
