"""This peer's part in a round: contributor (or observer), or auxiliary.

A role says what the peer brings to a round and what it makes of the outcome. :class:`~p2pavg.round.round.Round` is the
same for all roles.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Generic, TypeVar

import torch
import trio

from p2pavg.allreduce.averages import EncodedAverage
from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.reduction import vector_norm
from p2pavg.allreduce.vector.accumulation import Accumulation, Contribution, Schema
from p2pavg.base.result import Failed, NoPeers, NoPeersCode, RoundResult, Success, Tensors
from p2pavg.group.candidate import link_of
from p2pavg.group.roster import Roster, norm_factors
from p2pavg.group.shares import RELAY_MBPS, bound_seconds, relays_are_slowest
from p2pavg.group.topology import Star
from p2pavg.matchmaking.matchmaker import RoundOffer
from p2pavg.round.exchange import ExchangeOutcome
from p2pavg.round.reports import RoundReports, Timing
from p2pavg.runs.config import AveragingConfig
from p2pavg.state.average import MIN_TRUSTED_SIGNERS, LoggedAverage

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
FoundOut = Callable[[bool], None]
"""Is told later whether a contribution was used, if the outcome left that open."""
OnAverage = Callable[[LoggedAverage], None]
"""Is told an average that was committed, in trio's thread."""


class RoundRole(abc.ABC, Generic[ResultT]):
    """This peer's part in one round."""

    auxiliary: ClassVar[bool]
    state: bytes = b""
    """Name of the state that the vector belongs to; empty if it has none."""

    async def offer(self) -> RoundOffer:
        """Return what this peer signs of itself."""
        await trio.lowlevel.checkpoint()
        return RoundOffer(auxiliary=self.auxiliary)

    @abc.abstractmethod
    def join(self, roster: Roster) -> tuple[torch.Tensor | None, FoundOut | None]:
        """Take part in a group.

        Returns:
            This peer's vector, if it contributes, and a function that is told later whether the vector was used.
        """

    @abc.abstractmethod
    def alone(self, reason: str, code: NoPeersCode) -> ResultT:
        """Return the result of a round without a group."""

    @abc.abstractmethod
    async def end(self, outcome: ExchangeOutcome, timing: Timing) -> ResultT:
        """Return the result of a round that had a group."""

    def give_back(self) -> None:
        """Let go of what the round did not use. Called once, also when the round is cancelled."""


