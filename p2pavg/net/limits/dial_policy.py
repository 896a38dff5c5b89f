"""The policy for dialling addresses that other peers name, and the budget of their failed dials.

This module decides; it does no I/O and has no clock. Records, rosters and answers hold addresses that their writers
chose. Without these rules, a stranger could make this process connect to services of its own machine or local network.
It could also make all peers of a run connect to a third party at once.

Addresses that this process' own user names (listen and bootstrap addresses) are always dialled.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable

from p2pavg.base.hosts import Address, parse_host, prefix_of
from p2pavg.net.limits.rate import Accounts

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NOT_REACHED = "no connection"
"""The whole answer to a peer that has asked for a dial which failed. The reasons stay in this process' log: "refused",
"timed out" and "another service answers" would let a stranger scan this machine's network through it."""

# Private networks: an address there stands for a different machine in each network.
_LOCAL = [
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",  # behind a provider's router (RFC 6598), and Tailscale's
        "198.18.0.0/15",  # for benchmarks (RFC 2544)
        "fc00::/7",  # unique local (RFC 4193)
    )
]

# Networks without peers: unspecified, link-local (169.254.169.254 is the credentials service of cloud machines),
# multicast, reserved, broadcast, and IPv6 forms that lead to an IPv4 address of the sender's choice.
# 192.0.2.0/24, 198.51.100.0/24 and 203.0.113.0/24 are not in the list: test laboratories use them.
_NEVER = [
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "169.254.0.0/16",
        "192.0.0.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/128",
        "::/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/32",
        "2002::/16",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    )
]

# The network around a private address that the user named, in which this process may dial. Private networks of several
# subnets, such as those of a cloud or a cluster, are usually /16 at most, and /48 in IPv6.
_USERS_BITS = {4: 16, 6: 48}


class DialPolicy:
    """The decision whether a host that another peer named may be dialled.

    Args:
        own_networks: the subnets of this machine's interfaces, loopback not among them.
    """

    def __init__(self, own_networks: Iterable[Network] = ()) -> None:
        self.own_networks = list(own_networks)
        self.only_here = False
        """True for a peer that stays on this machine: no other host is dialled, also if the user names it."""
        self._from_user: set[Network] = set()
        self._loopback = False

    def trust_address(self, host: str) -> None:
        """Note a host at which this process listens, or which its user told it to dial."""
        address = parse_host(host)
        if address is None:
            return
        self._loopback |= address.is_loopback
        if _is_in(address, _LOCAL):
            bits = _USERS_BITS[address.version]
            self._from_user.add(ipaddress.ip_network((address, bits), strict=False))

    def refusal(self, host: str, *, met_there: bool = False) -> str:
        """Return the reason for which a host that another peer named is not dialled; empty if it may be dialled.

        Args:
            met_there: true if the peer to dial was connected from this host before.
        """
        address = parse_host(host)
        if address is None:
            return "names that other peers send are not looked up"
        if self.only_here and not address.is_loopback:
            return "this peer averages only with processes of this machine"
        if met_there:
            return ""
        if address.is_loopback:
            return "" if self._loopback else "another peer named an address of this machine itself"
        if _is_in(address, _NEVER):
            return "no peer can be there"
        if _is_in(address, _LOCAL) and not _is_in(address, (*self.own_networks, *self._from_user)):
            return "it is in a private network that this machine is not in"
        return ""

    def may_ask(self, host: str, asker: str) -> bool:
        """Return whether a peer may have this process dial a host and hear whether that was possible.

        A private address is dialled for a peer that is connected from that network itself: it can dial there anyway.

        Args:
            host: in the address that the peer named.
            asker: the host from which the peer is connected directly; empty if it is connected through a relay.
        """
        address, whence = parse_host(host), parse_host(asker)
        if address is None or not is_private(host) or address == whence:
            return True  # the gate decides about it, as about any address that a peer names
        if whence is None:
            return False
        if address.is_loopback:
            return whence.is_loopback
        inside = [network for network in (*self.own_networks, *self._from_user) if _is_in(address, [network])]
        return _is_in(whence, inside)


def is_private(host: str) -> bool:
    """Return whether an address stands for different machines in different networks; true for texts that are none.

    Loopback and link-local addresses count as private. Addresses for documentation do not: test laboratories use them.
    """
    address = parse_host(host)
    return address is None or address.is_loopback or address.is_link_local or _is_in(address, _LOCAL)


def _is_in(address: Address, networks: Iterable[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


# Failed dials at one host. 8 at once are enough for a peer with all its addresses, and for several peers that have left
# together. After that, one every 5 s is less than a browser tries at a server that is down.
HOST_FAILURES = 8
HOST_FAILURES_PER_SECOND = 0.2

# A /24 or /48 has the budget of four hosts.
PREFIX_FACTOR = 4

# Failed dials at all hosts. A lookup among dead peers makes 64 calls at most (MOST_CALLS), each to a few addresses, and
# there are several lookups in a minute. A web page opens more than 8 connections a second.
ALL_FAILURES = 256
ALL_FAILURES_PER_SECOND = 8.0

# Failed dials of one peer at hosts at which it was met. This budget is separate, so that failures of other peers do not
# keep this process from a peer that it knows.
PEER_FAILURES = 16
PEER_FAILURES_PER_SECOND = 1.0


class DialBudget:
    """The budget of dials to addresses that other peers named: those under way and those that fail.

    A dial costs nothing if the right peer answers. So a swarm at one address is dialled as fast as it answers, while
    invented peers at a third party's address use up the budget.
    """

    def __init__(self) -> None:
        self._failures = {
            "peer": Accounts(PEER_FAILURES_PER_SECOND, PEER_FAILURES),
            "host": Accounts(HOST_FAILURES_PER_SECOND, HOST_FAILURES),
            "prefix": Accounts(PREFIX_FACTOR * HOST_FAILURES_PER_SECOND, PREFIX_FACTOR * HOST_FAILURES),
            "all": Accounts(ALL_FAILURES_PER_SECOND, ALL_FAILURES),
        }
        self._under_way: Counter[tuple[str, str]] = Counter()

    def may_begin(self, now: float, host: str, met_peer: str = "") -> bool | None:
        """Return whether a dial may begin; ``None`` if it must wait until a dial under way has ended.

        Args:
            met_peer: the peer to dial, if it was met at this host.
        """
        left = {
            (kind, name): self._failures[kind].level(now, name) for kind, name in _accounts_of(host, met_peer)
        }
        if any(level < 1.0 for level in left.values()):
            return False
        return all(level - self._under_way[account] >= 1.0 for account, level in left.items()) or None

    def begin(self, host: str, met_peer: str = "") -> None:
        """Note that a dial begins."""
        self._under_way.update(_accounts_of(host, met_peer))

    def end(self, now: float, host: str, met_peer: str = "", *, failed: bool) -> None:
        """Note that a dial has ended. A dial that was given up counts as failed."""
        self._under_way -= Counter(_accounts_of(host, met_peer))
        if failed:
            for kind, name in _accounts_of(host, met_peer):
                self._failures[kind].of(name).take(now, 1.0)


def _accounts_of(host: str, met_peer: str) -> list[tuple[str, str]]:
    if met_peer:
        return [("peer", met_peer)]
    return [("host", host), ("prefix", prefix_of(host)), ("all", "")]
