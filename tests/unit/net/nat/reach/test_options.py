"""Options about the reachability of a peer: wrong ones are refused with a reason."""

import math
from typing import Any

import pytest

from p2pavg.base.errors import AddressError, ConfigError
from p2pavg.net.nat.reach.options import MAX_ANNOUNCED, MAX_RELAY_MBPS, ONLY_ASKS, checked_options

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
