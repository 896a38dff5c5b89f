"""Admission of connections: the connections that a process holds, and those that give way when there are too many.

This module decides; it does no I/O and has no clock. Each source, which is an address and its prefix, has a limit of
its own below the limit of all connections. If there are too many, the *greediest* source loses one. So an attacker with
a few addresses competes only with itself.

Three rules prevent the use of the limits against honest peers:

* No peer is refused because of other peers at the same address: within one source, the oldest connection gives way to
  the newest. A household, a university or a test on one machine may have many peers behind one address.
* Among the unfinished connections of a source, the fullest stage of the handshake loses its oldest one. Connections
  that stop in one stage on purpose give way to each other, and not to one that makes progress.
* A peer that has answered this one has priority over strangers, and a companion has priority over both.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from p2pavg.base.hosts import prefix_of


class TrustClass(IntEnum):
    """The standing of a peer. A connection of a higher standing never gives way to one of a lower."""

    STRANGER = 0
    ANSWERED = 1
    """The peer has answered a call of this one."""
    COMPANION = 2
    """The peer was named by this process' user, or was in a group with this peer."""


class ConnectionStage(IntEnum):
    """The progress of an inbound connection."""

    SILENT = 0
    """The first line of the protocol has not arrived."""
    SPEAKING = 1
    """The handshake is under way."""
    CONNECTED = 2
    """The peer has proved its identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The number of connections of each kind that are allowed.

    - ``connections``: libp2p connections in both directions. A swarm of 16 needs 15, and record calls need a few dozen.
      512 connections take 512 files and about 22 MB.
    - ``inbound``: connections that other peers made. The rest is for peers that this one dials.
    - ``per_host``, ``per_prefix``: inbound connections of one address, and of one /24 or /48, without companions. In a
      test swarm of 64 processes on one machine, each process has up to 126, two for each pair that dialled each other
      at once. A prefix may have half of all inbound connections.
    - ``per_peer``: connections of one identity. Two peers that dial each other at once have two, and a restart leaves
      one or two behind.
    - ``unfinished``, ``unfinished_per_host``, ``unfinished_per_prefix``: connections without a proved identity. trio
      accepts one connection each time that all tasks have had their turn, and a handshake takes about 30 such turns. So
      an honest peer finishes before 256 others have come, even from its own address.
    """

    connections: int = 512
    inbound: int = 384
    per_host: int = 128
    per_prefix: int = 192
    per_peer: int = 4
    unfinished: int = 512
    unfinished_per_host: int = 256
    unfinished_per_prefix: int = 384

    def scaled(self, factor: float) -> ConnectionLimits:
        """Return these limits times ``factor``, each at least 4, for a process that may open only few files."""
        names = [name for name in self.__slots__ if name != "per_peer"]
        return replace(self, **{name: max(4, int(getattr(self, name) * factor)) for name in names})


@dataclass(eq=False, slots=True)
class ConnectionArrival:
    """One connection, from the moment at which it was accepted or made."""

    host: str
    inbound: bool
    number: int
    prefix: str = field(init=False)
    stage: ConnectionStage = ConnectionStage.SILENT
    peer_id: str = ""

    def __post_init__(self) -> None:
        self.prefix = prefix_of(self.host)


