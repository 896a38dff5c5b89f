"""One round: a contribution is taken, a group is found, parts are exchanged, and the result waits to be collected."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import trio

from p2pavg.allreduce.attempt import AttemptTools
from p2pavg.allreduce.lobby import ExpectedGroup, Lobby
from p2pavg.allreduce.reduction import Verdict
from p2pavg.config import AveragingConfig
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.candidate import Candidate, link_of
from p2pavg.group.milestones import OnMilestone
from p2pavg.group.roster import Roster
from p2pavg.group.shares import bound_seconds, fp32_bytes, share_bounds
from p2pavg.matchmaking.actions import GaveUp, Report
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.net.transport import Transport
from p2pavg.result import EXCHANGES, Failed, InProgress, NoPeers, RoundResult, Success, Tensors
from p2pavg.round.exchange import Exchange, Outcome
from p2pavg.vector.accumulation import Accumulation, Contribution, Schema
from p2pavg_compression import Codec

logger = logging.getLogger(__name__)

WARN_SECONDS = 10.0  # longer than peers that are there need to find each other
MAX_WARN_SECONDS = 600.0  # between two warnings, each pause twice as long as the one before
MAX_TELLING = 8  # rounds that have ended, and whose members are still being told so
MAX_STALLED = 1024  # peers whose stalls are remembered; the one whose last stall is oldest is forgotten
BAN_SECONDS = 600.0  # a peer that broke the protocol is not met again for this long


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTools:
    """What every round of one averager uses."""

    config: AveragingConfig
    transport: Transport
    matchmaker: Matchmaker
    lobby: Lobby
    accumulation: Accumulation
    attempt: AttemptTools
    on_milestone: OnMilestone
    meter: BandwidthMeter
    """What this peer's link carries, measured in rounds."""
    tails: trio.Nursery
    """Outlives every result: what the others still have to hear."""
    cut_shares: Callable[[Sequence[Candidate]], tuple[int, ...]]
    """What each of some members reduces."""
    telling: deque[Exchange] = field(default_factory=deque)
    """The last exchanges that may still tell others how they ended."""
    stalled: dict[str, int] = field(default_factory=dict)
    """How often each peer has stalled a round of this averager, since it was in one that it did not stall."""
    why_alone: Callable[[], Awaitable[str]]
    """Why peers of the run may be there and yet not meet this one; empty when there is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What the caller wants of one round."""

    state: bytes = b""
    observes: bool = False
    target: int | None = None
    """Members to aim at; ``None``: what the config says."""


def too_slow_for(roster: Roster, codec: Codec, timeout: float) -> str:
    """Say that a round cannot end in time at the bandwidths that its members announced; empty when it can.

    The round is tried all the same: an announced bandwidth may be wrong, and a member could lie about its own.

    Args:
        timeout: seconds that the exchange may take.
    """
    links = [link_of(member) for member in roster.members]
    needed = bound_seconds(codec.encoded_nbytes(sum(roster.shares)), links)
    if needed <= timeout:
        return ""
    slowest = min(roster.members, key=lambda member: member.bandwidth)
    return (
        f"the round needs at least {needed:.0f} s at the bandwidths that its members announced (the least is"
        f" {slowest.bandwidth:g} Mbit/s, of {slowest.peer_id}), and exchange_timeout is {timeout:g} s:"
        " give it more time, or use a codec that takes fewer bytes"
    )


