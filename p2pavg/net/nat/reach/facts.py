"""The facts of which a peer's knowledge of its reachability consists. No I/O, no clock, no random source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import zip_longest

from p2pavg.base.hosts import is_loopback, parse_host, prefix_of, version_of
from p2pavg.base.limits import RETRY_SECONDS
from p2pavg.net.limits.dial_policy import is_private
from p2pavg.net.nat.reach.reachability import PUNCHABLE_BARRIERS, Barrier, Probes


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A peer with a direct connection."""

    peer_id: str
    host: str
    """The IP address at which this process sees it."""
    port: int = field(default=0, compare=False)
    """The listening port at which this process has dialled it; 0 if the peer has dialled this one."""
    arrived: bool = field(default=False, compare=False)
    """True if the peer has dialled this one, at a listening port."""


# The hosts at which other peers see this one, and which of them are believed.

MAX_REMEMBERED = 32
"""Observations that are kept; those of peers that answered longest ago are forgotten first."""

_MAX_VIEWS = 4


@dataclass(frozen=True, slots=True)
class Observation:
    """The host at which one peer sees this one."""

    peer_host: str
    """The host at which this process sees that peer."""
    host: str
    fresh: bool = True
    """False if the peer did not answer when it was asked again."""


@dataclass(frozen=True, slots=True)
class View:
    """The conclusion from the observations of one version of IP."""

    hosts: tuple[str, ...] = ()
    """The believed hosts, at most two. Empty if no peer outside this network has answered."""
    routed: bool = False
    """True if one of them is no address of this machine: a router is between it and the peers that answered."""