class Admission:
    """The connections of this process, and the decisions about new ones.

    Args:
        limits: the number of connections that are allowed.
        known: the peers that are no strangers, and where they were met.
    """

    def __init__(self, limits: ConnectionLimits, known: Acquaintances) -> None:
        self.limits = limits
        self._known = known
        self._unfinished: dict[ConnectionArrival, None] = {}
        self._connected: dict[ConnectionArrival, None] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._unfinished) + len(self._connected)

    @property
    def unfinished(self) -> list[ConnectionArrival]:
        """The connections without a proved identity, the oldest first."""
        return list(self._unfinished)

    def arrive(self, host: str) -> tuple[ConnectionArrival, list[ConnectionArrival]]:
        """Count an inbound connection that was just accepted. Return it, and the connections to drop for it."""
        arrival = self._new(host, inbound=True)
        victims = []
        # One newcomer may need a place in its host's limit, its prefix's and the whole: each round frees one.
        while (victim := self._too_many_unfinished(arrival)) is not None:
            # Its place is free at once; the connection itself ends a little later.
            del self._unfinished[victim]
            victims.append(victim)
        self._unfinished[arrival] = None
        return arrival, victims

    def speaks(self, arrival: ConnectionArrival) -> None:
        """Note that a connection has sent the first line of its protocol."""
        arrival.stage = max(arrival.stage, ConnectionStage.SPEAKING)

    def connect(self, arrival: ConnectionArrival, peer_id: str) -> list[ConnectionArrival] | None:
        """Count a connection that has proved ``peer_id``. Return the connections to drop for it; ``None`` refuses it.

        A connection that was dropped during its handshake is refused.
        """
        if arrival not in self._unfinished:
            return None
        del self._unfinished[arrival]
        arrival.stage, arrival.peer_id = ConnectionStage.CONNECTED, peer_id
        victims: list[ConnectionArrival] = []
        for crowd, limit in self._crowds(arrival):
            # A victim of an earlier crowd leaves this one too, so one may be enough for all limits.
            if len(crowd := [other for other in crowd if other not in victims]) < limit:
                continue
            victim = self._who_gives_way(arrival, crowd)
            if victim is None:
                return None
            victims.append(victim)
        # Only after every crowd has a place: a newcomer that is refused costs no other connection.
        for victim in victims:
            del self._connected[victim]
        self._connected[arrival] = None
        return victims

    def dialled(self, host: str, peer_id: str) -> tuple[ConnectionArrival, list[ConnectionArrival]]:
        """Count a connection that this process made. Return it, and the connections to drop for it."""
        arrival = self._new(host, inbound=False)
        self._unfinished[arrival] = None
        victims = self.connect(arrival, peer_id)
        assert victims is not None  # an outbound connection is never refused
        return arrival, victims

    def leave(self, arrival: ConnectionArrival) -> None:
        """Forget a connection that has ended. Nothing happens if it was dropped before."""
        self._unfinished.pop(arrival, None)
        self._connected.pop(arrival, None)

    def _new(self, host: str, *, inbound: bool) -> ConnectionArrival:
        self._numbers += 1
        return ConnectionArrival(host, inbound, self._numbers)

    # -- unfinished

    def _too_many_unfinished(self, newcomer: ConnectionArrival) -> ConnectionArrival | None:
        limits, all_of_them = self.limits, self._unfinished
        at_host = [other for other in all_of_them if other.host == newcomer.host]
        # From the smallest source to the largest: an attacker's own connections give way before those of others.
        if len(at_host) >= limits.unfinished_per_host:
            return _oldest_of_the_fullest_stage(at_host)
        at_prefix = [other for other in all_of_them if other.prefix == newcomer.prefix]
        if len(at_prefix) >= limits.unfinished_per_prefix:
            return _oldest_of_the_fullest_stage(_of_the_greediest_host(at_prefix))
        if len(all_of_them) >= limits.unfinished:
            # These peers have proved no identity yet, so the hosts count at which known peers were met before.
            standings = {
                host: self._known.standing_at(host) for host in {other.host for other in all_of_them}
            }
            lowest = min(standings.values())
            strangers = [other for other in all_of_them if standings[other.host] == lowest]
            greedy = _of_the_greediest_host(_of_the_greediest_prefix(strangers))
            return _oldest_of_the_fullest_stage(greedy)
        return None

    # -- connected

    def _crowds(self, newcomer: ConnectionArrival) -> Iterable[tuple[list[ConnectionArrival], int]]:
        """Yield each crowd in which the newcomer needs a place, with its limit, which includes the newcomer."""
        limits, connected = self.limits, list(self._connected)
        # Also for outbound connections and companions: more than a few to one peer are left over from restarts.
        yield [other for other in connected if other.peer_id == newcomer.peer_id], limits.per_peer
        if newcomer.inbound:
            strangers = [
                other
                for other in connected
                if other.inbound and self._standing(other) is not TrustClass.COMPANION
            ]
            # Members of a group may be many behind one address, such as a cluster.
            if self._standing(newcomer) is not TrustClass.COMPANION:
                yield [other for other in strangers if other.host == newcomer.host], limits.per_host
                yield [other for other in strangers if other.prefix == newcomer.prefix], limits.per_prefix
            yield [other for other in connected if other.inbound], limits.inbound
        yield connected, limits.connections

    def _who_gives_way(
        self, newcomer: ConnectionArrival, crowd: list[ConnectionArrival]
    ) -> ConnectionArrival | None:
        """Return the connection that gives way; ``None`` if each one of the crowd has a better claim."""
        # A peer competes with itself only: its newest connection is the one that works.
        if all(other.peer_id == newcomer.peer_id for other in crowd):
            return min(crowd, key=_age)
        lowest = min(self._standing(other) for other in crowd)
        low = [other for other in crowd if self._standing(other) == lowest]
        greediest = _of_the_greediest_prefix(low)
        victim = min(_of_the_greediest_host(greediest), key=_age)
        mine = self._standing(newcomer)
        # This process wants what it dials itself, so that always finds a place.
        if mine > lowest or not newcomer.inbound:
            return victim
        if mine < lowest:
            return None
        # Among equals, a prefix with many connections gives way to one with few. Otherwise the newcomer's own prefix
        # makes room. If that has no connection either, the newcomer is refused.
        own_prefix = sum(other.prefix == newcomer.prefix for other in low)
        if own_prefix + 1 < len(greediest):
            return victim
        own = [other for other in low if other.prefix == newcomer.prefix]
        return min(_of_the_greediest_host(own), key=_age) if own else None

    def _standing(self, arrival: ConnectionArrival) -> TrustClass:
        return self._known.standing_of(arrival.peer_id)


