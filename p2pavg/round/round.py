"""One round: a group is found, parts are exchanged, and the result waits to be collected.

A contributor's round and an auxiliary's are the same. What differs is the :class:`~p2pavg.round.roles.RoundRole`: what
this peer brings to the round, and what it makes of the outcome.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

import trio

from p2pavg.allreduce.movers.lobby import ExpectedGroup
from p2pavg.base.limits import MAX_BACKOFF_SECONDS, WARN_WAIT_SECONDS
from p2pavg.base.result import EXCHANGES, FORMS, InProgress, NoPeersCode
from p2pavg.group.places.gossip import EVERYWHERE, SearchStage
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import GaveUp, Report
from p2pavg.matchmaking.matchmaker import RoundOffer
from p2pavg.round.exchange import Exchange
from p2pavg.round.reports import Timing
from p2pavg.round.roles import RoundRole
from p2pavg.round.rounds import Rounds

logger = logging.getLogger(__name__)


ResultT = TypeVar("ResultT")


class Round(Generic[ResultT]):
    """A round from its start to its result.

    Args:
        role: this peer's part in the round.
        target: members to aim at; ``None`` takes the run's setting.
        contributors: contributors without which the group is not complete.
        stages: where the group is looked for, one place after the other; among all peers that are ready if not given.
        expected: ids of the other peers that the group is to be with, if they are known.
    """

    def __init__(
        self,
        rounds: Rounds,
        role: RoundRole[ResultT],
        target: int | None = None,
        contributors: int = 0,
        stages: Sequence[SearchStage] = (SearchStage(EVERYWHERE),),
        expected: Collection[str] = (),
    ) -> None:
        self.role = role
        self.result: ResultT | None = None
        self.scope = trio.CancelScope()
        """Cancel it to end the round, which may not have begun yet."""
        self._rounds = rounds
        self._target = target
        self._contributors = contributors
        self._stages = tuple(stages)
        self._stage = self._stages[0]
        self._expected = expected
        self._started = trio.current_time()
        self._roster: Roster | None = None
        self._running: Exchange | None = None
        self._group: ExpectedGroup | None = None
        self._report: Report | None = None
        self._changed = trio.Event()
        self._looking = trio.CancelScope()
        self._at_place = trio.CancelScope()
        self._is_late = False
        """True if the present stage is over, and a group of it may still come about."""
        self._why_cancelled = ""
        self._why_leaving = ""

    async def changed(self) -> None:
        """Wait until there is a result, or a match timeout has passed."""
        await self._changed.wait()

    def take_report(self) -> InProgress | None:
        """Return the progress of the round once at the end of each match timeout."""
        if self._report is None:
            return None
        reason, self._report, self._changed = self._report.reason, None, trio.Event()
        return self.progress(reason)

    @property
    def only_waits(self) -> bool:
        """True until there is a result or a report, or the round was cancelled."""
        return not self._changed.is_set()

    @property
    def is_exchanging(self) -> bool:
        """True while the group exchanges."""
        return self._roster is not None and self.result is None

    def progress(self, reason: str = "") -> InProgress:
        """Return the progress of the round."""
        if self._roster is not None:
            ready, reason = len(self._roster.holders), reason or EXCHANGES
        else:
            ready, reason = self._rounds.matchmaker.ready_peers, reason or FORMS
        target = self._target or self._rounds.settings.target
        return InProgress(ready_peers=ready, target_size=target, reason=reason, waits_for=self._waits_for())

    def _waits_for(self) -> str:
        return self._running.waits_for() if self._running is not None and self.is_exchanging else ""

    def exchange_word(self, seconds: float) -> str:
        """Return a sentence for a caller that has waited for so many seconds; empty unless the group exchanges."""
        run_id, waits_for = self._rounds.settings.run_id, self._waits_for()
        return (
            f"the round in run {run_id!r} takes longer than {seconds:.0f} s: {waits_for}" if waits_for else ""
        )

    def cancel_matchmaking(self, reason: str) -> bool:
        """End the round if it has no group yet, and return whether it had none. ``reason`` becomes its result's."""
        # From an accepted roster on, other members count on this peer.
        if self._group is not None or self._roster is not None or self.result is not None:
            return False
        self._why_cancelled = reason
        self._looking.cancel()
        return True

    def leave(self, reason: str) -> None:
        """End the round, unless it has a group: then as soon as that group has ended, or does not come about."""
        if not self.cancel_matchmaking(reason):
            self._why_leaving = reason

    async def run(self) -> None:
        """Set :attr:`result`. When cancelled, the contribution counts as accumulated again."""
        with self.scope:
            await self._run()

    async def _run(self) -> None:
        try:
            found = await self._find_group()
            result = (
                self.role.alone(found.reason, found.code)
                if isinstance(found, GaveUp)
                else await self._exchange(found)
            )
        finally:
            if self._group is not None:
                self._group.close()
            # However the round ended: a contribution that a `Success` has used up is no longer there to be
            # given back.
            self.role.give_back()
            self._changed.set()  # also for callers that wait for a round that was cancelled
        self.result = result

    async def _find_group(self) -> Roster | GaveUp:
        found: Roster | GaveUp = GaveUp("")
        offer = await self.role.offer()
        with self._looking:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._warn_while_alone)
                for stage in self._stages:
                    found = await self._find_at(stage, offer)
                    if isinstance(found, Roster):
                        break
                nursery.cancel_scope.cancel()
        # The caller has a reason, and the search that was cut off has none.
        if self._looking.cancelled_caught:
            return GaveUp(self._why_cancelled, NoPeersCode.CANCELLED)
        if isinstance(found, GaveUp):
            # The search only knows that no peer came. The peer itself knows whether it reaches the network at
            # all.
            alone = await self._rounds.why_alone()
            code = alone.code if found.code is NoPeersCode.NO_PEER_READY else found.code
            return GaveUp("; ".join(filter(None, [found.reason, alone.reason])), code)
        return found

    async def _find_at(self, stage: SearchStage, offer: RoundOffer) -> Roster | GaveUp:
        """Look in one place until there is a group, no other peer is ready, or the stage is over."""
        found: Roster | GaveUp = GaveUp("")
        self._is_late = False
        # A scope of its own, so that the end of one stage is not the end of the round.
        with trio.CancelScope() as self._at_place:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_stage, stage.seconds)
                self._stage = stage
                found = await self._rounds.matchmaker.find_group(
                    offer=offer,
                    target=self._target,
                    contributors=self._contributors,
                    expected=self._expected,
                    meeting=stage.meeting,
                    listener=self,
                )
                nursery.cancel_scope.cancel()
        return found

    async def _end_stage(self, seconds: float) -> None:
        """End the search in one place when its time is over. A group that others count on comes first."""
        await trio.sleep(seconds)
        self._is_late = True
        if self._group is None:
            self._at_place.cancel()

    async def _warn_while_alone(self) -> None:
        """Warn of what is waited for, after 10 s and then ever more rarely. A warning is seen without any setup."""
        if self.role.auxiliary:
            return  # it may wait for its run for days
        pause = WARN_WAIT_SECONDS
        while True:
            await trio.sleep(pause)
            reasons = [self._rounds.matchmaker.waits_for(), (await self._rounds.why_alone()).reason]
            logger.warning(
                "no group in run %r for %.0f s: %s",
                self._rounds.settings.run_id,
                trio.current_time() - self._started,
                "; ".join(filter(None, reasons)),
            )
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)

    async def _exchange(self, roster: Roster) -> ResultT:
        assert self._group is not None
        # First: lanes of the members may be coming already, and members go before strangers.
        self._group.consists_of(member.peer_id for member in roster.members)
        self._roster = roster
        settings = self._rounds.settings
        vector, found_out = self.role.join(roster)
        exchange = Exchange(
            self._rounds.context,
            roster,
            self._group,
            self._rounds,
            vector=vector,
            minimum=settings.minimum,
            timeout=settings.exchange_timeout,
            max_share=settings.max_share,
            silences=self._rounds.silences,
            found_out=found_out,
        )
        self._running = exchange
        self._group = None  # the exchange closes it now, when the others have heard how it ended
        began = trio.current_time()
        # In the peer's own nursery: a caller that takes its result must not cut off what the others still
        # need.
        outcome = await self._rounds.hold(exchange)
        return await self.role.end(outcome, Timing(self._started, began))

    def searched(self, report: Report) -> None:
        """Tell the caller that no group has formed, unless there is a further place to look."""
        if self._stage is self._stages[-1]:
            self._report = report
            self._changed.set()

    def expects(self, group_id: bytes | None) -> None:
        """Let streams of this group in from now on, and of no other; ``None``: of no group."""
        # Another roster takes the place of this one, or none does: streams of the former group are let go.
        if self._group is not None:
            self._group.close()
        lobby, matchmaker = self._rounds.context.lobby, self._rounds.matchmaker
        self._group = None if group_id is None else lobby.expect(group_id, matchmaker)
        # The stage waited for this group only, and it has not come about.
        if self._is_late and group_id is None:
            self._at_place.cancel()
        if self._why_leaving:
            self.cancel_matchmaking(self._why_leaving)
