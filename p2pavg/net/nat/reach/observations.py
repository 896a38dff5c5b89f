"""The hosts at which other peers see this one, and which of them are believed. No I/O, no clock, no random source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction

from p2pavg.net.limits.dial_policy import is_private
from p2pavg.net.limits.sources import parse_host, prefix_of

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
