"""Which addresses that other peers name are dialled, and how many dials of them may fail.

Decides; no I/O, no clock. Records, rosters and answers name addresses that their writers chose. Without these rules a
stranger could let this process connect to services of its own machine and its local network, or let all peers of a run
connect to a third party at once.

What this process' own user names (where it listens, its bootstrap addresses) is always dialled.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable

from p2pavg.net.limits.rate import TokenBucket
from p2pavg.net.limits.sources import Address, parse_host, prefix_of

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Networks in which an address means another machine for each that dials it.
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

# No peer is ever there: unspecified, link-local (169.254.169.254 is the credentials service of cloud machines),
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

# How far one private address that the user named says where this process is: private networks of several subnets, such
# as a cloud's or a cluster's, are /16 at most as a rule, and /48 of IPv6.
_USERS_BITS = {4: 16, 6: 48}


class DialPolicy:
    """Whether a host that another peer named may be dialled.

    Args:
        own_networks: the subnets of this machine's interfaces, loopback not among them.
    """

    def __init__(self, own_networks: Iterable[Network] = ()) -> None:
        self.own_networks = list(own_networks)
        self._from_user: set[Network] = set()
        self._loopback = False

    def told_by_user(self, host: str) -> None:
        """Note a host at which this process listens, or which its user told it to dial."""
        address = parse_host(host)
        if address is None:
            return
        self._loopback |= address.is_loopback
        if _is_in(address, _LOCAL):
            bits = _USERS_BITS[address.version]
            self._from_user.add(ipaddress.ip_network((address, bits), strict=False))

    def refusal(self, host: str, *, met_there: bool = False) -> str:
        """Return why a host that another peer named is not dialled; empty if it may be.

        Args:
            met_there: whether that very peer was connected from this host. Then it names itself.
        """
        address = parse_host(host)
        if address is None:
            return "names that other peers send are not looked up"
        if met_there:
            return ""
        if address.is_loopback:
            return "" if self._loopback else "another peer named an address of this machine itself"
        if _is_in(address, _NEVER):
            return "no peer can be there"
        if _is_in(address, _LOCAL) and not _is_in(address, (*self.own_networks, *self._from_user)):
            return "it is in a private network that this machine is not in"
        return ""


def _is_in(address: Address, networks: Iterable[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


# Dials that fail, at one host. 8 at once suffice for a peer with all its addresses, and for several that have left
# together; then one every 5 s is less than a browser tries at a server that is down.
HOST_FAILURES = 8
HOST_FAILURES_PER_SECOND = 0.2

# In one /24 or /48: as for four hosts.
PREFIX_FACTOR = 4

# Everywhere. A lookup among dead peers makes 64 calls at most (MOST_CALLS), each to a few addresses, and there are some
# in a minute. 8 connections a second that come to nothing are less than a web page opens.
ALL_FAILURES = 256
ALL_FAILURES_PER_SECOND = 8.0

# Of one peer at hosts at which it was met: the limits of others do not keep this process from a peer that it knows.
PEER_FAILURES = 16
PEER_FAILURES_PER_SECOND = 1.0

# The one that was dialled longest ago is forgotten: by then ALL_FAILURES has been used up several times.
MAX_ACCOUNTS = 4096


class _Account:
    """Dials under way, and failures that may still come."""

    def __init__(self, failures: float, per_second: float) -> None:
        self._bucket = TokenBucket(per_second, failures)
        self.under_way = 0

    def left(self, now: float) -> float:
        """Return how many dials may fail now."""
        return self._bucket.level(now)

    def failed(self, now: float) -> None:
        """One has failed."""
        self._bucket.take(now, 1.0)


class DialBudget:
    """How many dials of addresses that others named may be under way, and may fail.

    A dial costs nothing when the peer that was meant answers. So a swarm at one address is dialled as fast as it
    answers, and invented peers at a third party are not.
    """

    def __init__(self) -> None:
        self._accounts: OrderedDict[tuple[str, str], _Account] = OrderedDict()

    def may_begin(self, now: float, host: str, met_peer: str = "") -> bool | None:
        """Return whether a dial may begin: ``None`` if it may when one that is under way has ended.

        Args:
            met_peer: the peer that is dialled, if it was met at this host.
        """
        accounts = self._accounts_of(host, met_peer, keep=False)
        if any(account.left(now) < 1.0 for account in accounts):
            return False
        return all(account.left(now) - account.under_way >= 1.0 for account in accounts) or None

    def begin(self, host: str, met_peer: str = "") -> None:
        """A dial begins."""
        for account in self._accounts_of(host, met_peer):
            account.under_way += 1

    def end(self, now: float, host: str, met_peer: str = "", *, failed: bool) -> None:
        """A dial has ended; one that was given up has failed."""
        for account in self._accounts_of(host, met_peer):
            account.under_way = max(0, account.under_way - 1)
            if failed:
                account.failed(now)

    def _accounts_of(self, host: str, met_peer: str, *, keep: bool = True) -> list[_Account]:
        def account(kind: str, name: str, failures: float, per_second: float) -> _Account:
            return self._account((kind, name), failures, per_second, keep=keep)

        if met_peer:
            return [account("peer", met_peer, PEER_FAILURES, PEER_FAILURES_PER_SECOND)]
        everywhere = account("all", "", ALL_FAILURES, ALL_FAILURES_PER_SECOND)
        factor = PREFIX_FACTOR
        return [
            account("host", host, HOST_FAILURES, HOST_FAILURES_PER_SECOND),
            account("prefix", prefix_of(host), factor * HOST_FAILURES, factor * HOST_FAILURES_PER_SECOND),
            everywhere,
        ]

    def _account(self, key: tuple[str, str], failures: float, per_second: float, *, keep: bool) -> _Account:
        """Return an account; one that is only looked at takes no place, or questions could push others out."""
        found = self._accounts.get(key)
        if found is None:
            found = _Account(failures, per_second)
            if not keep:
                return found
            self._accounts[key] = found
            self._forget()
        if keep:
            self._accounts.move_to_end(key)
        return found

    def _forget(self) -> None:
        for old in list(self._accounts)[: max(0, len(self._accounts) - MAX_ACCOUNTS)]:
            if not self._accounts[old].under_way:
                del self._accounts[old]
