"""The rounds of one run: what they share, and which peers the next round avoids or prefers."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import trio

from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.reduction import RoundFault
from p2pavg.base.limits import MAX_BACKOFF_SECONDS
from p2pavg.base.result import NoPeersCode
from p2pavg.consensus.failure_detector import Silences
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.round.audits import Finding
from p2pavg.round.exchange import Exchange, ExchangeOutcome
from p2pavg.verification.audit.evidence import MAX_EVIDENCE_BYTES
from p2pavg.verification.audit.task import Lie

logger = logging.getLogger(__name__)

MAX_TELLING = 8  # ended rounds whose members are still being told the outcome
MAX_STRUCK = 1024  # peers whose strikes are remembered
UNANSWERED_SECONDS = 30.0
"""A peer is not met for four times as long after its second unanswered audit, and then for twice as long each time."""


class Strikes:
    """Counts of what peers did wrong, by peer id. The peer whose last strike is oldest is forgotten."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, peer_id: str) -> int:
        """Count a strike of a peer, and return how many it has."""
        count = self._counts[peer_id] = self._counts.pop(peer_id, 0) + 1
        if len(self._counts) > MAX_STRUCK:
            del self._counts[next(iter(self._counts))]
        return count

    def forgive(self, peer_id: str) -> None:
        """Forget the strikes of a peer."""
        self._counts.pop(peer_id, None)


def pause(seconds: float, strikes: int) -> float:
    """Return for how long a peer with so many strikes is not met: twice as long with each of them."""
    return min(seconds * 2.0 ** min(strikes, 10), MAX_BACKOFF_SECONDS)


class Alone(NamedTuple):
    """The reasons why peers of the run may be there and yet not meet this one."""

    reason: str = ""
    """In words; empty if nothing is known."""
    code: NoPeersCode = NoPeersCode.NO_PEER_READY


class RunPresence(Protocol):
    """This peer as the others of a run see it, and its view of them."""

    async def why_alone(self) -> Alone:
        """Return why peers of the run may be there and yet not meet this one."""

    async def withdraw(self) -> None:
        """Withdraw what this peer has published."""


class RunAccusations(Protocol):
    """The accusations among the peers of a run."""

    @property
    def excluded(self) -> Mapping[str, str]:
        """The reason for which each excluded peer is excluded, by peer id."""

    def accuse(self, evidence: bytes) -> None:
        """Verify evidence that a member lied, and tell the run. Returns at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """Sizes and times of a run's rounds.

    Args:
        run_id: names the run in the log.
        target: members that a round aims at.
        minimum: members that must hold a result, this peer included.
        exchange_timeout: seconds that an exchange may take.
        max_share: elements that this peer reduces at most.
    """

    run_id: str
    target: int
    minimum: int
    exchange_timeout: float
    max_share: float = math.inf


class Rounds:
    """The rounds of one run of this peer.

    Args:
        tails: nursery that outlives every result: an exchange tells the other members there how it ended.
        run: takes evidence that a member lied.
        presence: of a peer that averages; an auxiliary publishes nothing.
    """

    def __init__(
        self,
        context: RunContext,
        matchmaker: Matchmaker,
        settings: RoundSettings,
        tails: trio.Nursery,
        run: RunAccusations,
        presence: RunPresence | None = None,
    ) -> None:
        self.context = context
        self.matchmaker = matchmaker
        self.settings = settings
        self._run = run
        self._presence = presence
        self.silences = Silences()
        """Silences of other members in the rounds so far."""
        self._tails = tails
        self._telling: deque[Exchange] = deque()
        self._stalls = Strikes()  # since a peer was in a round that it did not stall
        self._unanswered = Strikes()  # audits in a row that a peer has not answered
        self._cheated = Strikes()  # contributions of a peer that its samples do not give

    async def hold(self, exchange: Exchange) -> ExchangeOutcome:
        """Run an exchange, and learn from its outcome. It goes on telling the others after this has returned."""
        await self._tails.start(exchange.run)
        outcome = exchange.take_outcome()
        self._telling.append(exchange)
        if len(self._telling) > MAX_TELLING:
            self._telling.popleft().end()
        for verdict in outcome.lost:
            self._avoid(verdict)
        if outcome.verdict is None:
            self._prefer(outcome.roster, outcome.lost)
        return outcome

    async def why_alone(self) -> Alone:
        """Return why peers of the run may be there and yet not meet this one."""
        return Alone() if self._presence is None else await self._presence.why_alone()

    async def leave(self) -> None:
        """Withdraw what this peer has published of the run."""
        if self._presence is not None:
            await self._presence.withdraw()

    def accuse(self, evidence: bytes) -> None:
        """See :class:`~p2pavg.round.audits.PeerJudge`."""
        self._run.accuse(evidence)

    def audited(self, peer_id: str, finding: Finding) -> None:
        """Learn from an audit. A peer that lied is not met again; nor, for a while, one that answers no audits.

        An audit may go unanswered because that peer has just left, so the first one does not count.
        """
        if finding is None:
            self._unanswered.forgive(peer_id)
        elif isinstance(finding, Lie):
            logger.warning("%s sent a false average: %s", peer_id, finding.reason)
            if len(finding.evidence) <= MAX_EVIDENCE_BYTES:
                self.accuse(finding.evidence)
            else:
                logger.warning("its evidence has %d bytes, too many to tell the run", len(finding.evidence))
            self.matchmaker.ban(peer_id, finding.reason, MAX_BACKOFF_SECONDS)
        else:
            logger.info("%s: %s", peer_id, finding)
            if (strikes := self._unanswered.add(peer_id)) > 1:
                reason = f"{strikes} audits without an answer: {finding}"
                self.matchmaker.ban(peer_id, reason, pause(UNANSWERED_SECONDS, strikes))

    def rechecked(self, peer_id: str, why: str) -> None:
        """Learn that a peer's contribution is not what its samples give.

        No other member can be shown it, and the first time may have a reason. So it counts as silence in audits does,
        and is not forgotten: a peer that cheats now and then has good rechecks, too.
        """
        logger.warning("%s: %s", peer_id, why)
        if (strikes := self._cheated.add(peer_id)) > 1:
            reason = f"{strikes} contributions that its samples do not give: {why}"
            self.matchmaker.ban(peer_id, reason, pause(UNANSWERED_SECONDS, strikes))

    def _prefer(self, roster: Roster, lost: Iterable[RoundFault]) -> None:
        """Forget the stalls of members that finished a round, and ask these members first from now on."""
        gone = {verdict.peer_id for verdict in lost}
        finished = [member for member in roster.members if member.peer_id not in gone]
        for member in finished:
            self._stalls.forgive(member.peer_id)
        self.matchmaker.finished_with(finished)

    def _avoid(self, verdict: RoundFault) -> None:
        """Ban a member that this peer itself saw break the protocol, or stall round after round."""
        if verdict.peer_id is None:
            return
        if verdict.hostile:
            self.matchmaker.ban(verdict.peer_id, verdict.reason, MAX_BACKOFF_SECONDS)
        elif verdict.seconds:
            # One silence is a hiccup, such as a laptop that was closed for a moment. A whole round's time is not.
            strikes = self._stalls.add(verdict.peer_id)
            if strikes > 1 or verdict.seconds >= self.settings.exchange_timeout:
                self.matchmaker.ban(verdict.peer_id, verdict.reason, pause(verdict.seconds, strikes))
