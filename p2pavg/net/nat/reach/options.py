"""The user's settings for the ways in which others reach a peer."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2pavg.base.errors import AddressError, ConfigError
from p2pavg.net.addresses import check_is_list, parse_listen_address
from p2pavg.net.nat.relay.limits import DEFAULT_RELAY_MBPS, RelayLimits

MAX_ANNOUNCED = 4
MAX_RELAY_MBPS = 100_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachOptions:
    """The user's settings for the ways in which others reach a peer.

    - ``announce``: addresses at which others can dial this peer, for example a forwarded port, without a peer id.
    - ``port_mapping``: ask the router to forward the port, by UPnP or NAT-PMP.
    - ``relay_limits``: what this peer gives to others as a relay; ``None`` relays nothing.
    - ``reachable``: others must be able to reach this peer. A command that only asks something needs no relays.
    - ``only_here``: this peer dials no other machine; see :mod:`p2pavg.net.nat.reach.own_machine`.
    """

    announce: tuple[str, ...] = ()
    port_mapping: bool = True
    relay_limits: RelayLimits | None = field(default_factory=RelayLimits)
    reachable: bool = True
    only_here: bool = False


ONLY_ASKS = ReachOptions(port_mapping=False, relay_limits=None, reachable=False)
"""The options of a command that asks other peers something and then ends."""


def checked_options(
    announce: Sequence[str] = (), *, port_mapping: bool = True, relay_mbps: float = DEFAULT_RELAY_MBPS
) -> ReachOptions:
    """Check what a user gave, and return it as options.

    Raises:
        AddressError: an address of ``announce`` is none that others could dial.
        ConfigError: ``relay_mbps`` or ``port_mapping`` is out of range.
    """
    check_is_list("announce", announce)
    if len(announce) > MAX_ANNOUNCED:
        raise AddressError(f"announce has {len(announce)} addresses; at most {MAX_ANNOUNCED} are announced")
    for text in announce:
        _check_announced(text)
    if not isinstance(port_mapping, bool):
        raise ConfigError(f"port_mapping must be True or False, got {port_mapping!r}")
    number = isinstance(relay_mbps, int | float) and not isinstance(relay_mbps, bool)
    if not number or not math.isfinite(relay_mbps) or not 0 <= relay_mbps <= MAX_RELAY_MBPS:
        raise ConfigError(
            f"relay_mbps must be a number of Mbit/s from 0 (relay nothing) to {MAX_RELAY_MBPS:.0f}, got {relay_mbps!r}"
        )
    limits = RelayLimits(mbps=float(relay_mbps)) if relay_mbps > 0 else None
    return ReachOptions(announce=tuple(announce), port_mapping=port_mapping, relay_limits=limits)


def _check_announced(text: str) -> None:
    address = parse_listen_address(text)
    host = str(address.value_for_protocol("ip4" if "ip4" in address else "ip6"))
    if ipaddress.ip_address(host).is_unspecified:
        raise AddressError(f"announce address {text!r} names no machine; give the address that others dial")
    if str(address.value_for_protocol("tcp")) == "0":
        raise AddressError(f"announce address {text!r} has no port; give the port that others dial")