class Round:
    """A round from its start to its result."""

    def __init__(
        self, tools: RoundTools, plan: RoundPlan, schema: Schema, contribution: Contribution | None
    ) -> None:
        self._tools = tools
        self._plan = plan
        self._schema = schema
        self._contribution = contribution
        self._started = trio.current_time()
        self._roster: Roster | None = None
        self._group: ExpectedGroup | None = None
        self._report: Report | None = None
        self._changed = trio.Event()
        self._looking = trio.CancelScope()
        self._why_stopped = ""
        self.result: RoundResult | None = None
        self.scope = trio.CancelScope()
        """Cancel it to end the round; it may not have begun yet."""

    @property
    def state(self) -> bytes:
        """What its tensors belong to."""
        return self._plan.state

    async def changed(self) -> None:
        """Until there is a result, or a match timeout has passed."""
        await self._changed.wait()

    def take_report(self) -> InProgress | None:
        """How far the round is, once at the end of each match timeout."""
        if self._report is None:
            return None
        reason, self._report, self._changed = self._report.reason, None, trio.Event()
        return self.progress(reason)

    def progress(self, reason: str = "") -> InProgress:
        """How far the round is."""
        if self._roster is not None:
            ready, reason = len(self._roster.holders), reason or EXCHANGES
        else:
            ready, reason = self._tools.matchmaker.ready_peers, reason or "a group is being formed"
        target = self._plan.target or self._tools.config.group_size
        return InProgress(ready_peers=ready, target_size=target, reason=reason)

    def cancel_matchmaking(self, reason: str) -> bool:
        """End the round if it has no group yet; whether that is so. Its result is ``NoPeers`` with this reason."""
        if self._group is not None or self._roster is not None or self.result is not None:
            return False
        self._why_stopped = reason
        self._looking.cancel()
        return True

    async def run(self) -> None:
        """Sets :attr:`result`. When cancelled, the contribution counts as accumulated again."""
        with self.scope:
            await self._run()

    async def _run(self) -> None:
        try:
            found: Roster | GaveUp = GaveUp("")
            with self._looking:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._warn_while_alone)
                    found = await self._find_group()
                    nursery.cancel_scope.cancel()
            if self._looking.cancelled_caught:
                result: RoundResult = NoPeers(reason=self._why_stopped)
            elif isinstance(found, GaveUp):
                apart = await self._tools.why_alone()
                result = NoPeers(reason=f"{found.reason}; {apart}" if apart else found.reason)
            else:
                result = await self._exchange(found)
        finally:
            if self._group is not None:
                self._group.close()
            if self._contribution is not None:
                self._tools.accumulation.give_back(self._contribution)
            self._changed.set()  # also for those who wait for a round that was cancelled
        self.result = result

    async def _warn_while_alone(self) -> None:
        """Say what is waited for after 10 s and then ever more rarely, at a level that is seen without any setup."""
        pause = WARN_SECONDS
        while True:
            await trio.sleep(pause)
            reasons = [self._tools.matchmaker.waits_for(), await self._tools.why_alone()]
            logger.warning(
                "no group in run %r for %.0f s: %s",
                self._tools.config.run_id,
                trio.current_time() - self._started,
                "; ".join(filter(None, reasons)),
            )
            pause = min(2 * pause, MAX_WARN_SECONDS)

    def _weight(self, contribution: Contribution) -> float:
        """Return what a contribution counts.

        What failed rounds gave back may have added up to more than other peers accept. Its mean is as good as ever, so
        it counts the most that is allowed, and the round is not lost.
        """
        most = self._tools.config.most_weight
        if contribution.weight > most:
            logger.warning(
                "%g samples were accumulated, and max_weight is %g: the contribution counts as %g",
                contribution.weight,
                most,
                most,
            )
        return min(contribution.weight, most)

    async def _find_group(self) -> Roster | GaveUp:
        return await self._tools.matchmaker.find_group(
            weight=0.0 if self._contribution is None else self._weight(self._contribution),
            state=self._plan.state,
            tags=self._tools.config.tags,
            metrics={} if self._contribution is None else self._contribution.metrics.means,
            target=self._plan.target,
            on_report=self._on_report,
            on_expect=self._on_expect,
        )

    async def _exchange(self, roster: Roster) -> RoundResult:
        assert self._group is not None
        self._group.consists_of(member.peer_id for member in roster.members)
        self._roster = roster
        if self._tools.transport.peer_id in roster.observers and self._contribution is not None:
            self._tools.accumulation.give_back(self._contribution)  # it is for a later round
            self._contribution = None
        contribution = self._contribution
        began = trio.current_time()
        too_slow = too_slow_for(roster, self._tools.attempt.codec, self._tools.config.exchange_timeout)
        if too_slow:
            logger.warning("%s", too_slow)
        exchange = Exchange(
            transport=self._tools.transport,
            roster=roster,
            group=self._group,
            lobby=self._tools.lobby,
            cut_shares=self._tools.cut_shares,
            tools=self._tools.attempt,
            meter=self._tools.meter,
            vector=None if contribution is None else contribution.mean,
            minimum=self._tools.config.min_group_size,
            timeout=self._tools.config.exchange_timeout,
            on_milestone=self._tools.on_milestone,
            found_out=None if contribution is None else partial(self._found_out, contribution),
        )
        self._group = None  # the exchange closes it now, when the others have heard how it ended
        outcome: Outcome = await self._tools.tails.start(exchange.run)
        self._keep_telling(exchange)
        for verdict in outcome.lost:
            self._avoid(verdict)
        if outcome.verdict is not None:
            if contribution is not None:
                self._keep_unless_used(contribution, outcome.used)
            return Failed(
                reason=f"{outcome.verdict.reason}; {too_slow}" if too_slow else outcome.verdict.reason,
                peer=outcome.verdict.peer_id,
                contribution_used=outcome.used if contribution is not None else False,
            )
        roster = outcome.roster
        for member in roster.members:
            if member.peer_id not in {verdict.peer_id for verdict in outcome.lost}:
                self._tools.stalled.pop(member.peer_id, None)
        self._tools.matchmaker.finished_with(member.peer_id for member in roster.members)
        averaged = await self._unflatten(self._schema, outcome.averaged)
        if contribution is not None:
            self._tools.accumulation.release(contribution)
            self._contribution = None
        now = trio.current_time()
        links = [(member in roster.contributors, member in roster.holders) for member in roster.members]
        position = roster.position(self._tools.transport.peer_id)
        plain = fp32_bytes(roster.shares, position, links)
        return Success(
            averaged=averaged,
            peers=tuple(member.peer_id for member in roster.contributors),
            weights={member.peer_id: member.weight for member in roster.contributors},
            total_weight=roster.total_weight,
            compression_ratio=plain / max(outcome.bytes_sent + outcome.bytes_received, 1),
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            duration=now - self._started,
            exchange_duration=now - began,
            group_id=roster.group_id.hex(),
            share=share_bounds(roster.shares, position),
            metrics=roster.metrics,
            observers=tuple(m.peer_id for m in roster.holders if m.peer_id in roster.observers),
            auxiliaries=tuple(member.peer_id for member in roster.members if member.auxiliary),
            paths={
                member.peer_id: "stream" if member.peer_id in outcome.streamed else "lane"
                for member in roster.members
                if member.peer_id != self._tools.transport.peer_id
            },
            lost={verdict.peer_id: verdict.reason for verdict in outcome.lost if verdict.peer_id is not None},
        )

    def _keep_unless_used(self, contribution: Contribution, used: bool | None) -> None:
        if used:
            self._tools.accumulation.release(contribution)
        if used is None:
            self._tools.accumulation.withhold(contribution)
        if used is not False:  # else it is given back now
            self._contribution = None

    async def _unflatten(self, schema: Schema, averaged: torch.Tensor) -> Tensors:
        """In a thread where something is to be copied; else the tensors are views."""
        if schema.is_plain:
            return schema.unflatten(averaged)
        return await self._tools.attempt.run_in_thread(schema.unflatten, averaged)

    def _found_out(self, contribution: Contribution, used: bool) -> None:
        """What became of a contribution in a round from which this peer was cut off."""
        if self._contribution is None:
            self._tools.accumulation.found_out(contribution, used=used)

    def _avoid(self, verdict: Verdict) -> None:
        """Whom this member itself saw break the protocol, or stall the round, is not met again for a while."""
        if verdict.peer_id is None:
            return
        if verdict.hostile:
            self._tools.matchmaker.ban(verdict.peer_id, verdict.reason, BAN_SECONDS)
        elif verdict.seconds:
            # Silence, once, is a hiccup: a laptop that was closed for a moment. A whole round's time is not.
            strikes = self._tools.stalled.pop(verdict.peer_id, 0) + 1
            self._tools.stalled[verdict.peer_id] = strikes
            if len(self._tools.stalled) > MAX_STALLED:
                del self._tools.stalled[next(iter(self._tools.stalled))]
            if strikes > 1 or verdict.seconds >= self._tools.config.exchange_timeout:
                seconds = min(verdict.seconds * 2.0 ** min(strikes, 10), BAN_SECONDS)
                self._tools.matchmaker.ban(verdict.peer_id, verdict.reason, seconds)

    def _keep_telling(self, exchange: Exchange) -> None:
        """The exchange tells the others how it ended, beside the last few; what is older has had its time."""
        self._tools.telling.append(exchange)
        if len(self._tools.telling) > MAX_TELLING:
            self._tools.telling.popleft().end()

    def _on_report(self, report: Report) -> None:
        self._report = report
        self._changed.set()

    def _on_expect(self, group_id: bytes | None) -> None:
        if self._group is not None:
            self._group.close()
        self._group = (
            None
            if group_id is None
            else self._tools.lobby.expect(group_id, self._tools.matchmaker.exchange_begun)
        )
