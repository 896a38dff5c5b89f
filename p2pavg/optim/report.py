"""What a call of an optimizer's ``step`` came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pavg.optim.progress import Behind
from p2pavg.optim.together import Together
from p2pavg.result import RoundResult, Success

SPEED = "samples_per_second"
"""The metric that every optimizer adds to the caller's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """How far this peer and its run are after one ``step``."""

    epoch: int
    """Updates that this peer's parameters have taken."""
    peers: int
    """Peers with the same parameters, this one included, as far as is known."""
    others: int
    """Peers of the run with other parameters, which do not average with these."""
    samples: float
    """That these have accumulated since the last update."""
    samples_per_second: float
    """Of these together."""
    result: RoundResult | None = None
    """What came of the round, if this call tried one or found one ended."""
    grad_norm: float | None = None
    """L2 norm of the averaged gradient, or pseudo-gradient, before it was clipped; of an update only."""
    behind: str | None = None
    """Why this peer cannot follow the run any more, if so: most peers have other parameters. Load a newer state."""
    waiting: str | None = None
    """Why this call waited for other peers, if it did."""
    waited_for: tuple[str, ...] = ()
    """Ids of the peers that it waited for, as far as they are known."""
    waited_seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of an update: the means over its peers of what they measured, with ``samples_per_second`` of a peer; the same
    for all peers."""
    drifted: str | None = None
    """Which peers say that they hold other parameters after the same updates, and where those differ; ``None`` if all
    that told theirs agree. As of the last check, every ``check_every`` updates."""
    differs: tuple[str, ...] = ()
    """How peers of the run train otherwise than this one, a sentence each; they never average with it."""
    restored: str | None = None
    """Why this peer threw away what it had come to since the last outer step, if this call did so."""

    @property
    def updated(self) -> bool:
        """Whether the parameters were changed by an average."""
        return isinstance(self.result, Success)


def report_of(
    together: Together, result: RoundResult | None, grad_norm: float | None, behind: Behind | None
) -> StepReport:
    """The report of an optimizer that has got this far."""
    seen = together.survey()
    return StepReport(
        epoch=together.lineage.epoch,
        peers=seen.peers,
        others=seen.others,
        samples=seen.samples,
        samples_per_second=seen.samples_per_second,
        result=result,
        grad_norm=grad_norm,
        behind=None if behind is None else behind.reason,
        waiting=together.waiting.reason,
        waited_for=together.waiting.peers,
        waited_seconds=together.waiting.seconds,
        metrics=result.metrics if isinstance(result, Success) else {},
    )
