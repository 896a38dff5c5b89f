"""A peer's knowledge of its own reachability: kinds, sentences, addresses, relays, lies, and changes of network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from p2pavg.net.nat.reach.facts import DialBacks, Mapped, Neighbour
from p2pavg.net.nat.reach.knowledge import MAX_OBSERVERS, AskDialBack, AskLook, AskWhoami, Question
from p2pavg.net.nat.reach.reachability import NOT_KNOWN_YET, Kind, Probe
from tests.unit.net.nat.reach.routers import (
    HOME,
    LOOPBACK,
    ME,
    OUTER,
    PORT,
    A,
    Answer,
    B,
    C,
    D,
    World,
    keeps,
    shifts,
    symmetric,
)

V6 = "2001:db8:1::7"
HERE = Neighbour(peer_id="here", host=LOOPBACK)
NEAR = Neighbour(peer_id="near", host="192.168.1.3", port=4001)
CIRCUIT = "/ip4/198.51.100.1/tcp/4001/p2p/a/p2p-circuit/p2p/me"


class TestLocalNetworks:
    def test_all_addresses_are_announced_before_any_peer_has_answered(self) -> None:
        world = World(peers=[])
        assert world.knowledge.addresses == (world.text(HOME), world.text(LOOPBACK))
        assert world.kind() is Kind.UNKNOWN
        assert world.knowledge.reachability.dialable
        assert not world.knowledge.relays_wanted

    def test_peers_on_the_same_machine_are_not_asked(self) -> None:
        world = World(peers=[HERE, Neighbour(peer_id="here too", host=HOME)])
        world.wait(700.0)
        assert not world.asked

    def test_a_local_network_keeps_its_addresses_and_needs_no_dial_back(self) -> None:
        world = World(peers=[HERE, NEAR], outer=HOME)
        before = world.knowledge.addresses
        world.wait(100.0)
        assert world.knowledge.addresses == before
        assert {type(question) for question in world.asked} == {AskLook}
        assert world.kind() is Kind.UNKNOWN
        assert not world.knowledge.relays_wanted

    def test_peers_of_the_own_network_do_not_outvote_one_peer_outside(self) -> None:
        near = [Neighbour(peer_id=f"near {number}", host=f"192.168.1.{number}") for number in range(3, 8)]
        world = World(peers=[*near, A])
        world.lies = {peer.peer_id: lambda _: HOME for peer in near}
        world.settle()
        assert world.knowledge.reachability.outer_hosts == (OUTER,)
        assert world.kind() is Kind.PUNCHABLE

    def test_private_networks_behind_routers_are_recognized_where_there_is_no_other(self) -> None:
        world = World(peers=[Neighbour(peer_id="other", host="10.2.0.5", port=4001)], outer="10.9.0.1")
        world.settle()
        assert world.kind() is Kind.PUNCHABLE
        assert world.knowledge.relays_wanted


class TestKinds:
    def test_public_peer(self) -> None:
        world = World(interfaces=[LOOPBACK, OUTER], dialable={(OUTER, PORT)})
        world.settle()
        assert world.kind() is Kind.PUBLIC
        assert world.knowledge.reachability.sentence == "public"
        assert world.knowledge.addresses == (world.text(OUTER),)
        assert not world.knowledge.relays_wanted
        assert not world.knowledge.behind_router

    def test_mapped_port(self) -> None:
        world = World(dialable={(OUTER, 4777)})
        world.settle()
        assert world.kind() is Kind.PUNCHABLE
        world.knowledge.mapped(Mapped(port=4777, protocol="UPnP", host=OUTER))
        world.settle()
        assert world.kind() is Kind.MAPPED
        assert world.knowledge.reachability.sentence == "port 4777 is mapped by UPnP"
        assert world.knowledge.addresses == (world.text(OUTER, 4777), world.text(HOME))
        world.knowledge.mapped(None)
        assert world.text(OUTER, 4777) not in world.knowledge.addresses
        assert world.kind() is Kind.PUNCHABLE

    def test_mapping_is_announced_while_no_peer_can_try_it(self) -> None:
        world = World(peers=[])
        world.knowledge.mapped(Mapped(port=4777, protocol="UPnP", host=OUTER))
        assert world.kind() is Kind.MAPPED
        assert world.knowledge.addresses[0] == world.text(OUTER, 4777)
        world.peers = [A]
        world.tell()
        world.settle()
        assert world.kind() is Kind.PUNCHABLE
        assert world.text(OUTER, 4777) not in world.knowledge.addresses

    def test_mapping_to_a_private_address_is_not_announced(self) -> None:
        world = World(peers=[])
        for host in ("100.64.1.1", ""):
            world.knowledge.mapped(Mapped(port=4777, protocol="UPnP", host=host))
            assert world.kind() is Kind.UNKNOWN
            assert len(world.knowledge.addresses) == 2

    def test_mapping_of_the_listening_port_is_tried_although_that_port_failed_before(self) -> None:
        world = World()
        world.settle()
        world.dialable = {(OUTER, PORT)}
        world.knowledge.mapped(Mapped(port=PORT, protocol="NAT-PMP"))
        world.settle()
        assert world.knowledge.reachability.sentence == "port 4001 is mapped by NAT-PMP"

    def test_mapping_is_tried_by_peers_that_are_not_dialling_already(self) -> None:
        world = World(peers=[A, B, C, D])
        for look in world.knowledge.questions(0.0):
            world.knowledge.heard(0.0, look, OUTER)
        dialled = [q for q in world.knowledge.questions(0.0) if isinstance(q, AskDialBack)]
        for port, mapped in ((PORT, PORT), (PORT, 4777)):
            world.knowledge.mapped(Mapped(port=mapped, protocol="UPnP"))
            again = [q for q in world.knowledge.questions(0.0) if isinstance(q, AskDialBack)]
            assert {q.peer for q in dialled}.isdisjoint(q.peer for q in again)
            assert all(q.port in (port, mapped) for q in again)

    def test_failure_from_before_a_mapping_does_not_count(self) -> None:
        world = World(peers=[A, B])
        for look in world.knowledge.questions(0.0):
            world.knowledge.heard(0.0, look, OUTER)
        before = [q for q in world.knowledge.questions(0.0) if isinstance(q, AskDialBack)]
        world.knowledge.mapped(Mapped(port=PORT, protocol="UPnP"))
        world.dialable = {(OUTER, PORT)}
        assert not [q for q in world.knowledge.questions(1.0) if isinstance(q, AskDialBack)]
        for question in before:
            world.knowledge.heard(5.0, question, False)
        world.now = 5.0
        world.settle()
        assert world.kind() is Kind.MAPPED

    @pytest.mark.parametrize(
        ("world", "sentence"),
        [
            (World(router=keeps), "behind a router that keeps ports; direct connections by hole punching"),
            (
                World(router=shifts),
                "behind a router that gives a port the same outer port for all peers; direct connections by hole"
                " punching",
            ),
            (
                World(peers=[A], router=shifts),  # one server does not tell it from a symmetric one
                "behind a router that changes ports; no relay is known yet",
            ),
            (World(interfaces=[LOOPBACK, OUTER]), "behind a firewall; direct connections by hole punching"),
            (
                World(ports=(), interfaces=[LOOPBACK, OUTER]),
                "without a listener; direct connections by hole punching",
            ),
        ],
        ids=["keeps", "shifts", "changes", "firewall", "no listener"],
    )
    def test_what_keeps_others_from_dialling(self, world: World, sentence: str) -> None:
        world.settle()
        reachability = world.knowledge.reachability
        assert reachability.sentence == sentence
        assert reachability.punchable == ("hole punching" in sentence)
        assert not reachability.dialable
        assert world.knowledge.relays_wanted
        assert world.text(OUTER) not in world.knowledge.addresses

    def test_symmetric_router(self) -> None:
        world = World(router=symmetric)
        world.settle()
        assert world.knowledge.reachability.sentence == "behind a symmetric router; no relay is known yet"
        world.knowledge.relayed_by(["a", "b"], [CIRCUIT])
        reachability = world.knowledge.reachability
        assert reachability.kind is Kind.RELAYED
        assert reachability.sentence == "behind a symmetric router; traffic is relayed by 2 peers"
        assert reachability.relays == ("a", "b")
        assert not reachability.punchable
        assert not reachability.dialable

    def test_announced_addresses_come_first_and_are_not_doubted(self) -> None:
        world = World(announce=("/ip4/198.51.100.7/tcp/80",))
        world.settle()
        assert world.kind() is Kind.ANNOUNCED
        assert world.knowledge.addresses == (f"/ip4/198.51.100.7/tcp/80/p2p/{ME}", world.text(HOME))
        assert not world.knowledge.relays_wanted
        assert {type(question) for question in world.asked} == {AskLook}


class TestVersionsOfIp:
    PEERS = (A, B, Neighbour(peer_id="e", host="2001:db8:2::1"), Neighbour(peer_id="f", host="2001:db8:3::1"))

    def test_working_ipv6_is_announced_and_ipv4_decides(self) -> None:
        world = World(
            peers=list(self.PEERS), interfaces=[LOOPBACK, HOME, V6], outer6=V6, dialable={(V6, PORT)}
        )
        world.settle()
        assert world.kind() is Kind.PUNCHABLE
        assert world.knowledge.reachability.sentence.endswith("; public over IPv6")
        assert world.knowledge.reachability.outer_hosts == (OUTER, V6)
        assert world.knowledge.addresses[0] == world.text(V6)
        assert world.knowledge.relays_wanted

    def test_a_symmetric_router_that_lets_ipv6_through_as_it_is_can_be_punched_over_ipv6(self) -> None:
        world = World(peers=list(self.PEERS), interfaces=[LOOPBACK, HOME, V6], outer6=V6, router=symmetric)
        world.settle()
        reachability = world.knowledge.reachability
        assert reachability.kind is Kind.RELAYED
        assert reachability.sentence.endswith("; direct connections over IPv6 by hole punching")
        assert reachability.outer_hosts == (OUTER, V6)
        assert reachability.punch_hosts == (V6,)

    def test_a_machine_with_ipv6_that_no_peer_sees_can_be_punched_at_its_own_address(self) -> None:
        world = World(interfaces=[LOOPBACK, HOME, V6], source6=V6, router=symmetric)
        world.settle()
        reachability = world.knowledge.reachability
        assert reachability.kind is Kind.RELAYED
        assert reachability.outer_hosts == (OUTER,)
        assert reachability.punch_hosts == (V6,)
        assert world.text(V6) not in world.knowledge.addresses, "no peer has tried it, and a router is there"

    def test_what_peers_see_over_ipv6_counts_more_than_the_machine_s_own_address(self) -> None:
        peers = [replace(peer, port=4001) for peer in self.PEERS]
        world = World(peers=peers, interfaces=[LOOPBACK, HOME, V6], source6=V6, outer6="2001:db8:9::1")
        world.settle()
        assert world.knowledge.reachability.punch_hosts == (OUTER, "2001:db8:9::1")

    def test_a_public_machine_announces_ipv6_that_no_peer_has_tried(self) -> None:
        world = World(interfaces=[LOOPBACK, OUTER, V6], source6=V6, dialable={(OUTER, PORT)})
        world.settle()
        assert world.text(V6) in world.knowledge.addresses

    def test_closed_ipv6_does_not_spoil_working_ipv4(self) -> None:
        world = World(
            peers=list(self.PEERS), interfaces=[LOOPBACK, HOME, V6], outer6=V6, dialable={(OUTER, PORT)}
        )
        world.settle()
        assert world.kind() is Kind.PUBLIC
        assert world.text(V6) not in world.knowledge.addresses
        assert not world.knowledge.relays_wanted

    def test_ipv6_alone(self) -> None:
        world = World(peers=list(self.PEERS[2:]), interfaces=[V6], outer6=V6, dialable={(V6, PORT)})
        world.settle()
        assert world.kind() is Kind.PUBLIC


class TestAddressesAndRelays:
    @pytest.mark.parametrize("interface", [HOME, OUTER])
    def test_relays_are_wanted_as_soon_as_a_router_is_seen(self, interface: str) -> None:
        world = World(interfaces=[LOOPBACK, interface])
        look = next(q for q in world.knowledge.questions(0.0) if isinstance(q, AskLook))
        world.knowledge.heard(0.0, look, OUTER)
        behind_router = interface == HOME
        assert world.knowledge.relays_wanted == world.knowledge.behind_router == behind_router
        assert world.knowledge.reachability.dialable != behind_router
        assert world.knowledge.reachability.sentence.startswith(NOT_KNOWN_YET)

    def test_circuits_come_last_and_keep_their_places(self) -> None:
        world = World(interfaces=[LOOPBACK, *(f"10.0.{number}.1" for number in range(9))])
        world.settle()
        world.knowledge.relayed_by(["a"], [CIRCUIT])
        assert len(world.knowledge.addresses) == 5
        assert world.knowledge.addresses[-1] == CIRCUIT

    def test_public_address_stays_announced_while_no_peer_dials_back(self) -> None:
        world = World(interfaces=[LOOPBACK, OUTER])
        refuse = lambda question: None if isinstance(question, AskDialBack) else world.truth(question)  # noqa: E731
        world.lies = dict.fromkeys("abc", refuse)
        world.wait(300.0)
        assert world.knowledge.addresses == (world.text(OUTER),)
        assert world.kind() is Kind.UNKNOWN

    def test_router_counts_as_closed_if_no_peer_dials_back(self) -> None:
        world = World()
        refuse = lambda question: None if isinstance(question, AskDialBack) else world.truth(question)  # noqa: E731
        world.lies = dict.fromkeys("abc", refuse)
        world.settle()
        assert world.kind() is Kind.PUNCHABLE


class TestLies:
    def test_one_network_of_liars_does_not_change_the_outer_host(self) -> None:
        liars = [Neighbour(peer_id=f"liar {number}", host=f"9.9.9.{number}") for number in range(1, 6)]
        world = World(peers=[*liars, A, B], dialable={(OUTER, PORT)})

        def lie(question: Question) -> Answer:
            return "8.8.8.8" if isinstance(question, AskLook) else True

        world.lies = {liar.peer_id: lie for liar in liars}
        world.wait(60.0)
        assert world.knowledge.reachability.outer_hosts == (OUTER,)
        assert "8.8.8.8" not in " ".join(world.knowledge.addresses)

    def test_one_network_of_liars_does_not_close_a_working_port(self) -> None:
        world = World(peers=[D, A], dialable={(OUTER, PORT)})
        world.lies["d"] = lambda question: (
            False if isinstance(question, AskDialBack) else world.truth(question)
        )
        world.wait(1000.0)
        assert world.kind() is Kind.PUBLIC

    def test_liars_do_not_close_a_public_port_at_which_others_arrive(self) -> None:
        world = World(interfaces=[LOOPBACK, OUTER], peers=[A, B])
        world.lies = dict.fromkeys("ab", lambda q: OUTER if isinstance(q, AskLook) else False)
        world.settle()
        assert not world.knowledge.reachability.dialable
        arrived = [
            Neighbour(peer_id=f"new {number}", host=f"7.{number}.0.1", arrived=True) for number in (1, 2)
        ]
        world.peers = [A, B, *arrived]
        world.tell()
        assert world.kind() is Kind.PUBLIC
        assert world.knowledge.addresses == (world.text(OUTER),)

    def test_arrivals_say_nothing_about_the_ports_of_a_router(self) -> None:
        world = World(peers=[A, Neighbour(peer_id="new", host="7.1.0.1", arrived=True)])
        world.settle()
        assert not world.knowledge.reachability.dialable

    def test_arrivals_from_the_local_network_say_nothing_about_a_firewall(self) -> None:
        near = Neighbour(peer_id="near", host="10.0.0.7", arrived=True)
        world = World(interfaces=[LOOPBACK, OUTER, "10.0.0.2"], peers=[A, near])
        world.lies["near"] = lambda _: "10.0.0.2"
        world.settle()
        assert not world.knowledge.reachability.dialable

    @pytest.mark.parametrize("router", [keeps, shifts])
    def test_one_lying_server_does_not_decide_about_a_router(
        self, router: Callable[[Neighbour, int], int]
    ) -> None:
        world = World(peers=[D, A, B], router=router)

        def lie(question: Question) -> Answer:
            if isinstance(question, AskWhoami):
                return Probe(question.peer.host, question.local_port or 50000, 7, world.now)
            return world.truth(question)

        world.lies["d"] = lie
        world.settle()
        assert world.knowledge.reachability.punchable

    def test_senseless_hosts_are_ignored(self) -> None:
        for host in ("127.0.0.1", "0.0.0.0", "224.0.0.1", "172.17.0.1", "no host", ""):
            world = World(peers=[D])
            world.lies["d"] = lambda question, host=host: host if isinstance(question, AskLook) else None  # type: ignore[misc]
            world.settle()
            assert world.knowledge.reachability.outer_hosts == ()


class TestQuestions:
    def test_only_a_few_peers_are_asked_and_of_different_networks_first(self) -> None:
        crowd = [Neighbour(peer_id=f"crowd {number}", host=f"9.9.9.{number}") for number in range(1, 200)]
        world = World(peers=[*crowd, A, B, C])
        looks = [q.peer for q in world.knowledge.questions(0.0) if isinstance(q, AskLook)]
        assert len(looks) == MAX_OBSERVERS
        assert {A, B, C} <= set(looks)

    def test_peer_with_several_connections_is_asked_once(self) -> None:
        again = Neighbour(peer_id=A.peer_id, host=A.host)  # this connection is one that the peer has made
        for peers in ([A, again], [again, A]):
            world = World(peers=peers, router=symmetric)
            looks = [question for question in world.knowledge.questions(0.0) if isinstance(question, AskLook)]
            assert len(looks) == 1
            world.knowledge.heard(0.0, looks[0], OUTER)
            assert any(isinstance(question, AskWhoami) for question in world.knowledge.questions(0.0))

    def test_a_peer_is_asked_for_one_dial_back_at_a_time(self) -> None:
        world = World(peers=[A], ports=(PORT, 4002))
        for look in world.knowledge.questions(0.0):
            world.knowledge.heard(0.0, look, OUTER)
        (first,) = [q for q in world.knowledge.questions(0.0) if isinstance(q, AskDialBack)]
        world.knowledge.heard(0.0, first, False)
        (second,) = [q for q in world.knowledge.questions(0.0) if isinstance(q, AskDialBack)]
        assert (first.port, second.port) == (PORT, 4002)

    def test_open_questions_are_not_asked_again(self) -> None:
        world = World()
        assert world.knowledge.questions(0.0)
        assert not world.knowledge.questions(1000.0)

    def test_peers_behind_the_same_router_are_not_asked_to_dial_back(self) -> None:
        neighbour = Neighbour(peer_id="n", host=OUTER, port=4002)
        world = World(peers=[neighbour, A])
        world.settle()
        assert {q.peer for q in world.asked if isinstance(q, AskDialBack)} == {A}

    def test_another_peer_dials_back_if_the_first_ones_refuse(self) -> None:
        world = World(peers=[A, B, C, D], dialable={(OUTER, PORT)})
        for name in "ab":
            world.lies[name] = lambda q: None if isinstance(q, AskDialBack) else world.truth(q)
        world.settle()
        assert world.kind() is Kind.PUBLIC

    def test_all_servers_are_probed_from_one_port(self) -> None:
        world = World(router=symmetric)
        world.settle()
        ports = [q.local_port for q in world.asked if isinstance(q, AskWhoami)]
        assert ports == [None, 50000, 50000]

    def test_a_port_that_is_opened_later_is_found(self) -> None:
        world = World()
        world.settle()
        assert not world.knowledge.reachability.dialable
        world.dialable = {(OUTER, PORT)}
        world.wait(150.0)
        assert world.kind() is Kind.PUBLIC

    def test_a_port_that_is_closed_later_is_noticed(self) -> None:
        world = World(dialable={(OUTER, PORT)})
        world.settle()
        world.dialable = set()
        world.wait(400.0)
        assert world.kind() is Kind.PUNCHABLE
        assert world.text(OUTER) not in world.knowledge.addresses


class TestChanges:
    def test_move_to_another_network_resets_what_was_learned(self) -> None:
        world = World(dialable={(OUTER, PORT)})
        world.settle()
        before = world.knowledge.network
        world.interfaces = [LOOPBACK, "10.7.0.9"]
        world.outer, world.dialable, world.router = "8.7.6.5", set(), symmetric
        world.tell()
        assert world.knowledge.network != before
        assert world.kind() is Kind.UNKNOWN
        assert world.knowledge.addresses == (world.text("10.7.0.9"), world.text(LOOPBACK))
        world.settle()
        assert world.knowledge.reachability.outer_hosts == ("8.7.6.5",)
        assert world.kind() is Kind.RELAYED

    def test_answer_from_before_the_move_is_ignored(self) -> None:
        world = World(peers=[A])
        (old,) = world.knowledge.questions(0.0)
        world.interfaces = [LOOPBACK, "10.7.0.9"]
        world.tell()
        (new,) = world.knowledge.questions(0.0)
        world.knowledge.heard(0.0, old, OUTER)
        assert not world.knowledge.behind_router
        world.knowledge.heard(0.0, new, OUTER)
        assert world.knowledge.reachability.outer_hosts == (OUTER,)

    def test_new_outer_address_is_noticed_within_thirty_seconds(self) -> None:
        world = World(dialable={(OUTER, PORT)})
        world.settle()
        world.outer, world.dialable = "8.7.6.5", {("8.7.6.5", PORT)}
        world.wait(20.0)
        assert world.knowledge.reachability.outer_hosts == ("8.7.6.5",)
        assert world.text("8.7.6.5") in world.knowledge.addresses
        assert world.text(OUTER) not in world.knowledge.addresses

    def test_all_peers_are_asked_again_when_one_sees_another_address(self) -> None:
        world = World(peers=[A, B])
        world.settle()
        first, second = [q for q in world.knowledge.questions(20.0) if isinstance(q, AskLook)]
        world.knowledge.heard(20.0, first, OUTER)
        assert not world.knowledge.questions(20.0)
        world.knowledge.heard(20.0, second, "8.7.6.5")
        assert first in world.knowledge.questions(20.0)

    def test_one_new_observation_outweighs_connections_that_died(self) -> None:
        world = World(peers=[A, B, C])
        world.settle()
        world.outer = "8.7.6.5"
        world.peers = [A, B, C, D]
        world.tell()
        world.lies = {name: lambda _: None for name in "abc"}
        world.wait(20.0)
        assert world.knowledge.reachability.outer_hosts == ("8.7.6.5",)

    def test_lost_connections_alone_change_nothing(self) -> None:
        world = World(dialable={(OUTER, PORT)})
        world.settle()
        before = world.knowledge.addresses
        world.peers = []
        world.tell()
        world.wait(30.0)
        assert world.knowledge.addresses == before
        assert world.kind() is Kind.PUBLIC

    def test_an_added_interface_forgets_nothing(self) -> None:
        world = World(dialable={(OUTER, PORT)})
        world.settle()
        before = world.knowledge.network
        world.interfaces = [*world.interfaces, "172.17.0.1"]
        world.tell()
        assert world.kind() is Kind.PUBLIC
        assert world.knowledge.network == before


# Votes on endpoints: which are enough, and when they are replaced.

ENDPOINT = ("203.0.113.1", 4001)


def verdict(votes: DialBacks, *, routed: bool = True) -> bool | None:
    return votes.verdict(ENDPOINT, others=True, routed=routed)


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
