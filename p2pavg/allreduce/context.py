"""The context of one run: transport, codec, memory and limits, which all of its rounds share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.allreduce.messages import Average, Lane, LaneHeader
from p2pavg.allreduce.movers.lobby import StreamRouter
from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.allreduce.reduction import PartTracker
from p2pavg.allreduce.values import AttemptData
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.base.threads.processor import ProcessorWait, never_waits
from p2pavg.base.threads.workers import RunInThread
from p2pavg.group.aggregation import PLAIN, Aggregation
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.milestones import OnMilestone, ignore
from p2pavg.group.roster import Roster, ShareCutter
from p2pavg.group.shares import MAX_PART_ELEMENTS, SharePart
from p2pavg.net.limits.rate import RateLimit
from p2pavg.net.transport import Transport
from p2pavg.runs.context import PeerContext
from p2pavg_compression import Codec
from p2pavg_dht import Signer

IDLE_PARTS = 32  # encoded parts whose memory is kept between rounds
DIRECT_SECONDS = 3.0
"""For a direct lane to come about, from either side, and then for its sender to begin on a stream if it has broken. A
member that sends nothing of its contribution is given up after 4.5 s, so there has to be time for that stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Everything that the rounds of one run share."""

    transport: Transport
    signer: Signer
    """Signs as this peer."""
    lobby: StreamRouter
    run_in_thread: RunInThread
    codec: Codec
    aggregation: Aggregation = PLAIN
    """The rule that combines contributions. All peers of the run have the same one."""
    buffers: Buffers
    upload: RateLimit
    download: RateLimit
    meter: BandwidthMeter
    """Measures in each round what this peer's link carries."""
    cutter: ShareCutter
    """Cuts the vector among any members; every member computes the same shares."""
    processor_wait: ProcessorWait = never_waits
    """Of the event loop's thread."""
    on_milestone: OnMilestone = ignore
    recheck: float = 0.0
    """Fraction of the contributions that a member computes again."""


def run_context(
    peer: PeerContext,
    lobby: StreamRouter,
    *,
    codec: Codec,
    aggregation: Aggregation,
    elements: int,
    group_size: int,
    meter: BandwidthMeter,
    cutter: ShareCutter,
    upload: RateLimit,
    download: RateLimit,
    recheck: float = 0.0,
) -> RunContext:
    """Return the context of a run whose vector, or largest share, has so many elements.

    Args:
        group_size: members that its groups aim at.
    """
    # Two results, of which the caller may keep one, the averages as encoded, and parts on their way.
    idle = (
        2 * 4 * elements
        + codec.averages.encoded_nbytes(elements)
        + IDLE_PARTS * codec.averages.encoded_nbytes(MAX_PART_ELEMENTS)
    )
    if aggregation.robust is not None:
        idle += group_size * 4 * MAX_PART_ELEMENTS  # the contributions to one part, decoded
    return RunContext(
        transport=peer.transport,
        signer=peer.signer,
        lobby=lobby,
        run_in_thread=peer.run_in_thread,
        codec=codec,
        aggregation=aggregation,
        buffers=Buffers(idle),
        upload=upload,
        download=download,
        meter=meter,
        cutter=cutter,
        processor_wait=peer.processor_wait,
        on_milestone=peer.on_milestone,
        recheck=recheck,
    )


# The plan of one attempt: its members, their shares and parts, and the values that this member holds.

STREAM_KINDS = (Lane.CONTRIBUTIONS, Lane.AVERAGES)
"""The streams that take the place of a direct lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """Everything that the sender and the receiver of one attempt share."""

    number: int
    context: RunContext
    group: Roster
    """The roster of the whole group. Its id is in the header of every lane."""
    members_digest: bytes
    """Of the attempt's members, in the header of every lane."""
    roster: Roster
    """The members that take part, with the shares that they have in this attempt."""
    me: str
    contributes: bool
    """True if this member has a vector to send."""
    ledger: PartTracker
    values: AttemptData

    @property
    def own_parts(self) -> Sequence[SharePart]:
        """The parts of this member's share."""
        return self.ledger.parts[self.me]

    def contributions_to(self, peer_id: str) -> tuple[Sequence[SharePart], int | None]:
        """Return the tasks of a member to which this one contributes.

        Return with them the number of this member's task that makes the first contribution, if they are means of its
        site; ``None`` if they are its own values.
        """
        routes = self.ledger.routes
        parts = routes.contributions(self.me, peer_id)
        if parts and self.me in routes.senders_of_sums(peer_id):
            return parts, routes.first_sum(self.me, peer_id)
        return (parts if self.contributes else ()), None

    def averages_to(self, peer_id: str) -> list[Average]:
        """Return the averages that this member sends to another one, and what each waits for.

        :meth:`~p2pavg.allreduce.values.AttemptData.is_ready` has its number.
        """
        found: list[Average] = []
        for reducer in self.ledger.routes.averages(self.me, peer_id):
            # One of its own share waits for its task, and one that it passes on for its arrival.
            first = self.values.forward_at(reducer)
            first = self.ledger.first_own if first is None else first
            found += [(reducer, part, first + part.index) for part in self.ledger.parts[reducer]]
        return found

    def averages_from(self, peer_id: str) -> list[tuple[str, SharePart]]:
        """Return the averages that another member sends to this one."""
        routes = self.ledger.routes
        return [
            (each, part) for each in routes.averages(peer_id, self.me) for part in self.ledger.parts[each]
        ]

    def header(self, lane: Lane, reducer: int = 0, begin: ResumeMark = START) -> LaneHeader:
        """Return the header of a lane that this member opens."""
        return LaneHeader(self.group.group_id, lane, self.number, reducer, self.members_digest, begin)
