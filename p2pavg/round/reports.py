"""Tells the subscribers of an averager how its rounds end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import trio

from p2pavg.base.result import Failed, NoPeersCode, Success
from p2pavg.group.candidate import Candidate
from p2pavg.round.exchange import ExchangeOutcome
from p2pavg.round.rounds import RunAccusations
from p2pavg.runs.context import PeerContext
from p2pavg.telemetry.events import RoundEnded, RoundKind, Way
from p2pavg.telemetry.hub import Events

# Moments of a round.


class Timing(NamedTuple):
    """Moments of a round on trio's clock, in seconds."""

    started: float
    exchange_began: float


class RoundReports:
    """Makes events of the ends of rounds.

    Args:
        events: delivers them.
        context: of this peer.
        run: knows the peers that are excluded from it.
    """

    def __init__(self, events: Events, *, run_id: str, context: PeerContext, run: RunAccusations) -> None:
        self._events = events
        self._run_id = run_id
        self._peer_id = context.signer.peer_id
        self._wall_clock = context.wall_clock
        self._run = run

    def alone(self, reason: str, duration: float, code: NoPeersCode) -> None:
        """Report a round that found no group."""
        self._emit(result=RoundKind.NO_PEERS, reason=reason, code=code.value, duration=duration)

    def failed(self, failed: Failed, outcome: ExchangeOutcome, timing: Timing) -> None:
        """Report a round whose group came to no result here."""
        now, roster = trio.current_time(), outcome.roster
        self._emit(
            **self._exchanged(outcome, now),
            result=RoundKind.FAILED,
            reason=failed.reason,
            code=failed.code.value,
            peer=failed.peer,
            group_id=outcome.group_id.hex(),
            contributors=_ids(roster.contributors),
            auxiliaries=_ids(member for member in roster.members if member.auxiliary),
            lost=_lost(outcome),
            duration=now - timing.started,
            exchange_duration=now - timing.exchange_began,
        )

    def helped(self, outcome: ExchangeOutcome, timing: Timing) -> None:
        """Report a round in which this peer was an auxiliary."""
        now, roster, verdict = trio.current_time(), outcome.roster, outcome.verdict
        self._emit(
            **self._exchanged(outcome, now),
            result=RoundKind.SUCCESS if verdict is None else RoundKind.FAILED,
            reason="" if verdict is None else verdict.reason,
            code="" if verdict is None else verdict.code.value,
            peer=None if verdict is None else verdict.peer_id,
            group_id=outcome.group_id.hex(),
            contributors=_ids(roster.contributors),
            observers=_ids(member for member in roster.holders if member.peer_id in roster.observers),
            auxiliaries=_ids(member for member in roster.members if member.auxiliary),
            lost=_lost(outcome),
            duration=now - timing.exchange_began,  # an auxiliary may wait for its run for days
            exchange_duration=now - timing.exchange_began,
            samples=roster.total_weight if verdict is None else 0.0,
        )

    def succeeded(self, success: Success, outcome: ExchangeOutcome) -> None:
        """Report a round that was committed."""
        self._emit(
            **self._exchanged(outcome, trio.current_time()),
            result=RoundKind.SUCCESS,
            group_id=success.group_id,
            contributors=success.peers,
            observers=success.observers,
            auxiliaries=success.auxiliaries,
            lost=success.lost,
            clipped=success.clipped,
            duration=success.duration,
            exchange_duration=success.exchange_duration,
            samples=success.total_weight,
            own_samples=success.weights.get(self._peer_id, 0.0),
            metrics=success.metrics,
        )

    def _exchanged(self, outcome: ExchangeOutcome, now: float) -> dict[str, Any]:
        """Return the fields of the event that are the same for every round with a group."""
        return {
            "members": _ids(outcome.roster.members),
            "agreement_duration": 0.0 if outcome.held_at is None else now - outcome.held_at,
            "sent": outcome.sent,
            "received": outcome.received,
            "ways": self._ways(outcome),
        }

    def _emit(self, **fields: Any) -> None:
        """Tell the subscribers of the end of a round, whose event has these fields."""
        excluded = tuple(self._run.excluded)
        self._events.emit(
            RoundEnded(time=self._wall_clock(), run_id=self._run_id, excluded=excluded, **fields)
        )

    def _ways(self, outcome: ExchangeOutcome) -> Mapping[str, str]:
        others = (member.peer_id for member in outcome.roster.members if member.peer_id != self._peer_id)
        return {peer_id: str(_way(outcome, peer_id)) for peer_id in others}


def _way(outcome: ExchangeOutcome, peer_id: str) -> Way:
    if peer_id in outcome.relayed:
        return Way.RELAYED
    return Way.STREAM if peer_id in outcome.streamed else Way.LANE


def _lost(outcome: ExchangeOutcome) -> dict[str, str]:
    return {verdict.peer_id: verdict.reason for verdict in outcome.lost if verdict.peer_id is not None}


def _ids(members: Iterable[Candidate]) -> tuple[str, ...]:
    return tuple(member.peer_id for member in members)
