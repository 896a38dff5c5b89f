"""The user's settings for the ways in which others reach a peer, and the rule by which a peer stays on its own machine.

A run without an authority has no members: any peer that knows its id reads and changes its averages. So a peer without
a certificate stays on this machine, unless its user asks for an open run by name. A peer stays here if all addresses
that its user names are loopback addresses. The transport then dials no other address, asks no router for a port, and
takes no relay, so no address that another process names leads out of the machine.

No I/O, no clock, no random source.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from multiaddr import Multiaddr

from p2pavg.base.errors import AddressError, ConfigError
from p2pavg.base.hosts import is_loopback
from p2pavg.net.addresses import check_is_list, is_circuit, parse_listen_address, parse_peer_address
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
    - ``only_here``: this peer dials no other machine; see :func:`way_out`.
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


# The rule by which a peer stays on its own machine.

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
EVERYWHERE = ("/ip4/0.0.0.0/tcp/0",)

MAKE_A_RUN = (
    "make a run with `p2pavg run create NAME`, and open AveragingConfig.from_run(...) with what it prints; or set"
    " open_run=True (--open), with which any peer that knows the run's id can read and change its averages"
)
"""The remedy for a peer without a certificate that is to leave this machine."""


def way_out(listen: Sequence[str], bootstrap: Sequence[str], announce: Sequence[str]) -> str:
    """Return the first thing that leads out of this machine, as the subject of a sentence; empty if nothing does.

    Raises:
        AddressError: a text is no address; the message says what is wrong with it.
    """
    for name, texts in (("listen", listen), ("bootstrap", bootstrap), ("announce", announce)):
        check_is_list(name, texts)
    if not listen:
        return "listen=[], with which others reach a peer through relays,"
    for name, texts in (("listen", listen), ("announce", announce)):
        for text in texts:
            if not _is_here(parse_listen_address(text)):
                return f"the {name} address {text}"
    for text in bootstrap:
        # The peer behind a relay may be anywhere. The address of a name is known only when it is looked up.
        address, _ = parse_peer_address(text)
        if is_circuit(text) or not _is_here(address):
            return f"the bootstrap address {text}"
    return ""


def _is_here(address: Multiaddr) -> bool:
    first = next(iter(address.protocols()))
    return first.name in ("ip4", "ip6") and is_loopback(str(address.value_for_protocol(first.code)))
