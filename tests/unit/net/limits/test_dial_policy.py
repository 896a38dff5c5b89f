"""The policy for addresses that other peers name, and the budget of failed dials."""

import errno
import ipaddress
import socket

import pytest
from trio.testing import MockClock

from p2pavg.base.errors import UnreachableError
from p2pavg.net.limits import dial_gate
from p2pavg.net.limits.admission import Acquaintances
from p2pavg.net.limits.dial_gate import DialGate, own_networks
from p2pavg.net.limits.dial_policy import (
    ALL_FAILURES,
    HOST_FAILURES,
    HOST_FAILURES_PER_SECOND,
    PEER_FAILURES,
    PREFIX_FACTOR,
    DialBudget,
    DialPolicy,
)
from p2pavg.net.limits.rate import MAX_ACCOUNTS
from p2pavg_dht import Ed25519Signer

PEER = Ed25519Signer(bytes(31) + b"1").peer_id
OTHER = Ed25519Signer(bytes(31) + b"2").peer_id

PUBLIC = ["8.8.8.8", "203.0.113.7", "198.51.100.7", "192.0.2.7", "2001:db8::1", "2606:4700::1111"]
LOOPBACK = ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"]
PRIVATE = [
    "10.1.2.3",
    "172.16.0.1",
    "172.31.255.1",
    "192.168.1.1",
    "100.64.0.1",
    "fd00::1",
    "::ffff:10.0.0.1",
]
NEVER = [
    "0.0.0.0",
    "::",
    "0.1.2.3",
    "169.254.169.254",
    "fe80::1",
    "fe80::1%eth0",
    "224.0.0.1",
    "255.255.255.255",
    "240.0.0.1",
    "ff02::1",
    "64:ff9b::7f00:1",
    "2002:7f00:1::1",
    "2001:0:1::1",
    "::127.0.0.1",
    "::ffff:169.254.169.254",
]


class TestPolicy:
    @pytest.mark.parametrize("host", PUBLIC)
    def test_public_addresses_are_dialled(self, host: str) -> None:
        assert DialPolicy().refusal(host) == ""

    @pytest.mark.parametrize("host", LOOPBACK + PRIVATE + NEVER)
    def test_private_addresses_are_not_dialled(self, host: str) -> None:
        assert DialPolicy().refusal(host) != ""

    @pytest.mark.parametrize("host", ["example.org", "", "1.2.3", "2130706433", "0x7f.1"])
    def test_names_are_not_dialled(self, host: str) -> None:
        assert "not looked up" in DialPolicy().refusal(host)

    @pytest.mark.parametrize("host", NEVER)
    def test_link_local_addresses_are_never_dialled(self, host: str) -> None:
        policy = DialPolicy([ipaddress.ip_network("169.254.0.0/16"), ipaddress.ip_network("fe80::/64")])
        policy.trust_address("127.0.0.1")
        policy.trust_address("169.254.169.254")
        assert policy.refusal(host) != ""

    def test_a_private_address_is_dialled_in_its_own_subnet_only(self) -> None:
        policy = DialPolicy([ipaddress.ip_network("192.168.1.0/24"), ipaddress.ip_network("fd00:1::/64")])
        assert policy.refusal("192.168.1.77") == ""
        assert policy.refusal("fd00:1::77") == ""
        assert policy.refusal("192.168.2.77") != ""
        assert policy.refusal("10.0.0.1") != ""
        assert policy.refusal("fd00:2::77") != ""

    def test_an_address_of_the_user_allows_its_network(self) -> None:
        policy = DialPolicy()
        policy.trust_address("10.7.0.1")
        policy.trust_address("example.org")
        assert policy.refusal("10.7.200.1") == ""
        assert policy.refusal("10.8.0.1") != ""
        assert policy.refusal("127.0.0.1") != ""
        policy.trust_address("127.0.0.1")
        assert policy.refusal("127.9.9.9") == ""

    def test_a_peer_may_name_the_host_from_which_it_came(self) -> None:
        assert DialPolicy().refusal("10.1.2.3", met_there=True) == ""


class TestBudget:
    def fail(
        self, budget: DialBudget, host: str, now: float = 0.0, *, met: str = "", most: int = 10_000
    ) -> int:
        """Return the number of dials that are made if each one fails."""
        for count in range(most):
            if not budget.may_begin(now, host, met):
                return count
            budget.begin(host, met)
            budget.end(now, host, met, failed=True)
        return most

    def test_failures_at_one_host_are_few(self) -> None:
        budget = DialBudget()
        assert self.fail(budget, "203.0.113.7") == HOST_FAILURES
        assert budget.may_begin(0.0, "203.0.113.7") is False
        assert self.fail(budget, "203.0.113.7", 60.0) == HOST_FAILURES
        assert self.fail(budget, "203.0.113.7", 60.0 + 2.0 / HOST_FAILURES_PER_SECOND) == 2

    def test_failures_in_one_network_are_few(self) -> None:
        budget = DialBudget()
        assert (
            sum(self.fail(budget, f"203.0.113.{number}") for number in range(100))
            == PREFIX_FACTOR * HOST_FAILURES
        )

    def test_failures_are_few_in_all(self) -> None:
        budget = DialBudget()
        total = sum(self.fail(budget, f"203.{number % 250}.{number // 250}.1") for number in range(1000))
        assert total == ALL_FAILURES

    def test_successful_dials_are_unlimited(self) -> None:
        budget = DialBudget()
        for _ in range(1000):
            assert budget.may_begin(0.0, "127.0.0.1")
            budget.begin("127.0.0.1")
            budget.end(0.0, "127.0.0.1", failed=False)

    def test_few_dials_are_under_way_at_once(self) -> None:
        budget = DialBudget()
        for _ in range(HOST_FAILURES):
            assert budget.may_begin(0.0, "203.0.113.7")
            budget.begin("203.0.113.7")
        assert budget.may_begin(0.0, "203.0.113.7") is None, "the dial must wait for one of them"
        budget.end(0.0, "203.0.113.7", failed=False)
        assert budget.may_begin(0.0, "203.0.113.7")

    def test_failures_of_invented_peers_do_not_block_known_peers(self) -> None:
        budget = DialBudget()
        self.fail(budget, "203.0.113.7")
        assert budget.may_begin(0.0, "203.0.113.7", "friend")
        assert self.fail(budget, "203.0.113.7", met="friend") == PEER_FAILURES


