"""Options about the reachability of a peer, and the rule by which a peer stays on its own machine."""

import math
from typing import Any

import pytest

from p2pavg.base.errors import AddressError, ConfigError
from p2pavg.net.limits.dial_policy import DialPolicy
from p2pavg.net.nat.reach.options import (
    EVERYWHERE,
    LOOPBACK,
    MAX_ANNOUNCED,
    MAX_RELAY_MBPS,
    ONLY_ASKS,
    checked_options,
    way_out,
)
from p2pavg_dht import Ed25519Signer

ADDRESS = "/ip4/203.0.113.7/tcp/4001"


def test_by_default_a_peer_relays_for_others_and_asks_its_router() -> None:
    options = checked_options()
    assert options.relay_limits is not None
    assert options.relay_limits.mbps == 10.0
    assert options.port_mapping
    assert options.reachable
    assert options.announce == ()


def test_options_are_taken() -> None:
    options = checked_options([ADDRESS, "/ip6/2001:db8::1/tcp/1"], port_mapping=False, relay_mbps=3)
    assert options.announce == (ADDRESS, "/ip6/2001:db8::1/tcp/1")
    assert not options.port_mapping
    assert options.relay_limits is not None
    assert options.relay_limits.mbps == 3.0


def test_a_rate_of_zero_relays_nothing() -> None:
    assert checked_options(relay_mbps=0).relay_limits is None


def test_a_command_that_only_asks_needs_and_gives_no_relays() -> None:
    assert ONLY_ASKS.relay_limits is None
    assert not ONLY_ASKS.reachable
    assert not ONLY_ASKS.port_mapping


@pytest.mark.parametrize(
    "announce",
    [
        ADDRESS,
        7,
        None,
        [7],
        [""],
        [f"{ADDRESS}/p2p/12D3KooWGRUnvpMEhdnxBsGKeTYsqvTZgVxHBkQkYpEQd6TLWVqM"],
        ["/ip4/0.0.0.0/tcp/4001"],
        ["/ip6/::/tcp/4001"],
        ["/ip4/203.0.113.7/tcp/0"],
        ["/ip4/203.0.113.7/udp/4001"],
        ["/dns4/example.org/tcp/4001"],
        [ADDRESS] * (MAX_ANNOUNCED + 1),
    ],
)
def test_a_wrong_address_to_announce_is_refused(announce: Any) -> None:
    with pytest.raises(AddressError):
        checked_options(announce)


@pytest.mark.parametrize("mbps", [-1, math.nan, math.inf, MAX_RELAY_MBPS * 2, "10", True, None])
def test_a_wrong_rate_is_refused(mbps: Any) -> None:
    with pytest.raises(ConfigError, match="relay_mbps"):
        checked_options(relay_mbps=mbps)


@pytest.mark.parametrize("mapping", [1, "no", None])
def test_port_mapping_is_true_or_false(mapping: Any) -> None:
    with pytest.raises(ConfigError, match="port_mapping"):
        checked_options(port_mapping=mapping)


# The rule by which a peer stays on its own machine.

PEER = Ed25519Signer(bytes(32)).peer_id
OTHER = Ed25519Signer(bytes([1] * 32)).peer_id
HERE = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
THERE = f"/ip4/10.0.0.1/tcp/1/p2p/{PEER}"
NAME = f"/dns4/localhost/tcp/1/p2p/{PEER}"
CIRCUIT = f"{HERE}/p2p-circuit/p2p/{OTHER}"


@pytest.mark.parametrize("listen", [LOOPBACK, ["/ip6/::1/tcp/0"], ["/ip4/127.0.0.2/tcp/4001", *LOOPBACK]])
@pytest.mark.parametrize("bootstrap", [[], [HERE], [f"/ip6/::1/tcp/4001/p2p/{PEER}"]])
@pytest.mark.parametrize("announce", [[], ["/ip4/127.0.0.1/tcp/4002"]])
def test_loopback_addresses_stay_on_this_machine(
    listen: list[str], bootstrap: list[str], announce: list[str]
) -> None:
    assert way_out(listen, bootstrap, announce) == ""


@pytest.mark.parametrize(
    ("listen", "bootstrap", "announce", "named"),
    [
        (EVERYWHERE, [], [], "the listen address /ip4/0.0.0.0/tcp/0"),
        ([*LOOPBACK, "/ip6/::/tcp/0"], [], [], "the listen address /ip6/::/tcp/0"),
        (["/ip4/192.168.1.5/tcp/0"], [], [], "the listen address /ip4/192.168.1.5/tcp/0"),
        ([], [HERE], [], "listen=[], with which others reach a peer through relays,"),
        (LOOPBACK, [HERE, THERE], [], f"the bootstrap address {THERE}"),
        (LOOPBACK, [NAME], [], f"the bootstrap address {NAME}"),
        (LOOPBACK, [CIRCUIT], [], f"the bootstrap address {CIRCUIT}"),
        (LOOPBACK, [], ["/ip4/203.0.113.7/tcp/4001"], "the announce address /ip4/203.0.113.7/tcp/4001"),
    ],
)  # fmt: skip
def test_the_first_address_that_leads_out_is_named(
    listen: list[str], bootstrap: list[str], announce: list[str], named: str
) -> None:
    assert way_out(listen, bootstrap, announce) == named


@pytest.mark.parametrize(
    ("listen", "bootstrap", "announce"),
    [("/ip4/127.0.0.1/tcp/0", [], []), (LOOPBACK, HERE, []), (LOOPBACK, [], "/ip4/127.0.0.1/tcp/1"), (None, [], [])],
)  # fmt: skip
def test_an_address_instead_of_a_list_is_named(
    listen: list[str], bootstrap: list[str], announce: list[str]
) -> None:
    with pytest.raises(AddressError, match="is a list of addresses"):
        way_out(listen, bootstrap, announce)


def test_a_peer_of_this_machine_dials_no_other() -> None:
    policy = DialPolicy()
    policy.trust_address("127.0.0.1")
    policy.trust_address("192.168.1.5")
    policy.only_here = True
    assert policy.refusal("127.0.0.1") == ""
    for host in ("192.168.1.5", "8.8.8.8", "2001:4860:4860::8888"):
        assert "only with processes of this machine" in policy.refusal(host, met_there=True)
