"""Reachability with untrusted input: decoders, and knowledge under any sequence of events and lies."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.nat.reach.facts import Mapped, Neighbour
from p2pavg.net.nat.reach.knowledge import AskDialBack, AskLook, AskWhoami, Knowledge
from p2pavg.net.nat.reach.reachability import Probe
from p2pavg.net.nat.reach.service import (
    MAX_REASON_CHARS,
    NONCE_BYTES,
    DialBackOutcome,
    DialledBack,
    Observed,
    read_dialled_back,
)
from p2pavg.net.nat.reach.whoami import ANSWER_BYTES, encode_answer, read_answer

NONCE = bytes(range(NONCE_BYTES))

ports = st.integers(1, 65535)
hosts = (
    (st.ip_addresses(v=4) | st.ip_addresses(v=6))
    .filter(lambda host: not host.is_unspecified and getattr(host, "ipv4_mapped", None) is None)
    .map(str)
)
nonces = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES)
reasons = st.text(max_size=MAX_REASON_CHARS).filter(lambda text: text.isprintable())


class TestDecoders:
    @given(
        st.builds(Observed, hosts, ports),
        st.builds(DialledBack, nonces, st.sampled_from(DialBackOutcome), reasons),
    )
    def test_answers_come_back(self, observed: Observed, dialled: DialledBack) -> None:
        assert Observed.decode(observed.encode()) == observed
        assert read_dialled_back(dialled.encode(), dialled.nonce) == dialled

    @given(hosts, ports)
    def test_whoami_answers_come_back(self, host: str, port: int) -> None:
        assert read_answer(encode_answer(NONCE, host, port), NONCE) == (host, port)

    @given(st.binary(min_size=ANSWER_BYTES - NONCE_BYTES, max_size=ANSWER_BYTES - NONCE_BYTES) | st.binary())
    def test_any_whoami_answer_is_valid_or_an_error(self, rest: bytes) -> None:
        try:
            host, port = read_answer(NONCE + rest, NONCE)
        except RemoteProtocolError:
            return
        assert encode_answer(NONCE, host, port) == NONCE + rest

    @given(st.binary())
    def test_whoami_answers_to_another_probe_are_refused(self, answer: bytes) -> None:
        if not answer.startswith(NONCE):
            with pytest.raises(RemoteProtocolError):
                read_answer(answer, NONCE)


PEERS = [
    Neighbour(peer_id=str(number), host=host, port=port)
    for number, (host, port) in enumerate(
        [
            ("198.51.100.1", 4001),
            ("198.51.100.2", 0),
            ("192.0.2.2", 4001),
            ("5.0.0.3", 4001),
            ("203.0.113.1", 4001),
            ("192.168.1.9", 0),
            ("127.0.0.1", 4001),
            ("2001:db8:1::1", 4001),
            ("2001:db8:2::1", 0),
        ]
    )
]
MACHINES = [
    ["127.0.0.1", "192.168.1.2"],
    ["127.0.0.1", "10.0.0.7", "2001:db8:9::1"],
    ["203.0.113.1"],
    ["::1", "127.0.0.1"],
    [],
]
SEEN = [
    "203.0.113.1",
    "203.0.113.2",
    "192.168.1.2",
    "10.0.0.7",
    "2001:db8:9::1",
    "127.0.0.1",
    "x",
    "224.0.0.1",
]
CIRCUIT = "/ip4/198.51.100.1/tcp/4001/p2p/0/p2p-circuit/p2p/me"

events = st.one_of(
    st.tuples(st.just("machine"), st.sampled_from(MACHINES), st.booleans()),
    st.tuples(st.just("connected"), st.lists(st.sampled_from(PEERS), unique=True)),
    st.tuples(st.just("mapped"), st.none() | st.builds(Mapped, port=ports, protocol=st.just("UPnP"))),
    st.tuples(st.just("relays"), st.booleans()),
    st.tuples(st.just("wait"), st.floats(0.0, 700.0)),
    st.tuples(st.just("ask")),
    st.tuples(
        st.just("answer"), st.integers(0, 20), st.sampled_from(SEEN), st.booleans(), ports, st.booleans()
    ),
)


class TestKnowledge:
    @given(st.lists(events, max_size=60))
    def test_any_events_and_answers_leave_a_sensible_state(self, history: list[Any]) -> None:
        knowledge, now = Knowledge("me"), 0.0
        waiting: list[Any] = []
        told: set[str] = set()
        dialled: set[tuple[str, int]] = set()
        for kind, *given_ in history:
            if kind == "machine":
                interfaces, listens = given_
                knowledge.machine(interfaces, [(host, 4001) for host in interfaces] if listens else [])
                told |= {f"{host}/tcp/4001" for host in interfaces}
            elif kind == "connected":
                knowledge.connected(given_[0])
            elif kind == "mapped":
                knowledge.mapped(given_[0])
            elif kind == "relays":
                knowledge.relayed_by(["0"] if given_[0] else [], [CIRCUIT] if given_[0] else [])
            elif kind == "wait":
                now += given_[0]
            elif kind == "ask":
                asked = knowledge.questions(now)
                assert len(set(asked)) == len(asked) <= 40
                assert all(not ipaddress.ip_address(question.peer.host).is_loopback for question in asked)
                waiting += asked
            elif waiting:
                place, host, works, port, silent = given_
                question = waiting.pop(place % len(waiting))
                answer: Any = None
                if silent:
                    pass
                elif isinstance(question, AskLook):
                    answer = host
                elif isinstance(question, AskDialBack):
                    answer = works
                    if works:
                        dialled.add((question.host, question.port))
                else:
                    assert isinstance(question, AskWhoami)
                    answer = Probe(question.peer.host, question.local_port or 50000, port, now)
                knowledge.heard(now, question, answer)
            self.check(knowledge, told | {f"{host}/tcp/{port}" for host, port in dialled})

    def check(self, knowledge: Knowledge, allowed: set[str]) -> None:
        found, addresses = knowledge.reachability, knowledge.addresses
        assert found.sentence
        assert not (found.dialable and found.punchable)
        assert all(found.outer_hosts.count(host) == 1 for host in found.outer_hosts)
        assert len(found.outer_hosts) <= 4
        assert len(set(addresses)) == len(addresses)
        for text in addresses:
            if text != CIRCUIT:
                assert text.endswith("/p2p/me")
                assert text.removesuffix("/p2p/me").split("/", 2)[2] in allowed
        if CIRCUIT in addresses:
            assert addresses[-1] == CIRCUIT

    @given(
        st.lists(st.sampled_from(["9.9.9.1", "9.9.9.2", "9.9.9.3", "9.9.9.4"]), min_size=1, max_size=6),
        st.permutations([0, 1, 2]),
    )
    def test_peers_of_one_network_among_three_never_name_the_outer_host(
        self, lies: list[str], order: list[int]
    ) -> None:
        knowledge = Knowledge("me")
        knowledge.machine(["192.168.1.2"], [("192.168.1.2", 4001)])
        honest = [PEERS[0], PEERS[2]]
        liars = [
            Neighbour(peer_id=f"liar {number}", host=f"7.7.7.{number + 1}") for number in range(len(lies))
        ]
        groups = [honest[:1], honest[1:], liars]
        knowledge.connected([peer for place in order for peer in groups[place]])
        said = dict(zip((liar.peer_id for liar in liars), lies, strict=True))
        for _ in range(5):
            for question in knowledge.questions(0.0):
                if isinstance(question, AskLook):
                    knowledge.heard(0.0, question, said.get(question.peer.peer_id, "203.0.113.1"))
        assert knowledge.reachability.outer_hosts == ("203.0.113.1",)
