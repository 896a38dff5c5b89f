"""The ways of contributions and averages between the members of one attempt. Pure: no I/O, no clock.

In a butterfly, all members are one *site*: each contributor sends each reducer its contribution, and each reducer
sends each holder its averages. With several sites (:mod:`p2pavg.group.roster`) a share has a *relay* in each site but
its reducer's:

1. A contributor sends the reducers of its own site, and the relays there, its contributions.
2. A relay reduces those of its site, and sends the reducer the weighted mean of the site.
3. The reducer averages the contributions of its own site and the means of the others, by the weights that the members
   have signed. No weight is sent.
4. It sends the averages to the holders of its site and to the relays, which pass them on as the same bytes.

A member's *tasks* are the parts that it reduces: as a relay first, then those of its own share. This order is that of
the parts on every lane, and the reason for which no two members wait for each other: what a relay reduces waits for
contributions only, and they are the first on their lanes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from p2pavg.group.roster import Roster, Sites, relays_of
from p2pavg.group.shares import SharePart


class Routes:
    """Ways between the members of one attempt, named by their peer ids.

    Args:
        roster: of the attempt.
        parts: of each member's share.
        sites: of the roster's members; ``None``: they are one site.
    """

    def __init__(
        self, roster: Roster, parts: Mapping[str, Sequence[SharePart]], sites: Sites | None = None
    ) -> None:
        members = roster.members
        sites = sites or (tuple(range(len(members))),)
        self._parts = parts
        self._sites = [[members[position] for position in site] for site in sites]
        self._site = {members[at].peer_id: number for number, site in enumerate(sites) for at in site}
        contributors = {member.peer_id for member in roster.contributors}
        self._weights = [
            {each.peer_id: each.weight for each in site if each.peer_id in contributors}
            for site in self._sites
        ]
        self._holders = {member.peer_id for member in roster.holders}
        found = relays_of(sites, roster.shares, [member.peer_id in self._holders for member in members])
        self._relays = {
            (members[reducer].peer_id, number): members[relay].peer_id
            for (reducer, number), relay in found.items()
        }
        self._relayed: dict[str, list[str]] = {member.peer_id: [] for member in members}
        for (reducer, _), relay in self._relays.items():
            self._relayed[relay].append(reducer)
        self._tasks: dict[str, tuple[SharePart, ...]] = {}

    def relayed_by(self, peer_id: str) -> Sequence[str]:
        """Return the reducers whose shares a member relays, in the order of its tasks."""
        return self._relayed[peer_id]

    def sums_of(self, peer_id: str) -> Iterator[tuple[str, SharePart]]:
        """Yield the tasks that a member has as a relay: each share's reducer, and the part of its share."""
        if self._weights[self._site[peer_id]]:
            for reducer in self.relayed_by(peer_id):
                for part in self._parts[reducer]:
                    yield reducer, part

    def tasks_of(self, peer_id: str) -> tuple[SharePart, ...]:
        """Return the parts that a member reduces, numbered: those that it relays, then those of its own share."""
        if peer_id not in self._tasks:
            parts = (*(part for _, part in self.sums_of(peer_id)), *self._parts[peer_id])
            self._tasks[peer_id] = tuple(replace(part, index=index) for index, part in enumerate(parts))
        return self._tasks[peer_id]

    def first_own(self, peer_id: str) -> int:
        """Return the number of the first task of a member's own share."""
        return sum(1 for _ in self.sums_of(peer_id))

    def feeders_of(self, peer_id: str) -> list[str]:
        """Return the other contributors of a member's site: they send it their contributions to all of its tasks."""
        return [each for each in self._weights[self._site[peer_id]] if each != peer_id]

    def senders_of_sums(self, reducer: str) -> list[str]:
        """Return the members that send a reducer the mean of their site."""
        return [
            relay for (of, number), relay in self._relays.items() if of == reducer and self._weights[number]
        ]

    def weights_at(self, peer_id: str) -> tuple[dict[str, float], dict[str, float]]:
        """Return the weights with which a member reduces, by sender: as a relay, and for its own share."""
        own = self._weights[self._site[peer_id]]
        sums = {
            relay: math.fsum(self._weights[number].values())
            for (reducer, number), relay in self._relays.items()
            if reducer == peer_id and self._weights[number]
        }
        return own, own | sums

    def contributions(self, sender: str, receiver: str) -> Sequence[SharePart]:
        """Return the tasks of a member to which another one sends it a contribution, or the mean of its site."""
        if self._site[sender] == self._site[receiver]:
            return self.tasks_of(receiver) if sender in self._weights[self._site[sender]] else ()
        if sender in self.senders_of_sums(receiver):
            return self.tasks_of(receiver)[self.first_own(receiver) :]
        return ()

    def first_sum(self, relay: str, reducer: str) -> int:
        """Return the number of the first task that a relay has for a reducer."""
        return next(index for index, (of, _) in enumerate(self.sums_of(relay)) if of == reducer)

    def server(self, reducer: str, receiver: str) -> str:
        """Return the member that sends a receiver the averages of a reducer's share."""
        number = self._site[receiver]
        relay = self._relays.get((reducer, number), reducer)
        return reducer if relay == receiver else relay

    def averages(self, sender: str, receiver: str) -> list[str]:
        """Return the reducers whose averages a member sends to another one: its own first, then those it relays."""
        if receiver not in self._holders:
            return []
        reducers = [sender, *self.relayed_by(sender)]
        return [
            reducer
            for reducer in reducers
            if reducer != receiver and self._parts[reducer] and self.server(reducer, receiver) == sender
        ]

    def cut_off(self, receiver: str, lost: Collection[str]) -> list[str]:
        """Return the reducers whose averages a member gets from none but lost members, in the roster's order."""
        return [
            reducer
            for reducer, parts in self._parts.items()
            if parts and (reducer in lost or self.server(reducer, receiver) in lost)
        ]

    def elements(self, peer_id: str) -> int:
        """Return the number of values that a member sends and receives in an attempt without losses."""
        total = 0
        for other in self._site:
            if other != peer_id:
                for sender, receiver in ((peer_id, other), (other, peer_id)):
                    total += sum(part.elements for part in self.contributions(sender, receiver))
                    total += sum(
                        part.elements
                        for reducer in self.averages(sender, receiver)
                        for part in self._parts[reducer]
                    )
        return total
