"""The limits of a relay, each for itself, and their fairness."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.hosts import prefix_of
from p2pavg.net.limits.rate import WIRE_OVERHEAD
from p2pavg.net.nat.relay import limits as module
from p2pavg.net.nat.relay.limits import Circuit, RelayBudget, RelayLimits, Reservation

ENDLESS = RelayLimits(
    reservations=10_000,
    reservations_per_host=10_000,
    reservations_per_prefix=10_000,
    circuits=10_000,
    circuits_per_peer=10_000,
    circuits_per_host=10_000,
    circuits_per_target=10_000,
    asks_per_peer=100_000,
    asks_per_host=100_000,
)
PIECE = 16 * 1024


def budget_of(**limits: Any) -> RelayBudget:
    return RelayBudget(replace(ENDLESS, **limits))


def reserve(budget: RelayBudget, peer_id: str, host: str = "192.0.2.1") -> Reservation:
    found = budget.reserve(peer_id, host)
    assert not isinstance(found, str), found
    return found[0]


def connect(
    budget: RelayBudget, source: str, target: str, host: str = "198.51.100.1", now: float = 0.0
) -> Circuit:
    found = budget.connect(source, host, target, now)
    assert not isinstance(found, str), found
    return found[0]


class TestReservations:
    def test_there_are_so_many_in_all(self) -> None:
        budget = budget_of(reservations=3)
        for number in range(3):
            reserve(budget, f"peer {number}", f"198.51.{number}.1")
        assert budget.reserve("late", "192.0.2.1") == "this relay has all of its 3 reservations in use"
        assert len(budget.reserved) == 3

    def test_there_are_so_many_at_an_address(self) -> None:
        budget = budget_of(reservations_per_host=2)
        reserve(budget, "one")
        reserve(budget, "two")
        assert "at this address" in str(budget.reserve("three", "192.0.2.1"))
        reserve(budget, "three", "192.0.2.2")

    def test_there_are_so_many_in_a_network(self) -> None:
        budget = budget_of(reservations_per_prefix=2)
        reserve(budget, "one", "192.0.2.1")
        reserve(budget, "two", "192.0.2.2")
        assert "of this network" in str(budget.reserve("three", "192.0.2.3"))
        reserve(budget, "three", "198.51.100.3")

    def test_a_network_with_many_gives_way_to_one_with_few(self) -> None:
        budget = budget_of(reservations=4)
        many = [reserve(budget, f"many {number}", f"192.0.2.{number}") for number in range(4)]
        found = budget.reserve("other", "198.51.100.1")
        assert not isinstance(found, str)
        assert found[1] == many[:1]
        assert budget.reserved == {"many 1", "many 2", "many 3", "other"}

    def test_in_a_network_an_address_with_many_gives_way_to_one_with_few(self) -> None:
        budget = budget_of(reservations_per_prefix=3)
        many = [reserve(budget, f"many {number}", "192.0.2.1") for number in range(3)]
        found = budget.reserve("neighbour", "192.0.2.2")
        assert not isinstance(found, str)
        assert found[1] == many[:1]

    def test_a_new_one_replaces_an_older_one_of_the_same_peer(self) -> None:
        budget = budget_of(reservations=1)
        older = reserve(budget, "peer", "192.0.2.1")
        newer = reserve(budget, "peer", "198.51.100.1")
        budget.give_up(older)
        assert budget.reserved == {"peer"}
        budget.give_up(newer)
        assert not budget.reserved

    def test_places_are_free_again(self) -> None:
        budget = budget_of(reservations=1)
        for number in range(10):
            budget.give_up(reserve(budget, f"peer {number}"))
        assert not budget.reserved


class TestCircuits:
    @pytest.mark.parametrize(
        ("limit", "sources", "hosts", "targets", "reason"),
        [
            ("circuits", "abc", "123", "xyz", "in all"),
            ("circuits_per_peer", "aaa", "123", "xyz", "of this peer"),
            ("circuits_per_host", "abc", "111", "xyz", "from this address"),
            ("circuits_per_target", "abc", "123", "xxx", "to that peer"),
        ],
    )
    def test_each_limit_is_kept_by_itself(
        self, limit: str, sources: str, hosts: str, targets: str, reason: str
    ) -> None:
        budget = budget_of(**{limit: 2})
        for target in set(targets):
            reserve(budget, target)
        asked = [(a, f"198.51.{h}.1", t) for a, h, t in zip(sources, hosts, targets, strict=True)]
        first = connect(budget, asked[0][0], asked[0][2], asked[0][1])
        connect(budget, asked[1][0], asked[1][2], asked[1][1])
        assert budget.connect(*asked[2], 0.0) == f"this relay has 2 circuits {reason} already"
        budget.close(first)
        connect(budget, asked[2][0], asked[2][2], asked[2][1])
        assert len(budget.circuits) == 2

    def test_only_peers_with_a_reservation_are_reached(self) -> None:
        budget = budget_of()
        assert "no reservation" in str(budget.connect("a", "198.51.100.1", "x", 0.0))
        budget.give_up(reserve(budget, "x"))
        assert "no reservation" in str(budget.connect("a", "198.51.100.1", "x", 0.0))

    def test_a_peer_is_not_joined_with_itself(self) -> None:
        budget = budget_of()
        reserve(budget, "x")
        assert "to itself" in str(budget.connect("x", "192.0.2.1", "x", 0.0))

    @pytest.mark.parametrize("limit", ["circuits", "circuits_per_target"])
    def test_one_address_does_not_keep_others_from_a_peer(self, limit: str) -> None:
        budget = budget_of(**{limit: 4})
        reserve(budget, "x")
        many = [connect(budget, f"sybil {number}", "x", "203.0.113.1") for number in range(4)]
        found = budget.connect("honest", "198.51.100.1", "x", 0.0)
        assert not isinstance(found, str)
        assert found[1] == many[:1]
        assert many[0] not in budget.circuits
        assert len(budget.circuits) == 4

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9), st.booleans())))
    def test_limits_hold_and_no_small_network_gives_way_to_a_larger_one(
        self, asks: list[tuple[int, int, int, bool]]
    ) -> None:
        budget = budget_of(
            circuits=6, circuits_per_peer=3, circuits_per_host=4, circuits_per_target=4, reservations=3
        )
        for target in "xyz":
            reserve(budget, target)
        for network, host, name, closes in asks:
            if closes and budget.circuits:
                budget.close(budget.circuits[name % len(budget.circuits)])
                continue
            where, target = f"198.51.{network}.{host}", "xyz"[name % 3]
            before = Counter(prefix_of(each.host) for each in budget.circuits)
            found = budget.connect(f"{where} {name}", where, target, 0.0)
            if not isinstance(found, str):
                for victim in found[1]:
                    assert before[prefix_of(victim.host)] >= before[prefix_of(where)]
            opened = budget.circuits
            assert len(opened) <= 6
            for key, most in (("source", 3), ("host", 4), ("target", 4)):
                assert max(Counter(getattr(each, key) for each in opened).values(), default=0) <= most


class TestAsking:
    def test_a_peer_asks_so_often(self) -> None:
        budget = budget_of(asks_per_peer=3)
        asked = [str(budget.connect("a", "198.51.100.1", "x", 0.0)) for _ in range(5)]
        assert ["too often" in answer for answer in asked] == [False, False, False, True, True]
        assert "too often" not in str(budget.connect("b", "198.51.100.1", "x", 0.0))
        assert "too often" not in str(budget.connect("a", "198.51.100.1", "x", 60.0))

    def test_an_address_asks_so_often(self) -> None:
        budget = budget_of(asks_per_host=3)
        asked = [str(budget.connect(f"sybil {number}", "198.51.100.1", "x", 0.0)) for number in range(4)]
        assert ["too often" in answer for answer in asked] == [False, False, False, True]
        assert "too often" not in str(budget.connect("a", "198.51.100.2", "x", 0.0))


class TestBytes:
    def test_a_peer_that_has_sent_its_bytes_sends_no_more_for_a_while(self) -> None:
        budget = budget_of(bytes_per_peer=10 * PIECE)
        reserve(budget, "x")
        circuit = connect(budget, "a", "x")
        waits = [budget.carry(circuit, PIECE, 0.0, back=False) for _ in range(11)]
        assert None not in waits[:10]
        assert waits[10] is None
        assert "used up" in str(budget.connect("a", "198.51.100.9", "x", 1.0))
        connect(budget, "b", "x")
        connect(budget, "a", "x", now=3600.0)

    def test_an_address_that_has_sent_its_bytes_sends_no_more_for_a_while(self) -> None:
        budget = budget_of(bytes_per_host=4 * PIECE)
        reserve(budget, "x")
        circuits = [connect(budget, f"sybil {number}", "x", "203.0.113.1") for number in range(5)]
        waits = [budget.carry(each, PIECE, 0.0, back=False) for each in circuits]
        assert None not in waits[:4]
        assert waits[4] is None
        assert "used up" in str(budget.connect("another", "203.0.113.1", "x", 1.0))
        connect(budget, "another", "x", "203.0.113.2")

    def test_the_sender_pays(self) -> None:
        """A peer behind the relay cannot use up what the asking peer may send, nor the other way round."""
        budget = budget_of(bytes_per_peer=4 * PIECE, bytes_per_host=8 * PIECE)
        reserve(budget, "x")
        reserve(budget, "y", "192.0.2.2")
        circuit = connect(budget, "a", "x")
        while budget.carry(circuit, PIECE, 0.0, back=True) is not None:
            pass
        assert budget.carry(circuit, PIECE, 0.0, back=False) is not None
        connect(budget, "a", "y")
        assert "that peer" in str(budget.connect("b", "203.0.113.1", "x", 0.0))

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.01, 0.5]),
                st.integers(PIECE // 2, PIECE),
                st.integers(0, 5),
                st.booleans(),
            ),
            min_size=5,
            max_size=40,
        )
    )
    def test_all_circuits_together_stay_below_the_rate_in_any_window(
        self, pieces: list[tuple[float, int, int, bool]]
    ) -> None:
        budget = budget_of(mbps=1.0)
        reserve(budget, "x")
        circuits = [connect(budget, f"peer {number}", "x", f"198.51.{number}.1") for number in range(6)]
        now, gone = 0.0, []
        for pause, count, which, back in pieces:
            now += pause
            wait = budget.carry(circuits[which], count, now, back=back)
            assert wait is not None
            gone.append((now + wait, count))
        rate = 1e6 / 8 / WIRE_OVERHEAD
        gone.sort()
        for first in range(len(gone)):
            for last in range(first, len(gone)):
                sent = sum(count for _, count in gone[first : last + 1])
                assert sent <= rate * (gone[last][0] - gone[first][0]) + 32 * 1024 + 1
        assert budget.carried == sum(count for _, count in gone)

    def test_the_accounts_of_open_circuits_are_kept_among_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_MAX_ACCOUNTS", 40)
        budget = budget_of(bytes_per_peer=4 * PIECE)
        reserve(budget, "x")
        circuit = connect(budget, "a", "x")
        while budget.carry(circuit, PIECE, 0.0, back=False) is not None:
            pass
        for number in range(500):
            budget.connect(f"sybil {number}", f"10.0.{number % 250}.1", "x", 0.0)
            budget.close(budget.circuits[-1])
        assert len(budget._accounts) <= 41
        assert "used up" in str(budget.connect("a", "198.51.100.1", "x", 0.0))