class Contributor(RoundRole[RoundResult]):
    """A peer with a contribution, or an observer, which has none.

    Args:
        context: of the run.
        config: of the averager.
        schema: the tensors that make up the vector.
        contribution: taken from ``accumulation``; ``None`` for an observer.
        state: names what the vector belongs to.
        on_average: is told the average of a round that succeeded, before the round returns its result, if other peers
            can check it: at least :data:`~p2pavg.state.average.MIN_TRUSTED_SIGNERS` members have signed it.
        reports: is told how the round ends.
        metrics: travel with the contribution, besides its own.
    """

    auxiliary = False

    def __init__(
        self,
        context: RunContext,
        config: AveragingConfig,
        accumulation: Accumulation,
        schema: Schema,
        contribution: Contribution | None,
        state: bytes,
        on_average: OnAverage | None = None,
        reports: RoundReports | None = None,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.state = state
        self._metrics = metrics
        self._reports = reports
        self._began = trio.current_time()
        self._on_average = on_average
        self._context = context
        self._config = config
        self._accumulation = accumulation
        self._schema = schema
        self._contribution = contribution
        self._withheld = False
        self._too_slow = ""

    async def offer(self) -> RoundOffer:
        """See :class:`RoundRole`."""
        contribution, norm = self._contribution, 0.0
        if contribution is not None and self._config.max_norm is not None:
            # The norm reads the whole vector, so a thread computes it, and only for a run that bounds norms.
            norm = await self._context.run_in_thread(vector_norm, contribution.mean)
        return RoundOffer(
            weight=0.0 if contribution is None else self._weight(contribution),
            state=self.state,
            tags=self._config.tags,
            metrics={} if contribution is None else {**contribution.metrics.means, **self._metrics},
            norm=norm,
        )

    def _weight(self, contribution: Contribution) -> float:
        """Return the weight of a contribution, at most the ``max_weight`` of the run and of this peer's certificate.

        Failed rounds may have given back more than other peers accept. The mean of all of it is as good as ever, so it
        counts the most that is allowed, and the round is not lost.
        """
        most = self._config.own_most_weight
        if contribution.weight > most:
            logger.warning(
                "%g samples were accumulated, and max_weight is %g: the contribution counts as %g",
                contribution.weight,
                most,
                most,
            )
        return min(contribution.weight, most)

    def join(self, roster: Roster) -> tuple[torch.Tensor | None, FoundOut | None]:
        """See :class:`RoundRole`."""
        # The participation rule may have drawn this peer as an observer, although it has something to
        # contribute.
        if self._context.transport.peer_id in roster.observers:
            self.give_back()  # it is for a later round
        self._too_slow = too_slow_for(roster, self._context, self._config.exchange_timeout)
        if self._too_slow:
            logger.warning("%s", self._too_slow)
        if self._contribution is None:
            return None, None
        # The function holds the contribution itself: when it is called, this object may have let go of it.
        return self._contribution.mean, partial(self._found_out, self._contribution)

    def alone(self, reason: str, code: NoPeersCode) -> RoundResult:
        """See :class:`RoundRole`."""
        if self._reports is not None:
            self._reports.alone(reason, trio.current_time() - self._began, code)
        return NoPeers(reason=reason, code=code)

    async def end(self, outcome: ExchangeOutcome, timing: Timing) -> RoundResult:
        """See :class:`RoundRole`."""
        contribution = self._contribution
        if outcome.verdict is not None:
            if contribution is not None:
                self._keep_unless_used(contribution, outcome.used)
            reason = outcome.verdict.reason
            failed = Failed(
                reason=f"{reason}; {self._too_slow}" if self._too_slow else reason,
                code=outcome.verdict.code,
                peer=outcome.verdict.peer_id,
                # The others may have committed a result, and there is nothing of an observer in it.
                contribution_used=outcome.used if contribution is not None else False,
            )
            if self._reports is not None:
                self._reports.failed(failed, outcome, timing)
            return failed
        if contribution is not None:
            # Used up, also if this call is cancelled. `give_back`, which is called at the end of each round, finds
            # nothing any more.
            self._accumulation.release(contribution)
            self._contribution = None
        # If a member was lost before it signed, a peer that was not there may find too few signatures.
        others_can_check = outcome.signers >= MIN_TRUSTED_SIGNERS
        # The log comes first. From the return of the result on, the caller may change its tensors.
        if self._on_average is not None and outcome.encoded is not None and others_can_check:
            self._on_average(await self._logged(outcome, outcome.encoded))
        averaged = await self._unflatten(outcome.averaged)
        clipped = norm_factors(outcome.roster, self._config.max_norm)
        success = _success(averaged, outcome, self._context, timing, tuple(clipped))
        if self._reports is not None:
            self._reports.succeeded(success, outcome)
        return success

    async def _logged(self, outcome: ExchangeOutcome, encoded: EncodedAverage) -> LoggedAverage:
        # Such a codec encodes into the vector's own bytes, which the averaged tensors may share.
        if self._context.codec.is_identity:  # the caller may change the averaged tensors
            encoded = await self._context.run_in_thread(_copy_of, encoded)
        return LoggedAverage(self.state, outcome.group_id, outcome.certificate, encoded)

    def give_back(self) -> None:
        """See :class:`RoundRole`."""
        if self._contribution is not None:
            self._accumulation.give_back(self._contribution)
            self._contribution = None

    def _keep_unless_used(self, contribution: Contribution, used: bool | None) -> None:
        if used:
            self._accumulation.release(contribution)
        # Cut off in the last moment: given back, it might count twice. It waits aside until the outcome is
        # known.
        if used is None:
            self._accumulation.withhold(contribution)
            self._withheld = True
        if used is not False:  # else it is given back now
            self._contribution = None

    def _found_out(self, contribution: Contribution, used: bool) -> None:
        """Settle a contribution that was withheld, because this peer was cut off from its round."""
        # The exchange may call this at its end in any case. Then there is nothing to settle, unless it was
        # withheld.
        if self._withheld:
            self._withheld = False
            self._accumulation.found_out(contribution, used=used)
        # The round was cancelled, and the others may have ended it.
        elif used and self._contribution is contribution:
            self._accumulation.release(contribution)
            self._contribution = None

    async def _unflatten(self, averaged: torch.Tensor) -> Tensors:
        """Return the tensors of the flat vector: views of it, or copies that a thread makes."""
        if self._schema.is_plain:
            return self._schema.unflatten(averaged)
        return await self._context.run_in_thread(self._schema.unflatten, averaged)


class Auxiliary(RoundRole[None]):
    """A peer without a vector, which reduces a share of other peers' vectors."""

    auxiliary = True

    def __init__(
        self,
        peer_id: str,
        reports: RoundReports | None = None,
        ended: Callable[[ExchangeOutcome], None] = lambda _outcome: None,
    ) -> None:
        self._peer_id = peer_id
        self._reports = reports
        self._ended = ended

    def join(self, roster: Roster) -> tuple[torch.Tensor | None, FoundOut | None]:  # noqa: ARG002
        """See :class:`RoundRole`."""
        return None, None

    def alone(self, reason: str, code: NoPeersCode) -> None:
        """Do nothing: an auxiliary looks again."""

    async def end(self, outcome: ExchangeOutcome, timing: Timing) -> None:
        """Tell the outcome to the auxiliary's owner and to the peer's subscribers, of which one is the log."""
        self._ended(outcome)
        if self._reports is not None:
            self._reports.helped(outcome, timing)
        roster, name = outcome.roster, outcome.group_id.hex()[:8]
        if outcome.verdict is None:
            share = roster.shares[roster.position(self._peer_id)]
            logger.debug("group %s: reduced %d elements for %d peers", name, share, len(roster.holders))


def _copy_of(encoded: EncodedAverage) -> EncodedAverage:
    return EncodedAverage(tuple(bytearray(part) for part in encoded.parts), encoded.digests)


def too_slow_for(roster: Roster, context: RunContext, timeout: float) -> str:
    """Explain that a round cannot end in time at the bandwidths that its members announced; empty if it can.

    The round is tried all the same: an announced bandwidth may be wrong, and a member could lie about its own.

    Args:
        timeout: seconds that the exchange may take.
    """
    links = [replace(link_of(member), bandwidth=member.assumed_bandwidth) for member in roster.members]
    elements = sum(roster.shares)
    # In a star, one member has the whole vector, however slow its link. Otherwise the shares are those that
    # take least time.
    fractions = None
    if isinstance(context.aggregation.topology, Star) and elements:
        fractions = tuple(Fraction(share, elements) for share in roster.shares)
    needed = bound_seconds(context.codec.encoded_nbytes(elements), links, fractions)
    if needed <= timeout:
        return ""
    # The user needs to know which link to look at: the slowest member's, or the relays that all share.
    slowest = min(roster.members, key=lambda member: member.assumed_bandwidth)
    why = f"the least is {slowest.assumed_bandwidth:g} Mbit/s, of {slowest.peer_id}"
    if relays_are_slowest(links, fractions):
        why = f"members that cannot connect directly share {RELAY_MBPS:g} Mbit/s through relays"
    return (
        f"the round needs at least {needed:.0f} s at the bandwidths that its members announced ({why}), and"
        f" exchange_timeout is {timeout:g} s: give it more time, or use a codec that takes fewer bytes"
    )


def _success(
    averaged: Tensors, outcome: ExchangeOutcome, context: RunContext, timing: Timing, clipped: tuple[str, ...]
) -> Success:
    """Describe a round that was committed."""
    roster, now, peer_id = outcome.roster, trio.current_time(), context.transport.peer_id
    position = roster.position(peer_id)
    ranges = roster.ranges[position]
    others = [member.peer_id for member in roster.members if member.peer_id != peer_id]
    return Success(
        averaged=averaged,
        peers=tuple(member.peer_id for member in roster.contributors),
        weights={member.peer_id: member.weight for member in roster.contributors},
        total_weight=roster.total_weight,
        compression_ratio=outcome.plain_bytes / max(outcome.bytes_sent + outcome.bytes_received, 1),
        bytes_sent=outcome.bytes_sent,
        bytes_received=outcome.bytes_received,
        duration=now - timing.started,
        exchange_duration=now - timing.exchange_began,
        group_id=outcome.group_id.hex(),
        share=ranges[0] if ranges else (0, 0),
        taken_over=ranges[1:],
        metrics=roster.metrics_by(robust=context.aggregation.robust is not None),
        observers=tuple(m.peer_id for m in roster.holders if m.peer_id in roster.observers),
        auxiliaries=tuple(member.peer_id for member in roster.members if member.auxiliary),
        paths={other: "stream" if other in outcome.streamed else "lane" for other in others},
        clipped=clipped,
        lost={verdict.peer_id: verdict.reason for verdict in outcome.lost if verdict.peer_id is not None},
        certificate=outcome.certificate,
        drawn=outcome.drawn,
        left_out=outcome.left_out,
    )
