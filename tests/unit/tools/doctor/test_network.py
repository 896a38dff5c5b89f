"""Ports, addresses, clocks, versions and reachability: the level and the cause for each set of facts."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.runs.records.hello import HelloAnswer, PeerHello
from p2pavg.tools.doctor.findings import Finding, Level
from p2pavg.tools.doctor.rules.network import (
    Dialled,
    DialOutcome,
    NetworkReach,
    Port,
    PortState,
    is_outside,
    judge_bootstrap,
    judge_clock,
    judge_ports,
    judge_reach,
    judge_versions,
)
from p2pavg_dht import Ed25519Signer

PEER = Ed25519Signer(b"p" * 32).peer_id
OTHER = Ed25519Signer(b"o" * 32).peer_id
OWN_HOSTS = frozenset({"127.0.0.1", "192.168.1.2"})
OUTER = ("203.0.113.1",)


def dialled(answer: DialOutcome, **changes: Any) -> Dialled:
    facts: dict[str, Any] = {
        "address": "/dns4/peer.example/tcp/4001/p2p/P",
        "host": "peer.example",
        "port": 4001,
        "peer_id": PEER,
        "answer": answer,
    }
    return Dialled(**(facts | changes))


def port(state: PortState, **changes: Any) -> Port:
    facts: dict[str, Any] = {"address": "/ip4/0.0.0.0/tcp/80", "port": 80, "state": state}
    return Port(**(facts | changes))


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in findings}


class TestPorts:
    @pytest.mark.parametrize(
        ("found", "cause"),
        [
            (port(PortState.TAKEN, owner="nginx (process 812)"), "port 80 is in use by nginx (process 812)"),
            (port(PortState.TAKEN), "which the system does not name to this user"),
            (port(PortState.FORBIDDEN), "does not let this user listen on port 80"),
            (port(PortState.NO_SUCH_HOST), "no interface of this machine has that address"),
            (port(PortState.FAILED, error="Invalid argument"), "Invalid argument"),
        ],
    )
    def test_faults(self, found: Port, cause: str) -> None:
        (finding,) = judge_ports([found])
        assert finding.level is Level.FAULT
        assert cause in finding.cause

    def test_no_faults(self) -> None:
        found = judge_ports([port(PortState.FREE), port(PortState.TAKEN, is_this_peer=True)])
        assert [each.level for each in found] == [Level.OK, Level.OK]
        assert [each.level for each in judge_ports([])] == [Level.NOTE]


class TestBootstrap:
    @pytest.mark.parametrize(
        ("answer", "detail", "cause"),
        [
            (DialOutcome.NAME_UNKNOWN, "", "the name peer.example is unknown"),
            (DialOutcome.NO_NAME_SERVER, "", "no name server answers"),
            (DialOutcome.NO_ROUTE, "", "no route leads from this machine to peer.example"),
            (DialOutcome.FORBIDDEN, "", "this machine's own firewall forbids connections"),
            (DialOutcome.REFUSED, "", "no process listens there, or the port is wrong"),
            (DialOutcome.TIMED_OUT, "", "a firewall or router drops the connection, or the machine is off"),
            (DialOutcome.OTHER_SERVICE, "SSH-2.0", "is the port of another service, which says 'SSH-2.0'"),
            (DialOutcome.OTHER_SERVICE, "", "port 4001 of peer.example is the port of another service"),
            (DialOutcome.SILENT, "", "accepts connections to peer.example port 4001 and says nothing"),
            (DialOutcome.CLOSED, "", "closes it at once"),
            (DialOutcome.OTHER_PEER, OTHER, f"another peer is there: {OTHER}, not {PEER}"),
            (DialOutcome.NOT_BEHIND, "no reservation", f"leads to no peer {PEER}: no reservation"),
            (DialOutcome.FAILED, "a strange error", "a strange error"),
            (DialOutcome.FAILED, "", "dialling failed without a reason"),
        ],
    )
    def test_each_answer_has_its_cause(self, answer: DialOutcome, detail: str, cause: str) -> None:
        (found,) = judge_bootstrap([dialled(answer, detail=detail)])
        assert found.level is Level.FAULT
        assert cause in found.cause

    def test_beside_an_address_that_is_reached_others_are_warnings(self) -> None:
        found = judge_bootstrap(
            [dialled(DialOutcome.REFUSED), dialled(DialOutcome.REACHED), dialled(DialOutcome.OWN)]
        )
        assert [each.level for each in found] == [Level.WARNING, Level.OK, Level.NOTE]
        assert [each.level for each in judge_bootstrap([])] == [Level.NOTE]


class TestAnswers:
    @staticmethod
    def heard(*ahead: float, protocols: tuple[str, ...] = ()) -> list[HelloAnswer]:
        return [HelloAnswer(PeerHello(clock=0.0, protocols=protocols, runs=0), each) for each in ahead]

    def test_a_clock_that_is_off(self) -> None:
        (found,) = judge_clock(self.heard(600.0, 601.0, 0.0))
        assert (found.level, found.cause) == (Level.FAULT, "your clock is 600 s behind 2 of 3 peers")

    def test_a_clock_that_most_peers_agree_with(self) -> None:
        assert [each.level for each in judge_clock(self.heard(0.0, 1.0))] == [Level.OK]
        assert [each.level for each in judge_clock(self.heard(0.0, 0.0, -600.0))] == [Level.NOTE]
        for none in ((), None):
            assert [each.what for each in judge_clock(none)] == ["not known"]

    def test_other_versions(self) -> None:
        mine = ("/p2pavg/match/5",)
        (found,) = judge_versions(mine, self.heard(0.0, protocols=("/p2pavg/match/6",)))
        assert (found.level, found.cause) == (Level.FAULT, "1 peer speaks match/6, this one match/5")
        assert [each.level for each in judge_versions(mine, self.heard(0.0, protocols=mine))] == [Level.OK]
        assert [each.what for each in judge_versions(mine, None)] == ["not known"]


class TestReach:
    @staticmethod
    def reach(kind: str, *hosts: str, sentence: str = "a sentence") -> NetworkReach:
        return NetworkReach(kind=kind, sentence=sentence, outer_hosts=hosts)

    @pytest.mark.parametrize("kind", ["public", "mapped", "announced"])
    def test_peers_that_can_be_dialled(self, kind: str) -> None:
        for hosts in (("192.168.1.2",), OUTER):
            found = judge_reach(self.reach(kind, *hosts), OWN_HOSTS, 4001, listens=True)
            assert {each.level for each in found} <= {Level.OK, Level.NOTE}
            assert by_name(found)["firewall"].what == "others can dial this peer"

    def test_a_firewall_without_a_router(self) -> None:
        found = by_name(judge_reach(self.reach("punchable", "192.168.1.2"), OWN_HOSTS, 4001, listens=True))
        assert found["firewall"].level is Level.WARNING
        assert found["firewall"].cause == (
            "no router translates addresses, so a firewall drops inbound connections to port 4001"
        )
        assert found["router"].level is Level.OK

    @pytest.mark.parametrize(
        ("kind", "own", "level", "cause"),
        [
            ("punchable", OWN_HOSTS, Level.NOTE, "a router is in between"),
            ("relayed", OWN_HOSTS, Level.WARNING, "a router is in between"),
            (
                "relayed",
                OWN_HOSTS | {"100.64.3.4"},
                Level.WARNING,
                "the provider's router is in between too (CGNAT)",
            ),
        ],
        ids=["keeps ports", "symmetric", "of the provider"],
    )
    def test_a_router(self, kind: str, own: frozenset[str], level: Level, cause: str) -> None:
        found = by_name(judge_reach(self.reach(kind, *OUTER), own, 4001, listens=True))
        assert found["outer address"].what == "others see this machine at 203.0.113.1"
        assert (found["router"].level, found["router"].what) == (level, "a sentence")
        assert found["router"].cause.startswith(cause)
        assert "forward the port" in found["router"].remedy
        assert "a router is in between" in found["firewall"].cause
        assert "no UPnP and no NAT-PMP" in found["port mapping"].cause

    def test_nothing_is_known_without_an_answer_or_a_listener(self) -> None:
        for reach, listens, cause in (
            (None, True, "no peer in another network"),
            (
                self.reach("unknown", sentence="not known yet: other peers are asked"),
                True,
                "other peers are asked",
            ),
            (self.reach("public", *OUTER), False, "could not be listened on"),
        ):
            found = judge_reach(reach, OWN_HOSTS, 4001, listens=listens)
            assert [each.name for each in found] == ["outer address", "firewall", "router", "port mapping"]
            assert {each.what for each in found} == {"not known"}
            assert all(cause in each.cause for each in found)

    @pytest.mark.parametrize(
        ("host", "outside"),
        [
            ("127.0.0.1", False),
            ("::1", False),
            ("192.168.1.2", False),
            ("192.168.1.3", True),
            ("a.example", True),
        ],
    )
    def test_peers_on_other_machines(self, host: str, outside: bool) -> None:
        assert is_outside(host, OWN_HOSTS) is outside
