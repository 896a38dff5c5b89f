"""The names under which a request over HTTP may ask for pages of this machine. No I/O, no clock."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address; ``localhost`` counts."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def may_ask(host_header: str, names: frozenset[str]) -> bool:
    """Return whether a request may name this host.

    A page of a stranger can let its own name point to this machine (DNS rebinding), and would then read what we answer.
    So a name must be one that the user gave. An address is not a name that a stranger could point anywhere.

    Args:
        host_header: value of the request's ``Host`` header.
        names: names that the user gave, in lower case.
    """
    host = _without_port(host_header).lower().rstrip(".")
    if host == "localhost" or host in names:
        return True
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.rpartition(":")[0] if ":" in host else host
