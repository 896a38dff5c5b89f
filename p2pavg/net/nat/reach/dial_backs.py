"""The results of dial-backs, and which endpoints they show to work. No I/O, no clock, no random source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from p2pavg.net.limits.sources import prefix_of

Endpoint = tuple[str, int]
"""A host at which other peers see this one, and a port."""

ENOUGH = 2
"""Peers that are asked about an endpoint, and failures that are believed while there are others to ask."""

# A port that works is checked again after 5 minutes. One that does not is checked after 2 minutes, because its user may
# be opening it now.
WORKS_SECONDS = 300.0
FAILS_SECONDS = 120.0
SAME_CHECK_SECONDS = 60.0  # within which the votes of one check arrive


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
        # Older ones count until there are ENOUGH new ones.
        new = {peer: vote for peer, vote in votes.items() if vote.at > now - SAME_CHECK_SECONDS}
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
        reached = any(vote.reached for vote in votes)
        return max(vote.at for vote in votes) + (WORKS_SECONDS if reached else FAILS_SECONDS)

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
