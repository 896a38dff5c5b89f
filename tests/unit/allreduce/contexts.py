"""A run's context for tests that move parts."""

from __future__ import annotations

from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.movers.lobby import StreamRouter
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.group.aggregation import Aggregation
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.roster import ShareCutter
from p2pavg.net.limits.rate import RateLimit
from p2pavg.net.transport import Transport
from p2pavg.testing.simulation import run_on_loop, simulated_signer
from p2pavg_compression import Codec

NO_AUDITS = Aggregation(audits=None)
"""Members sign neither inputs nor averages, so a test can play the other members byte by byte."""


def context_over(
    transport: Transport,
    codec: Codec,
    elements: int,
    lobby: StreamRouter | None = None,
    aggregation: Aggregation = NO_AUDITS,
) -> RunContext:
    """Return the context of a run without limits, whose codec runs on the event loop."""
    return RunContext(
        transport=transport,
        signer=simulated_signer(0),
        lobby=StreamRouter() if lobby is None else lobby,
        run_in_thread=run_on_loop,
        codec=codec,
        aggregation=aggregation,
        buffers=Buffers(4 * elements),
        upload=RateLimit(None),
        download=RateLimit(None),
        meter=BandwidthMeter(),
        cutter=ShareCutter(elements, codec.granularity),
    )
