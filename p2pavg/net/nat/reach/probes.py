"""The results of whoami probes, and the kind of router that they show. No I/O, no clock, no random source."""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.net.limits.sources import prefix_of
from p2pavg.net.nat.reach.reachability import Barrier

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
