"""Addresses and names of machines: the source of a connection as limits count it, and what only this machine reaches.

No I/O, no clock. In IPv6, one machine owns a whole /64, and a rented one often a /48. So a limit per address alone
would be no limit.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
MAX_HOST_CHARS = 45  # an IPv6 address in its longest form

# The smallest networks that are routed on the internet. An attacker with one address of a /24 can often use all of it.
_PREFIX_BITS = {4: 24, 6: 48}
_CACHED = 4096  # hosts; parsing one takes some microseconds, and limits ask for the same ones again and again


@lru_cache(_CACHED)
def parse_host(host: str) -> Address | None:
    """Parse an IP address, and unpack IPv4 inside IPv6. Return ``None`` for a name or an empty text."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def version_of(host: str) -> int:
    """Return the version of IP of an address; 0 for other texts."""
    address = parse_host(host)
    return address.version if address is not None else 0


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address; ``localhost`` counts, and no other name does."""
    address = parse_host(host.strip("[]"))
    return address.is_loopback if address is not None else host == "localhost"


@lru_cache(_CACHED)
def prefix_of(host: str) -> str:
    """Return the /24 (IPv4) or /48 (IPv6) network of an address; other texts stand for themselves."""
    address = parse_host(host)
    if address is None:
        return host
    return str(ipaddress.ip_network((address, _PREFIX_BITS[address.version]), strict=False))


def may_ask(host_header: str, names: frozenset[str]) -> bool:
    """Return whether a request may name this host.

    A page of a stranger can let its own name point to this machine (DNS rebinding), and would then read what we answer.
    So a name must be one that the user gave. An address is not a name that a stranger could point anywhere.

    Args:
        host_header: value of the request's ``Host`` header.
        names: names that the user gave, in lower case.
    """
    host = _without_port(host_header).lower().rstrip(".")
    # No long text of a stranger stays in the cache of parsed addresses.
    address = parse_host(host.strip("[]")) if len(host) <= MAX_HOST_CHARS + len("[]") else None
    return host == "localhost" or host in names or address is not None


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.rpartition(":")[0] if ":" in host else host
