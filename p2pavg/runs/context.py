"""The context of one peer: transport, identity and clock, which all of its runs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from p2pavg.base.threads.processor import ProcessorWait
from p2pavg.base.threads.workers import RunInThread
from p2pavg.group.milestones import OnMilestone, ignore
from p2pavg.net.limits.first_messages import FirstMessages
from p2pavg.net.transport import Transport
from p2pavg_dht import Signer


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerContext:
    """Everything that the runs of one peer share."""

    transport: Transport
    signer: Signer
    wall_clock: Callable[[], float]
    """Seconds since 1970. A simulation has its own."""
    nursery: trio.Nursery
    """Lives as long as the peer, so it outlives every round."""
    run_in_thread: RunInThread
    """Runs work off the event loop. A simulation runs it on the loop."""
    run_aside: RunInThread
    """The same for work that a round must not wait for, however long others make it take."""
    processor_wait: ProcessorWait
    """Of the event loop's thread. A simulation never waits."""
    on_milestone: OnMilestone = ignore
    messages: FirstMessages = field(default_factory=FirstMessages)
    """The processor time that other peers take by what they say on streams of this peer's runs."""