class Observations:
    """The last observation of each peer and version of IP."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Observation] = {}
        self._views: dict[tuple[int, frozenset[str], frozenset[str]], View] = {}
        """Views of these observations that were computed before: each is asked for many times."""

    def add(self, peer_id: str, peer_host: str, host: str, interfaces: Collection[str]) -> bool:
        """Note an observation, and return whether this peer said something else before.

        Hosts that no peer can see truthfully are not noted: loopback, multicast, and private addresses of other
        machines as told by peers in other networks. (A peer in a container may see its own gateway.)

        Args:
            interfaces: the addresses of this machine.
        """
        address = parse_host(host)
        if address is None or address.is_loopback or address.is_multicast or address.is_unspecified:
            return False
        if is_private(host) and host not in interfaces and not is_private(peer_host):
            return False
        self._views.clear()
        key = (peer_id, address.version)
        before = self._found.pop(key, None)
        self._found[key] = Observation(peer_host, host)
        if len(self._found) > MAX_REMEMBERED:
            del self._found[next(iter(self._found))]
        return before is not None and before.host != host

    def unanswered(self, peer_id: str) -> None:
        """Note that a peer did not answer: its connection may be one of a network that this machine has left."""
        self._views.clear()
        for key, found in self._found.items():
            if key[0] == peer_id:
                self._found[key] = replace(found, fresh=False)

    def of(self, peer_id: str, version: int) -> str:
        """Return the host at which a peer sees this one; empty if it has not said."""
        found = self._found.get((peer_id, version))
        return found.host if found is not None else ""

    def forget(self, version: int) -> None:
        """Forget the observations of one version of IP."""
        self._views.clear()
        self._found = {key: found for key, found in self._found.items() if key[1] != version}

    def view(self, version: int, *, interfaces: frozenset[str], connected: frozenset[str]) -> View:
        """Return the hosts that the peers agree on.

        Each network of observers (/24 or /48) has one vote, which its peers share. A host with at least half of the
        votes is believed. So a single network decides only if there is no third one, and peers of one network cannot
        outvote the others.

        Peers in other networks count first. Where there are none, as in a laboratory of private networks, those that
        see this peer behind a router count. A peer that no router separates from any observer has an empty view.

        Args:
            interfaces: the addresses of this machine.
            connected: the peers that are connected now. If any of them has answered lately, older answers do not
                count: they may be of the network that this machine was in before.
        """
        key = (version, interfaces, connected)
        if key not in self._views:
            while len(self._views) >= _MAX_VIEWS:
                del self._views[next(iter(self._views))]
            self._views[key] = self._view(version, interfaces, connected)
        return self._views[key]

    def _view(self, version: int, interfaces: frozenset[str], connected: frozenset[str]) -> View:
        mine = {key[0]: found for key, found in self._found.items() if key[1] == version}
        lately = [found for peer_id, found in mine.items() if peer_id in connected and found.fresh]
        voters = lately or list(mine.values())
        far = [found for found in voters if not is_private(found.peer_host)]
        electors = far or [found for found in voters if found.host not in interfaces]
        votes = _votes(electors)
        networks = len({prefix_of(found.peer_host) for found in electors})
        believed = [host for host, vote in votes.items() if 2 * vote >= networks]
        believed.sort(key=lambda host: (-votes[host], host))
        return View(tuple(believed), any(host not in interfaces for host in believed))


def _votes(electors: Collection[Observation]) -> dict[str, Fraction]:
    """Return the votes for each host: one for each network of observers, shared by its peers."""
    by_network: dict[str, Counter[str]] = defaultdict(Counter)
    for found in electors:
        by_network[prefix_of(found.peer_host)][found.host] += 1
    votes: dict[str, Fraction] = defaultdict(Fraction)
    for said in by_network.values():
        for host, count in said.items():
            votes[host] += Fraction(count, said.total())
    return votes


# The results of dial-backs, and which endpoints they show to work.

Endpoint = tuple[str, int]
"""A host at which other peers see this one, and a port."""

ENOUGH = 2
"""Peers that are asked about an endpoint, and failures that are believed while there are others to ask."""


@dataclass(frozen=True, slots=True)
class _Vote:
    network: str
    reached: bool
    at: float


class DialBacks:
    """Votes of other peers on endpoints of this peer.

    A vote that an endpoint works is more than a claim: this process has seen the new connection. A vote that it does
    not work is a claim. At least half of the networks (/24 or /48) that have voted must say that it works.
    """

    def __init__(self) -> None:
        self._votes: dict[Endpoint, dict[str, _Vote]] = {}
        self._unanswered = Counter[Endpoint]()

    def vote(self, now: float, endpoint: Endpoint, peer_id: str, peer_host: str, *, reached: bool) -> None:
        """Note the result of one dial-back."""
        votes = self._votes.setdefault(endpoint, {})
        votes[peer_id] = _Vote(prefix_of(peer_host), reached, now)
        # Older ones count until there are ENOUGH new ones. The votes of one check arrive before a peer is asked again.
        new = {peer: vote for peer, vote in votes.items() if vote.at > now - RETRY_SECONDS}
        if len(new) >= ENOUGH:
            self._votes[endpoint] = new

    def unanswered(self, endpoint: Endpoint) -> None:
        """Note that a peer gave no answer on an endpoint, or refused to dial."""
        self._unanswered[endpoint] += 1

    def has_voted(self, endpoint: Endpoint, peer_id: str) -> bool:
        """Return whether a peer has voted on an endpoint."""
        return peer_id in self._votes.get(endpoint, {})

    def verdict(
        self, endpoint: Endpoint, *, others: bool, routed: bool, arrived: Collection[str] = ()
    ) -> bool | None:
        """Return whether an endpoint works; ``None`` if that is not known yet.

        Args:
            others: true if there are peers that could be asked and have not voted. Without them, a single failure is
                believed.
            routed: true if the host belongs to a router. Then the endpoint counts as closed if no peer wants to try.
            arrived: networks whose peers have connected to the endpoint by themselves.
        """
        votes = self._votes.get(endpoint, {}).values()
        networks = {vote.network for vote in votes}.union(arrived)
        working = {vote.network for vote in votes if vote.reached}.union(arrived)
        if working and 2 * len(working) >= len(networks):
            return True
        if len(votes) >= ENOUGH or (votes and not others):
            return False
        return False if routed and not votes and self._unanswered[endpoint] >= ENOUGH else None

    def check_at(self, endpoint: Endpoint) -> float:
        """Return the moment at which an endpoint with a verdict is checked again."""
        votes = self._votes.get(endpoint, {}).values()
        if not votes:
            return float("-inf")
        # A port that does not work is checked again sooner, because its user may be opening it now.
        checks = 5 if any(vote.reached for vote in votes) else 2
        return max(vote.at for vote in votes) + checks * RETRY_SECONDS

    def keep_hosts(self, hosts: Collection[str]) -> None:
        """Forget the endpoints at all other hosts."""
        for endpoint in [found for found in {*self._votes, *self._unanswered} if found[0] not in hosts]:
            self._forget(endpoint)

    def forget_port(self, port: int) -> None:
        """Forget all endpoints with a port, because a router's mapping of it has changed."""
        for endpoint in [found for found in {*self._votes, *self._unanswered} if found[1] == port]:
            self._forget(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        self._votes.pop(endpoint, None)
        self._unanswered.pop(endpoint, None)


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
        found = [
            peer for peer in neighbours if peer.host not in self.interfaces and not is_loopback(peer.host)
        ]
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
            port for host, port in self.listening if version_of(host) == version and not is_loopback(host)
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
