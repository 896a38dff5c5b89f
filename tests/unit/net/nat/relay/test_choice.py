"""The choice of relays: enough of them, in different networks, spread over the peers of a run."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.hosts import prefix_of
from p2pavg.base.limits import RETRY_SECONDS
from p2pavg.net.nat.reach.facts import Neighbour
from p2pavg.net.nat.relay.choice import (
    MAX_DISTRUSTED,
    RELAYS_WANTED,
    RelayRecord,
    addresses_of_relay,
    choose_relays,
)


def candidate(peer_id: str, host: str) -> Neighbour:
    return Neighbour(peer_id=peer_id, host=host, port=1)


names = st.sampled_from([f"peer {number}" for number in range(8)])
hosts = st.sampled_from(["198.51.100.1", "198.51.100.2", "203.0.113.1", "192.0.2.1", "2001:db8::1"])
candidates = st.lists(st.builds(candidate, names, hosts), max_size=10, unique_by=lambda each: each.peer_id)


@given(candidates, st.sets(names, max_size=3), st.dictionaries(names, st.floats(0, 20)), st.integers(0, 4))
def test_only_free_candidates_are_chosen_and_no_more_than_are_missing(
    known: list[Neighbour], held: set[str], avoided: dict[str, float], wanted: int
) -> None:
    now = 10.0
    chosen = choose_relays("me", known, held, avoided, now, wanted)
    free = {
        each.peer_id for each in known if each.peer_id not in held and avoided.get(each.peer_id, 0) <= now
    }
    assert len(set(chosen)) == len(chosen) == min(len(free), max(0, wanted - len(held)))
    assert set(chosen) <= free


@given(candidates)
def test_relays_are_in_different_networks_if_there_are_two(known: list[Neighbour]) -> None:
    chosen = choose_relays("me", known, (), {}, 0.0, 2)
    networks = {each.peer_id: prefix_of(each.host) for each in known}
    assert len({networks[peer_id] for peer_id in chosen}) == min(2, len(set(networks.values())))


@given(candidates, names)
def test_a_second_relay_is_in_another_network_than_the_first(known: list[Neighbour], first: str) -> None:
    networks = {each.peer_id: prefix_of(each.host) for each in known}
    chosen = choose_relays("me", known, {first}, {}, 0.0, 2)
    if first in networks and len(set(networks.values())) > 1:
        assert networks[chosen[0]] != networks[first]


def test_the_peers_of_a_run_spread_over_its_relays() -> None:
    relays = [candidate(f"relay {number}", f"198.51.{number}.1") for number in range(10)]
    chosen = Counter(
        relay for peer in range(500) for relay in choose_relays(f"peer {peer}", relays, (), {}, 0.0)
    )
    assert sum(chosen.values()) == 500 * RELAYS_WANTED
    assert min(chosen.values()) > 50
    assert max(chosen.values()) < 150


def test_the_order_of_the_candidates_does_not_matter() -> None:
    relays = [candidate(f"relay {number}", f"198.51.{number}.1") for number in range(10)]
    assert choose_relays("me", relays, (), {}, 0.0) == choose_relays("me", relays[::-1], (), {}, 0.0)


class TestAddressesOfARelay:
    """A hostile relay cannot make the peers behind it announce the address of a third party."""

    PUBLIC = "/ip4/198.51.100.7/tcp/4001/p2p/relay"
    VICTIM = "/ip4/203.0.113.7/tcp/22/p2p/relay"

    def test_a_public_relay_is_announced_where_it_was_dialled(self) -> None:
        assert addresses_of_relay("relay", [self.PUBLIC], [self.VICTIM, self.PUBLIC]) == (self.PUBLIC,)
        assert addresses_of_relay("relay", [self.PUBLIC], []) == (self.PUBLIC,)

    def test_a_relay_that_was_not_dialled_is_not_announced(self) -> None:
        assert addresses_of_relay("relay", [], [self.VICTIM]) == ()

    @pytest.mark.parametrize(
        "host", ["/ip4/192.168.1.5", "/ip4/127.0.0.1", "/ip4/100.64.0.9", "/ip6/fd00::1"]
    )
    def test_a_relay_in_the_same_private_network_names_one_public_address(self, host: str) -> None:
        near = f"{host}/tcp/4001/p2p/relay"
        named = [
            near,
            "/ip4/10.1.1.1/tcp/4001/p2p/relay",
            "/dns4/example.org/tcp/4001/p2p/relay",
            "/ip4/203.0.113.7/tcp/22/p2p/another",
            self.PUBLIC,
            self.VICTIM,
        ]
        assert addresses_of_relay("relay", [near], named) == (near, self.PUBLIC)
        assert addresses_of_relay("relay", [near], named[:4]) == (near,)


class TestRelaysThatFailed:
    DIRECT = "/ip4/203.0.113.1/tcp/1/p2p/bad"
    OVER_BAD = "/ip4/203.0.113.1/tcp/1/p2p/bad/p2p-circuit/p2p/peer"
    OVER_GOOD = "/ip4/203.0.113.2/tcp/1/p2p/good/p2p-circuit/p2p/peer"

    def test_addresses_over_them_come_last_for_a_while(self) -> None:
        record = RelayRecord()
        given = [self.DIRECT, self.OVER_BAD, self.OVER_GOOD]
        assert record.ordered(given, 0.0) == given
        record.failed("bad", 0.0)
        assert record.ordered(given, 1.0) == [self.DIRECT, self.OVER_GOOD, self.OVER_BAD]
        assert record.ordered(given, RETRY_SECONDS) == given

    def test_the_oldest_is_forgotten(self) -> None:
        record = RelayRecord()
        record.failed("bad", 0.0)
        for number in range(MAX_DISTRUSTED):
            record.failed(f"other{number}", 0.0)
        assert record.ordered([self.OVER_BAD, self.OVER_GOOD], 1.0) == [self.OVER_BAD, self.OVER_GOOD]
