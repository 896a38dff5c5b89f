"""Leaves members behind that would keep a whole group from ending in time, while there is time for another attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import trio

from p2pavg.allreduce.attempt import Attempt
from p2pavg.base.result import FailedCode
from p2pavg.consensus.member import RoundPhase
from p2pavg.consensus.votes import GivenUp
from p2pavg.round.voting import Voting

# Left for another attempt, however short the first was: finding out takes round trips.
LAST_ATTEMPT_SECONDS = 5.0
STAR_PATIENCE = 0.4
"""Part of a round's time after which the reducer of a star, or a member of a site, leaves a slow contributor behind.
The leader acts at half of the time: it cannot see whether the reducer is slow, or waits."""

_LATE = "it is too slow for the others to end in time"


class ObservedExchange(Protocol):
    """The exchange whose members are watched."""

    attempt: Attempt | None
    """The one that runs."""
    held_at: float
    """Trio's clock when this member held the whole result; 0 before."""


class SlowMembers:
    """The slow members of one exchange, as one member sees them.

    Args:
        positions: of the members in the group's roster, by peer id.
        timeout: seconds that the round may take.
        is_star: true if one member reduces for all.
        has_sites: true if relays reduce for their sites, so that only they see the contributions of a site.
    """

    def __init__(
        self,
        voting: Voting,
        exchange: ObservedExchange,
        positions: Mapping[str, int],
        timeout: float,
        *,
        is_star: bool,
        has_sites: bool = False,
    ) -> None:
        self._voting = voting
        self._positions = positions
        self._timeout = timeout
        self._exchange = exchange
        self._is_star = is_star
        self._has_sites = has_sites

    async def leave_behind(self, began: float) -> None:
        """Drop slow members of a round that began at this time.

        A leader drops two kinds of members. With half of the time gone: the slowest member that still owes more
        than half of its parts. Once the leader holds the whole result: the members that do not, as late as another
        attempt allows. In a star, the reducer drops a contributor that the others wait for before that. So do the
        members of a site: those of other sites see only that the sums of the site do not come.
        """
        before = None
        if self._is_star or self._has_sites:
            await trio.sleep_until(began + self._timeout * STAR_PATIENCE)
            before = self._exchange.attempt
            self._leave_a_contributor()
        await trio.sleep_until(began + self._timeout / 2)
        if self._voting.leads(RoundPhase.EXCHANGING):
            if before is not None and self._exchange.attempt is not before:
                return  # a contributor was left behind a moment ago
            self._leave_the_slowest()
        elif (
            self._voting.leads(RoundPhase.HOLDING)
            and self._voting.reduces_all
            and 2 * len(self._lacking()) > self._voting.member.size - 1
        ):
            self._give_up()
            return
        # Also one that gathers now, or follows: it may lead and hold a result then.
        await self._leave_those_that_lack_the_result(began)

    def _leave_a_contributor(self) -> None:
        attempt = self._exchange.attempt
        if (
            attempt is None
            or not (self._voting.reduces_all or self._has_sites)
            or self._voting.member.phase is not RoundPhase.EXCHANGING
        ):
            return
        slow = attempt.ledger.holds_up()
        if slow is not None and attempt.ledger.is_behind(slow):
            self._voting.lost(self._positions[slow], _LATE, reachable=True)

    def _leave_the_slowest(self) -> None:
        attempt = self._exchange.attempt
        slowest = None if attempt is None else attempt.ledger.slowest()
        if slowest is None:
            return
        if self._voting.reduces_all:
            self._give_up()
        else:
            # In a star as silent: a reducer that announced too much would be elected again, and cost the next round.
            self._voting.lost(self._positions[slowest], _LATE, silent=self._is_star, reachable=True)

    def _give_up(self) -> None:
        """Let the others go on without this member. A leader cannot leave itself behind, and all others wait for it."""
        reason = (
            "this peer's link is too slow to average for its group; announce what it carries as bandwidth"
        )
        self._voting.happen(GivenUp(reason, FailedCode.TIMED_OUT))

    def _lacking(self) -> list[int]:
        """Return the members that have not said that they hold the result. This one leads."""
        member = self._voting.member
        return sorted(member.begun.view - {position for position, _ in member.pending.held})

    async def _leave_those_that_lack_the_result(self, began: float) -> None:
        held_at = self._exchange.held_at
        spare = max(1.5 * (held_at - began), min(LAST_ATTEMPT_SECONDS, self._timeout / 4))
        await trio.sleep_until(began + self._timeout - spare)
        if self._voting.leads(RoundPhase.HOLDING) and self._exchange.held_at - began < self._timeout / 2:
            for position in self._lacking():
                # Silent, because a member that never says that it holds the result costs each round its time.
                self._voting.lost(position, _LATE, silent=True, reachable=True)