def address(host: str, peer_id: str = PEER) -> str:
    kind = "dns4" if host[0].isalpha() else "ip6" if ":" in host else "ip4"
    return f"/{kind}/{host}/tcp/4001/p2p/{peer_id}"


class TestGate:
    def gate(self) -> tuple[DialGate, Acquaintances]:
        """Make the gate of a process that has met a peer already."""
        known = Acquaintances()
        known.met(OTHER, "203.0.113.9")
        return DialGate(known), known

    async def test_addresses_before_the_first_connection_are_the_users(
        self, autojump_clock: MockClock
    ) -> None:
        gate = DialGate(Acquaintances())
        assert await gate.candidates(PEER, address("127.0.0.1"))

    async def test_addresses_of_strangers_are_refused_but_not_the_users(
        self, autojump_clock: MockClock
    ) -> None:
        gate, _ = self.gate()
        for host in ("127.0.0.1", "169.254.169.254", "example"):
            with pytest.raises(UnreachableError, match="is not dialled"):
                await gate.candidates(PEER, address(host))
        gate.trust_address(address("169.254.169.254"))
        assert await gate.candidates(PEER, address("169.254.169.254"))

    async def test_a_peer_is_dialled_where_it_was_met(self, autojump_clock: MockClock) -> None:
        gate, known = self.gate()
        known.met(PEER, "127.0.0.1")
        assert await gate.candidates(PEER, address("127.0.0.1"))
        with pytest.raises(UnreachableError):
            await gate.candidates(OTHER, address("127.0.0.1", OTHER))

    async def test_interfaces_are_listed_again_after_a_while(
        self, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate, _ = self.gate()
        networks: list[ipaddress.IPv4Network] = []
        monkeypatch.setattr(dial_gate, "own_networks", lambda: networks)
        with pytest.raises(UnreachableError):
            await gate.candidates(PEER, address("10.0.0.1"))
        networks.append(ipaddress.IPv4Network("10.0.0.0/24"))
        gate._interfaces_until = 0.0
        assert await gate.candidates(PEER, address("10.0.0.1"))

    async def test_a_machine_without_a_file_to_open_keeps_the_known_interfaces(
        self, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> list[ipaddress.IPv4Network]:
            raise OSError(errno.EMFILE, "Too many open files")

        gate, _ = self.gate()
        monkeypatch.setattr(dial_gate, "own_networks", lambda: [ipaddress.IPv4Network("10.0.0.0/24")])
        assert await gate.candidates(PEER, address("10.0.0.1"))
        monkeypatch.setattr(dial_gate, "own_networks", fail)
        gate._interfaces_until = 0.0
        assert await gate.candidates(PEER, address("10.0.0.1"))
        assert "cannot look at this machine's networks: Too many open files" in caplog.text

    async def test_too_many_failures_at_a_host_are_reported(self, autojump_clock: MockClock) -> None:
        gate, _ = self.gate()
        text = address("203.0.113.7")
        (found,) = await gate.candidates(PEER, text)

        async def fail() -> None:
            async with gate.dialling(PEER, text, found):
                raise ConnectionRefusedError

        for _ in range(HOST_FAILURES):
            with pytest.raises(ConnectionRefusedError):
                await fail()
        with pytest.raises(UnreachableError, match="too many dials have failed"):
            await fail()
        gate.trust_address(text)
        with pytest.raises(ConnectionRefusedError):
            await fail()


def test_own_networks_are_without_loopback() -> None:
    assert not [network for network in own_networks() if network.is_loopback]
    assert socket.has_ipv6 or all(network.version == 4 for network in own_networks())


def test_queries_displace_no_account() -> None:
    budget = DialBudget()
    for _ in range(HOST_FAILURES):
        budget.begin("203.0.113.9")
        budget.end(0.0, "203.0.113.9", failed=True)
    for number in range(2 * MAX_ACCOUNTS):
        budget.may_begin(0.0, f"198.{18 + number // 65536}.{number // 256 % 256}.{number % 256}")
    assert budget.may_begin(0.0, "203.0.113.9") is False
