"""The reachability of one peer: one of a few kinds, and a sentence for its user. No I/O, no clock, no random source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from p2pavg.base.hosts import prefix_of


class Kind(StrEnum):
    """The ways in which other peers can reach a peer."""

    UNKNOWN = "unknown"
    """No peer outside this network has answered yet."""
    PUBLIC = "public"
    """Another peer has dialled this one."""
    MAPPED = "mapped"
    """The router passes a port on, because this process asked it to."""
    ANNOUNCED = "announced"
    """The user has named the addresses."""
    PUNCHABLE = "punchable"
    """The router or firewall refuses inbound connections, but both sides can open one at the same time."""
    RELAYED = "relayed"
    """Only relays carry connections to this peer, which itself can dial peers that are dialable."""


_DIALABLE = frozenset((Kind.UNKNOWN, Kind.PUBLIC, Kind.MAPPED, Kind.ANNOUNCED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachability:
    """The reachability of this peer, as far as it is known."""

    kind: Kind
    sentence: str
    """The same in words, such as ``port 4001 is mapped by UPnP``."""
    outer_hosts: tuple[str, ...] = ()
    """The IP addresses at which peers in other networks see this one: IPv4 first, at most two of each version."""
    relays: tuple[str, ...] = ()
    """The ids of the peers that relay for this one."""
    punch_hosts: tuple[str, ...] = ()
    """Those of ``outer_hosts`` to which hole punching is likely to succeed. A router that gives IPv4 connections random
    ports may let IPv6 through as it is, so that a peer that is relayed over IPv4 can be punched over IPv6."""

    @property
    def dialable(self) -> bool:
        """True if other peers can dial this one, or if nothing is known that speaks against it."""
        return self.kind in _DIALABLE

    @property
    def punchable(self) -> bool:
        """True if hole punching is likely to succeed, although this peer cannot be dialled."""
        return self.kind is Kind.PUNCHABLE


NOT_KNOWN_YET = "not known yet"
"""The beginning of the sentences that are about to change."""

NOT_ASKED = Reachability(
    kind=Kind.UNKNOWN, sentence=f"{NOT_KNOWN_YET}: no peer of another network has answered"
)
"""The reachability of a peer that has not asked any other peer yet."""


class Barrier(StrEnum):
    """The obstacle between a peer and the peers that dial it, in the words of the sentences."""

    FIREWALL = "firewall"
    """Nothing changes addresses, but inbound connections do not arrive."""
    KEEPS_PORTS = "router that keeps ports"
    """The outer port of a connection is its local port."""
    SAME_FOR_ALL = "router that gives a port the same outer port for all peers"
    """The outer port differs from the local one, but does not depend on the destination."""
    CHANGES_PORTS = "router that changes ports"
    """The outer port differs from the local one. No second peer was there to compare with."""
    SYMMETRIC = "symmetric router"
    """Each destination sees another outer port."""
    NO_LISTENER = "no listener"
    """This process was told not to listen."""
    UNTESTED = "router"
    """No peer was there that could be asked for outer ports."""


PUNCHABLE_BARRIERS = frozenset(
    (Barrier.FIREWALL, Barrier.KEEPS_PORTS, Barrier.SAME_FOR_ALL, Barrier.NO_LISTENER)
)
"""The obstacles through which hole punching works: outer ports can be told before a connection is made."""


def behind(barrier: Barrier, relays: int) -> str:
    """Return the sentence for a peer that cannot be dialled.

    Args:
        relays: the number of peers that relay for it.
    """
    where = "without a listener" if barrier is Barrier.NO_LISTENER else f"behind a {barrier}"
    if barrier in PUNCHABLE_BARRIERS:
        return f"{where}; direct connections by hole punching"
    if not relays:
        return f"{where}; no relay is known yet"
    return f"{where}; traffic is relayed by {relays} peer{'s' if relays > 1 else ''}"


def mapped(port: int, protocol: str) -> str:
    """Return the sentence for a peer whose router passes a port on."""
    return f"port {port} is mapped by {protocol}"


def announced(count: int) -> str:
    """Return the sentence for a peer whose user has named its addresses."""
    return "reachable at the address that was announced" + (f" and {count - 1} more" if count > 1 else "")


PUBLIC_SENTENCE = "public"
BEING_TRIED_SENTENCE = f"{NOT_KNOWN_YET}: other peers are asked to dial this one"


# The results of whoami probes, and the kind of router that they show.

MAX_SERVERS = 3
"""Servers that are probed: a third one decides if one of two lies, or if a port was taken by chance."""

PROBE_AGAIN_SECONDS = 600.0
"""The time after which the router is probed anew: a peer may have moved behind another one with the same address."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The outer port that one server saw."""

    server_host: str
    local_port: int
    outer_port: int
    at: float

    @property
    def kept(self) -> bool:
        """True if the router has kept the port."""
        return self.local_port == self.outer_port


class Probes:
    """The last probe at each server, for one version of IP."""

    def __init__(self) -> None:
        self._found: dict[str, Probe] = {}

    def add(self, probe: Probe) -> None:
        """Note the result of a probe. Those of an earlier time of probing do not count any more."""
        self._found = {
            host: found for host, found in self._found.items() if found.at > probe.at - PROBE_AGAIN_SECONDS
        }
        self._found[probe.server_host] = probe

    def forget(self) -> None:
        """Forget everything."""
        self._found.clear()

    @property
    def local_port(self) -> int | None:
        """The port from which the first probe was sent. Probes from one port can be compared with each other."""
        return next((probe.local_port for probe in self._found.values()), None)

    @property
    def again_at(self) -> float:
        """The moment from which the router is probed anew."""
        return max((probe.at for probe in self._found.values()), default=float("-inf")) + PROBE_AGAIN_SECONDS

    def has(self, server_host: str) -> bool:
        """Return whether a server was probed."""
        return server_host in self._found

    @property
    def settled(self) -> bool:
        """True if no further server needs to be probed: two agree, or MAX_SERVERS have answered."""
        probes = list(self._found.values())
        if len(probes) >= MAX_SERVERS:
            return True
        changes = {probe.outer_port - probe.local_port for probe in probes}
        return len(probes) == MAX_SERVERS - 1 and len(changes) == 1

    def barrier(self) -> Barrier:
        """Return the kind of router.

        At least half of the servers' networks must have seen the local port for a router that keeps ports. Of the
        others, two that saw the same outer port from the same local port decide: a lie would have to hit the other
        answer by chance.
        """
        probes = list(self._found.values())
        if not probes:
            return Barrier.UNTESTED
        networks = {prefix_of(probe.server_host) for probe in probes}
        keeping = {prefix_of(probe.server_host) for probe in probes if probe.kept}
        if 2 * len(keeping) >= len(networks):
            return Barrier.KEEPS_PORTS
        changed = [probe for probe in probes if not probe.kept]
        pairs = [
            (a, b)
            for place, a in enumerate(changed)
            for b in changed[place + 1 :]
            if a.local_port == b.local_port
        ]
        if not pairs:
            return Barrier.CHANGES_PORTS
        agreed = any(a.outer_port == b.outer_port for a, b in pairs)
        return Barrier.SAME_FOR_ALL if agreed else Barrier.SYMMETRIC
