"""The context of one run: transport, codec, memory and limits, which all of its rounds share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2pavg.allreduce.movers.lobby import StreamRouter
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.base.threads.processor import ProcessorWait, never_waits
from p2pavg.base.threads.workers import RunInThread
from p2pavg.group.aggregation import PLAIN, Aggregation
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.candidate import Candidate
from p2pavg.group.milestones import OnMilestone, ignore
from p2pavg.group.shares import MAX_PART_ELEMENTS
from p2pavg.net.limits.rate import RateLimit
from p2pavg.net.transport import Transport
from p2pavg.runs.context import PeerContext
from p2pavg_compression import Codec
from p2pavg_dht import Signer

IDLE_PARTS = 32  # encoded parts whose memory is kept between rounds


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
    cut_shares: Callable[[Sequence[Candidate]], tuple[int, ...]]
    """Cuts the vector among any members; every member computes the same shares."""
    processor_wait: ProcessorWait = never_waits
    """Of the event loop's thread."""
    on_milestone: OnMilestone = ignore


def run_context(
    peer: PeerContext,
    lobby: StreamRouter,
    *,
    codec: Codec,
    aggregation: Aggregation,
    elements: int,
    group_size: int,
    meter: BandwidthMeter,
    cut_shares: Callable[[Sequence[Candidate]], tuple[int, ...]],
    upload: RateLimit,
    download: RateLimit,
) -> RunContext:
    """Return the context of a run whose vector, or largest share, has so many elements.

    Args:
        group_size: members that its groups aim at.
    """
    # Two results, of which the caller may keep one, the averages as encoded, and parts on their way.
    idle = (
        2 * 4 * elements
        + codec.encoded_nbytes(elements)
        + IDLE_PARTS * codec.encoded_nbytes(MAX_PART_ELEMENTS)
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
        cut_shares=cut_shares,
        processor_wait=peer.processor_wait,
        on_milestone=peer.on_milestone,
    )