class Acquaintances:
    """The peers that are not strangers, and the hosts at which peers were met. Bounded: the oldest are forgotten.

    Args:
        most: the number of peers of each standing, and of peers with hosts. A group has at most 128 members, and the
            record table holds at most 1024 contacts.
        most_hosts: the number of hosts of one peer. A travelling laptop has several.
    """

    def __init__(self, most: int = 1024, most_hosts: int = 8) -> None:
        self._most = most
        self._most_hosts = most_hosts
        self._known: dict[TrustClass, OrderedDict[str, None]] = {
            TrustClass.ANSWERED: OrderedDict(),
            TrustClass.COMPANION: OrderedDict(),
        }
        self._hosts: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        self._peers_at: dict[str, set[str]] = {}

    def remember(self, peer_id: str, standing: TrustClass) -> None:
        """Note that a peer has this standing, or a higher one."""
        if standing is not TrustClass.STRANGER:
            _put_last(self._known[standing], peer_id, self._most)

    def met(self, peer_id: str, host: str) -> None:
        """Note that a peer has proved its identity on a connection from or to this host."""
        hosts = self._hosts.setdefault(peer_id, OrderedDict())
        self._hosts.move_to_end(peer_id)
        # The reverse of the hosts of each peer: it is asked at each accepted connection, and must not search them all.
        self._peers_at.setdefault(host, set()).add(peer_id)
        for forgotten in _put_last(hosts, host, self._most_hosts):
            self._has_left(peer_id, forgotten)
        # Bounded: an attacker with many identities would fill the memory otherwise.
        while len(self._hosts) > self._most:
            oldest, its_hosts = self._hosts.popitem(last=False)
            for forgotten in its_hosts:
                self._has_left(oldest, forgotten)

    def _has_left(self, peer_id: str, host: str) -> None:
        self._peers_at[host].discard(peer_id)
        if not self._peers_at[host]:
            del self._peers_at[host]

    def has_met(self, peer_id: str, host: str) -> bool:
        """Return whether the peer was met at that host."""
        return host in self._hosts.get(peer_id, ())

    def has_met_anyone(self) -> bool:
        """Return whether any peer was met."""
        return bool(self._hosts)

    def standing_of(self, peer_id: str) -> TrustClass:
        """Return the standing of a peer."""
        for standing in (TrustClass.COMPANION, TrustClass.ANSWERED):
            if peer_id in self._known[standing]:
                return standing
        return TrustClass.STRANGER

    def standing_at(self, host: str) -> TrustClass:
        """Return the highest standing among the peers that were met at a host."""
        return max(map(self.standing_of, self._peers_at.get(host, ())), default=TrustClass.STRANGER)


def _put_last(kept: OrderedDict[str, None], name: str, most: int) -> list[str]:
    """Add a name as the newest one. Return the oldest names, which were forgotten for it."""
    kept[name] = None
    kept.move_to_end(name)
    return [kept.popitem(last=False)[0] for _ in range(len(kept) - most)]


def _age(arrival: ConnectionArrival) -> int:
    return arrival.number


def _oldest_of_the_fullest_stage(arrivals: list[ConnectionArrival]) -> ConnectionArrival:
    """Return the oldest connection of the stage with the most connections.

    Connections that stay in one stage on purpose fill that stage, and so give way to each other.
    """
    ((fullest, _),) = Counter(arrival.stage for arrival in arrivals).most_common(1)
    return min((arrival for arrival in arrivals if arrival.stage == fullest), key=_age)


def _of_the_greediest_prefix(arrivals: list[ConnectionArrival]) -> list[ConnectionArrival]:
    ((prefix, _),) = Counter(arrival.prefix for arrival in arrivals).most_common(1)
    return [arrival for arrival in arrivals if arrival.prefix == prefix]


def _of_the_greediest_host(arrivals: list[ConnectionArrival]) -> list[ConnectionArrival]:
    ((host, _),) = Counter(arrival.host for arrival in arrivals).most_common(1)
    return [arrival for arrival in arrivals if arrival.host == host]
