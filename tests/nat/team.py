"""Peers of a lab that average with each other, and what their reports prove."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.nat.crew import Crew, Event, Process
from tests.nat.lab import Host, Kind
from tests.nat.namespaces import LabError
from tests.nat.routers import FORWARDED_PORT

DIRECT, MAPPED, PUNCHED, RELAYED = "direct", "mapped", "punched", "relayed"
WAYS = (DIRECT, MAPPED, PUNCHED, RELAYED)
"""The ways in which two peers are connected, the best first."""

CONFIG = {
    "group_size": 2,
    "min_group_size": 2,
    "match_timeout": 15.0,
    "exchange_timeout": 30.0,
    "compression": None,  # the mean of the values is exact
}
_POLL_SECONDS = 0.05
_TOLERANCE = 1e-5
_runs = itertools.count()


@dataclass
class Member:
    """One peer, with all that it has reported so far."""

    process: Process
    value: float
    peer_id: str = ""
    rounds: list[Event] = field(default_factory=list)
    reachabilities: list[Event] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Settings that this version of p2pavg does not know."""

    @property
    def host(self) -> Host:
        """The host of the peer."""
        return self.process.host

    @property
    def successes(self) -> list[Event]:
        """The rounds that ended with a ``Success``."""
        return [round_ for round_ in self.rounds if round_["kind"] == "Success"]

    @property
    def reasons(self) -> list[str]:
        """The results of the other rounds, with their reasons."""
        return [f"{found['kind']}: {found['reason']}" for found in self.rounds if found["kind"] != "Success"]

    @property
    def sentence(self) -> str:
        """The peer's last sentence on its reachability; empty if there was none."""
        return str(self.reachabilities[-1]["sentence"]) if self.reachabilities else ""

    def poll(self) -> None:
        """Take in what was reported meanwhile."""
        for event in self.process.events():
            match event["event"]:
                case "open":
                    self.peer_id, self.unknown = event["peer_id"], event["unknown"]
                case "round":
                    self.rounds.append(event)
                case "reachability":
                    self.reachabilities.append(event)


class Team:
    """Peers that average with each other, in a run of their own."""

    def __init__(
        self,
        crew: Crew,
        bootstrap: Sequence[str],
        *,
        elements: int = 10_000,
        pause: float = 0.1,
        **config: Any,
    ) -> None:
        self._crew = crew
        self._settings = {
            "bootstrap": list(bootstrap),
            "elements": elements,
            "pause": pause,
            "config": {**CONFIG, "run_id": f"lab-{next(_runs)}", **config},
        }
        self.members: list[Member] = []

    def add(self, host: Host, **settings: Any) -> Member:
        """Start a peer at a host. Each peer contributes another value."""
        value = 1.0 + len(self.members) ** 2
        process = self._crew.worker(host, **self._settings, value=value, **settings)
        member = Member(process, value)
        self.members.append(member)
        return member

    def poll(self) -> None:
        """Take in what all peers have reported."""
        for member in self.members:
            member.poll()

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Take in reports for some time, or until something is so; return whether it is.

        Raises:
            LabError: a peer has ended by itself.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if until():
                return True
            for member in self.members:
                if member.process.ended and not member.process.was_killed:
                    raise LabError(f"a peer has ended by itself:\n{member.process.last_words()}")
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def all_open(self) -> bool:
        """Return whether each peer has joined the network."""
        return all(member.peer_id for member in self.members)

    def all_succeeded(self, count: int) -> Callable[[], bool]:
        """Return a condition: each peer has so many successful rounds more than now."""
        wanted = [(member, len(member.successes) + count) for member in self.members]
        return lambda: all(len(member.successes) >= least for member, least in wanted)

    def end(self) -> None:
        """Kill the peers."""
        for member in self.members:
            member.process.kill()

    def log(self) -> str:
        """Return the last lines of all logs."""
        return "\n".join(
            f"--- {member.host.site.kind} {member.host.address}\n{member.process.last_words()}"
            for member in self.members
        )

    def wrong(self) -> list[str]:
        """Return each result that is not the mean of its peers, or that differs between two members."""
        values = {member.peer_id: member.value for member in self.members}
        held: dict[str, tuple[float, dict[str, float]]] = {}
        found = []
        for member in self.members:
            for result in member.successes:
                mean = _mean(result["weights"], values)
                if not math.isclose(result["averaged"], mean, rel_tol=_TOLERANCE) or not result["is_even"]:
                    found.append(f"{member.peer_id} has {result['averaged']}, and the mean is {mean}")
                same = (result["averaged"], result["weights"])
                if held.setdefault(result["group_id"], same) != same:
                    found.append(f"{member.peer_id} has another result than its group")
        return found


def _mean(weights: dict[str, float], values: dict[str, float]) -> float:
    return sum(weight * values[peer] for peer, weight in weights.items()) / sum(weights.values())


def way(first: Host, second: Host) -> str:
    """Return the way in which two hosts are connected, as their operating systems show it: one of :data:`WAYS`.

    A connection to a public address or a forwarded port is direct, one to a port that a router was asked for is mapped,
    and one to any other port of a router was punched. Without any connection from one to the other, a third peer
    relays.
    """
    if first.site is second.site:
        return DIRECT if _is_connected(first, second.address) else RELAYED
    ways = []
    for here, there in ((first, second), (second, first)):
        for _, _, host, port in here.connections():
            if host == there.site.public:
                ways.append(_way_to(there, port))
            elif there.address6 and host == there.address6:
                ways.append(DIRECT if there.site.kind is Kind.PUBLIC else PUNCHED)
    return min(ways, key=WAYS.index, default=RELAYED)


def _is_connected(here: Host, address: str) -> bool:
    return any(host == address for _, _, host, _ in here.connections())


def _way_to(host: Host, port: int) -> str:
    if host.site.kind is Kind.PUBLIC or (host.is_forwarded and port == FORWARDED_PORT):
        return DIRECT
    return MAPPED if port in host.site.mapped_ports() else PUNCHED
