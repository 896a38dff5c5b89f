"""The report of a call of an optimizer's ``step``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pavg.base.result import RoundResult, Success
from p2pavg.group.recheck import Recheck
from p2pavg.optim.coordination.progress import LeftBehind
from p2pavg.optim.coordination.together import RoundCoordinator

SPEED = "samples_per_second"
"""Name of the metric that every optimizer adds to the caller's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Progress of this peer and its run after one ``step``."""

    epoch: int
    """Number of updates that this peer's parameters have taken."""
    peers: int
    """Number of known peers with the same parameters, this one included."""
    others: int
    """Number of peers of the run with other parameters, which cannot average with this one."""
    samples: float
    """Samples that the ``peers`` have accumulated since the last update."""
    samples_per_second: float
    """Speed of the ``peers`` together."""
    result: RoundResult | None = None
    """Result of the round, if this call tried one or found that one had ended."""
    grad_norm: float | None = None
    """L2 norm of the averaged gradient or pseudo-gradient, before clipping; after an update only."""
    behind: str | None = None
    """Reason why this peer cannot follow the run any more: most peers have other parameters. With ``state=False``, load
    a newer state then."""
    catching_up: str | None = None
    """Progress of this peer on its way to the run's present state, or the reason why it makes none. ``None`` if it is
    with the run, or shares no states."""
    waiting: str | None = None
    """Reason why this call waited for other peers, if it did."""
    waited_for: tuple[str, ...] = ()
    """Ids of the peers that it waited for, as far as they are known."""
    waited_seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """After an update: the means of its peers' metrics, including ``samples_per_second``; the same for all peers."""
    drifted: str | None = None
    """Sentence on peers that report other parameters after the same updates, with the differing tensors. ``None`` if
    all reported ones agree. It is from the last check, every ``check_every`` updates."""
    differs: tuple[str, ...] = ()
    """Differences in training between this peer and others, one sentence each; those peers never average with this
    one."""
    restored: str | None = None
    """Reason why this call discarded this peer's work since the last outer step, if it did."""
    skipped: str | None = None
    """Reason why this call left its batch out, if it did: gradients that a ``GradScaler`` found to overflow, or a
    metric that is NaN or infinite."""
    changed: str | None = None
    """Sentence on parameters that were changed since the last step, by something else than an update and ``on_update``,
    or on an update that was interrupted. A change through ``parameter.data`` is not seen."""
    learning_rates: tuple[float, ...] = ()
    """Learning rate of each parameter group of the inner optimizer, with which the update was taken; after an update
    only. With local updates, those of the last inner step."""
    outer_rate: float | None = None
    """Rate of the outer step of local updates, such as ``lr="auto"`` chose it; after an outer step only."""
    update_norm: float | None = None
    """L2 norm of the parameters' change by the update, over all parameters; after an update, and only with
    ``measure_updates=True``."""

    rechecks: tuple[Recheck, ...] = ()
    """Contributions of other peers that this one has computed again in this update, and compared."""
    consensus_distance: float | None = None
    """After an outer step of :func:`~p2pavg.optim.noloco` or :func:`~p2pavg.optim.gossip`: the L2 distance between this
    peer's anchor and the mean of its group's anchors, before the step, as estimated from a random projection to 1,024
    values. The standard error is 2 % with a codec of 16 bits or more. The projections travel through the run's codec,
    so a codec of 8 bits adds its own error: 13 % were seen with ``blockwise8``. Other optimizers keep the anchors of
    all peers the same.
    After a mix of :class:`~p2pavg.optim.CellOptimizer`: the L2 distance between the cell's values and the cells' mean,
    over the values that were mixed."""
    mixed: float | None = None
    """After a mix of :class:`~p2pavg.optim.CellOptimizer`: the part of the values, 0 to 1, that was mixed."""
    cell: int | None = None
    """This peer's cell, from 0 on, with :class:`~p2pavg.optim.CellOptimizer`."""

    @property
    def updated(self) -> bool:
        """True if an average changed the parameters."""
        return isinstance(self.result, Success)


def report_of(
    together: RoundCoordinator, result: RoundResult | None, grad_norm: float | None, behind: LeftBehind | None
) -> StepReport:
    """Return the report of an optimizer at its present progress."""
    seen = together.run.survey()
    return StepReport(
        epoch=together.run.lineage.epoch,
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
