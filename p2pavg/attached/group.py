"""When the processes of one peer begin a round together, and with how many other peers. No I/O, no clock.

The processes that are attached to one peer are one member of a group. Those with the same state go into a round
together. A process says which peers and processes it expects, as its optimizer has decided; a process that says nothing
expects all processes of its run. The round begins when all expected processes are there, or ``match_timeout`` after the
first one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from p2pavg.attached.messages import Step, process_id
from p2pavg.base.limits import MAX_GROUP_SIZE

MAX_GONE = 1024
"""Limit of the remembered names; one that is forgotten may be waited for once more."""


@dataclass(frozen=True, slots=True)
class Request:
    """The request of one process."""

    step: Step
    since: float
    siblings: frozenset[str] | None
    """Names of the expected processes of this peer; ``None``: all."""
    others: frozenset[str]
    """Ids of the expected other peers, if ``siblings`` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Begin a round now."""

    members: tuple[str, ...]
    """Names of the processes, sorted: the order in which their contributions are added."""
    contributors: tuple[str, ...]
    state: bytes
    remote: int
    """Number of other peers that the round aims at; 0 for a round among these processes alone."""
    remote_contributors: int
    """Number of them without whose contributions the group is not complete."""
    target: int
    """Processes and other peers together."""
    others: frozenset[str] = frozenset()
    """Ids of the other peers that the processes expect, if all of them have said so."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait."""

    until: float
    """The next moment at which a round may begin without a new event."""
    reasons: Mapping[str, str]
    """For each process that waits, what it waits for."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End a process's request: it stayed alone."""

    name: str
    reason: str


Decision: TypeAlias = Begin | Gather | GiveUp


@dataclass(slots=True)
class LocalGroup:
    """The processes of one run at one peer."""

    group_size: int
    min_group_size: int
    match_timeout: float
    seats: dict[str, Request | None] = field(default_factory=dict)
    """Each process that takes part, with its request."""
    gone: set[str] = field(default_factory=set)
    """Names of processes that have left. One that was never here may be on its way: the peer was started again."""

    def join(self, name: str) -> None:
        """Note a process that may take part in rounds from now on."""
        self.seats.setdefault(name, None)
        self.gone.discard(name)

    def leave(self, name: str) -> None:
        """Forget a process and its request."""
        if name in self.seats:
            del self.seats[name]
            if len(self.gone) >= MAX_GONE:
                self.gone.pop()
            self.gone.add(name)

    def ask(self, name: str, step: Step, peer_id: str, now: float) -> None:
        """Note the request of a process.

        Args:
            peer_id: this peer; the ids of its processes begin with it.
        """
        prefix = process_id(peer_id, "")
        siblings = frozenset(i.removeprefix(prefix) for i in step.expected if i.startswith(prefix)) - {name}
        others = frozenset(text for text in step.expected if not text.startswith(prefix))
        self.seats[name] = Request(step, now, siblings if step.hinted else None, others)

    def cancel(self, name: str) -> None:
        """Forget the request of a process, which stays attached."""
        if name in self.seats:
            self.seats[name] = None

    def decide(self, now: float) -> Decision:
        """Decide what happens now; the requests of a round that begins stay until :meth:`cancel`."""
        asking = {name: request for name, request in self.seats.items() if request is not None}
        until = math.inf
        reasons: dict[str, str] = {}
        for state in dict.fromkeys(r.step.state for r in sorted(asking.values(), key=lambda r: r.since)):
            party = {name: request for name, request in asking.items() if request.step.state == state}
            awaited = self._awaited(party) - asking.keys()
            due = min(request.since for request in party.values()) + self.match_timeout
            if awaited and now < due:
                until = min(until, due)
                reasons |= dict.fromkeys(party, _waiting_for(awaited))
                continue
            return self._begin(party, awaited)
        return Gather(until, reasons)

    def _awaited(self, party: Mapping[str, Request]) -> frozenset[str]:
        """Return the processes that are expected, and have not left."""
        expected: set[str] = set()
        for request in party.values():
            expected |= self.seats.keys() if request.siblings is None else request.siblings
        return frozenset(expected - self.gone) - party.keys()

    def _begin(self, party: Mapping[str, Request], awaited: frozenset[str]) -> Decision:
        members = tuple(sorted(party))
        contributors = tuple(name for name in members if not party[name].step.observes)
        remote = self._remote(party)
        if len(members) == 1 and not remote:
            if awaited:
                [name] = members
                return GiveUp(name, f"{_waiting_for(awaited)}, which did not come")
            remote = max(max(r.step.target for r in party.values()) or self.group_size, 2) - 1
        remote = max(remote, self.min_group_size - len(members), 0 if contributors else 1)
        wanted = max(request.step.contributors for request in party.values())
        return Begin(
            members=members,
            contributors=contributors,
            state=party[members[0]].step.state,
            remote=min(remote, MAX_GROUP_SIZE - 1),
            remote_contributors=min(max(wanted - len(contributors), 0), remote),
            target=len(members) + remote,
            others=self._others(party),
        )

    def _others(self, party: Mapping[str, Request]) -> frozenset[str]:
        """Return the ids of the other peers that a party expects; none if one of its processes has not said so."""
        if any(request.siblings is None for request in party.values()):
            return frozenset()
        return frozenset().union(*(request.others for request in party.values()))

    def _remote(self, party: Mapping[str, Request]) -> int:
        if all(request.siblings is not None for request in party.values()):
            return len(self._others(party))
        target = max(request.step.target for request in party.values()) or self.group_size
        return max(target - len(party), 0)

    def may_average_alone(self, plan: Begin) -> bool:
        """Return whether the processes of a round average among themselves if no other peer comes."""
        return len(plan.members) >= max(self.min_group_size, 2) and bool(plan.contributors)


def _waiting_for(awaited: frozenset[str]) -> str:
    names = ", ".join(sorted(awaited))
    return f"waiting for the process {names}" if len(awaited) == 1 else f"waiting for the processes {names}"
