"""The facts of which a peer's knowledge of its reachability consists. No I/O, no clock, no random source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from p2pavg.net.limits.dial_policy import is_private
from p2pavg.net.limits.sources import parse_host, prefix_of
from p2pavg.net.nat.reach.dial_backs import DialBacks, Endpoint
from p2pavg.net.nat.reach.observations import Observations, View
from p2pavg.net.nat.reach.probes import Probes
from p2pavg.net.nat.reach.questions import Neighbour
from p2pavg.net.nat.reach.reachability import PUNCHABLE_BARRIERS, Barrier

VERSIONS = (4, 6)
"""The versions of IP; the first one that a peer of another network was seen over decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A port that a router passes on to this machine."""

    port: int
    """The outer port."""
    protocol: str
    """``UPnP``, ``NAT-PMP`` or ``PCP``."""
    host: str = ""
    """The router's outer address, as it says; empty if it does not say."""


def version_of(host: str) -> int:
    """Return the version of IP of an address; 0 for other texts."""
    address = parse_host(host)
    return address.version if address is not None else 0


@dataclass(slots=True)
class Facts:
    """The facts, and what follows from them for one version of IP or one endpoint."""

    listening: tuple[Endpoint, ...] = ()
    """The hosts and ports of the listeners, without wildcards, in the order in which they are announced."""
    interfaces: frozenset[str] = frozenset()
    """The IP addresses of this machine."""
    source6: str = ""
    """The address of this machine from which connections to other networks go over IPv6; empty if there is none."""
    askable: tuple[Neighbour, ...] = ()
    """The peers with direct connections that are not on this machine, those of different networks first."""
    connected: frozenset[str] = frozenset()
    """The ids of all peers with direct connections."""
    arrivals: frozenset[tuple[int, str]] = frozenset()
    """The versions of IP and networks from which peers of other networks have connected to this one, and still are."""
    mapping: Mapped | None = None
    observations: Observations = field(default_factory=Observations)
    dial_backs: DialBacks = field(default_factory=DialBacks)
    probes: dict[int, Probes] = field(default_factory=lambda: {version: Probes() for version in VERSIONS})

    def view(self, version: int) -> View:
        """Return the hosts at which other peers see this one."""
        return self.observations.view(version, interfaces=self.interfaces, connected=self.connected)

    @property
    def outer_hosts(self) -> tuple[str, ...]:
        """The believed hosts of all versions."""
        return tuple(host for version in VERSIONS for host in self.view(version).hosts)

    @property
    def deciding_version(self) -> int:
        """The version that decides whether this peer is dialable; 0 if no peer of another network has answered.

        Most peers have IPv4 only, so a peer that works over IPv6 alone is not dialable for them.
        """
        return next((version for version in VERSIONS if self.view(version).hosts), 0)

    def meet(self, neighbours: Sequence[Neighbour]) -> None:
        """Note the peers with direct connections, each host of a peer once."""
        here = {*self.interfaces}
        found = [peer for peer in neighbours if peer.host not in here and not _is_loopback(peer.host)]
        by_network: dict[str, list[Neighbour]] = {}
        for peer in found:
            by_network.setdefault(prefix_of(peer.host), []).append(peer)
        self.askable = tuple(
            peer for row in zip_longest(*by_network.values()) for peer in row if peer is not None
        )
        self.connected = frozenset(peer.peer_id for peer in neighbours)
        self.arrivals = frozenset(
            (version_of(peer.host), prefix_of(peer.host))
            for peer in found
            if peer.arrived and not is_private(peer.host)
        )

    def dialers(self, host: str) -> list[Neighbour]:
        """Return the neighbours that see this peer at a host, and are not at that host themselves."""
        version = version_of(host)
        return [
            found
            for found in self.askable
            if found.host != host and self.observations.of(found.peer_id, version) == host
        ]

    def ports(self, version: int) -> list[int]:
        """Return the ports at which peers of other networks may reach this one, each once."""
        found = [
            port for host, port in self.listening if version_of(host) == version and not _is_loopback(host)
        ]
        if self.mapping is not None and version == 4:
            found.append(self.mapping.port)
        return list(dict.fromkeys(found))

    def endpoints(self, version: int) -> list[Endpoint]:
        """Return the endpoints that other peers are asked to dial."""
        return [(host, port) for host in self.view(version).hosts for port in self.ports(version)]

    def works(self, endpoint: Endpoint) -> bool | None:
        """Return whether other peers can dial an endpoint; ``None`` if that is not known yet."""
        routed = endpoint[0] not in self.interfaces
        version = version_of(endpoint[0])
        arrived = () if routed else [network for found, network in self.arrivals if found == version]
        others = bool(self.missing(endpoint))
        return self.dial_backs.verdict(endpoint, others=others, routed=routed, arrived=arrived)

    def working(self, version: int) -> list[Endpoint]:
        """Return the endpoints that other peers can dial."""
        return [endpoint for endpoint in self.endpoints(version) if self.works(endpoint)]

    def is_closed(self, version: int) -> bool:
        """Return whether peers of other networks were seen, and none of them can dial this one."""
        return bool(self.view(version).hosts) and all(
            self.works(endpoint) is False for endpoint in self.endpoints(version)
        )

    @property
    def punch_hosts(self) -> tuple[str, ...]:
        """The outer hosts of connections whose outer port can be told before.

        Most peers are connected over IPv4, so that no other peer sees this one over IPv6. Routers do not translate IPv6
        (RFC 6092, section 1), so the address of the machine is the outer one, until a peer says something else.
        """
        hosts = [host for host in self.outer_hosts if self.barrier(version_of(host)) in PUNCHABLE_BARRIERS]
        if self.source6 and not self.view(6).hosts:
            hosts.append(self.source6)
        return tuple(hosts)

    def barrier(self, version: int) -> Barrier:
        """Return the obstacle to dials from other networks."""
        if self.view(version).routed:
            return self.probes[version].barrier()
        return Barrier.FIREWALL if self.ports(version) else Barrier.NO_LISTENER

    def missing(self, endpoint: Endpoint) -> Sequence[Neighbour]:
        """Return the neighbours that may dial an endpoint and have not voted on it."""
        return [
            peer
            for peer in self.dialers(endpoint[0])
            if not self.dial_backs.has_voted(endpoint, peer.peer_id)
        ]


def _is_loopback(host: str) -> bool:
    address = parse_host(host)
    return address is not None and address.is_loopback
