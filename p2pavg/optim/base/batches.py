"""The batches behind the calls of an optimizer's ``step``: their samples and measurements. No I/O, no clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from p2pavg.allreduce.vector.metrics import MetricMeans, checked_metrics, not_finite
from p2pavg.optim.base.state import checked_amount, checked_count
from p2pavg.state.nested import plain_number

logger = logging.getLogger(__name__)

SamplesOf = Callable[[], float]
"""Returns the number of samples behind the gradients at the time of the call."""
NO_METRICS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples and passes behind one update of the gradients."""

    samples: float
    metrics: Mapping[str, float]
    wrong: str = ""
    """Reason for leaving the batch out; empty if there is none."""


class Batches:
    """Counts the samples of a loop, and joins the backward passes of one accumulated gradient.

    Args:
        batch_size: samples of each call that names none; ``None`` if there is no such number.
        samples_of: asked for the samples of a call that names none; instead of ``batch_size``.
        accumulate: number of calls, each after a backward pass, whose gradients autograd adds up.

    Raises:
        TypeError: ``samples_of`` cannot be called.
        ValueError: ``batch_size`` or ``accumulate`` is out of range, or ``batch_size`` and ``samples_of`` are both
            given.
    """

    def __init__(
        self, *, batch_size: float | None = None, samples_of: SamplesOf | None = None, accumulate: int = 1
    ) -> None:
        if batch_size is not None and samples_of is not None:
            raise ValueError(
                "give batch_size or samples_of, not both: each is the number of samples of a call"
            )
        if samples_of is not None and not callable(samples_of):
            raise TypeError(
                f"samples_of must be a function without arguments, got {type(samples_of).__name__}"
            )
        self._size = None if batch_size is None else checked_amount("batch_size", batch_size)
        self._samples_of = samples_of
        self._accumulate = checked_count("accumulate", accumulate)
        self._noted: dict[str, float] = {}
        self.drop()

    def drop(self) -> None:
        """Forget the calls since the last whole batch."""
        self._calls, self._samples, self._metrics, self._wrong = 0, 0.0, MetricMeans(), ""

    @property
    def is_pending(self) -> bool:
        """True between two calls whose gradients belong together: they must not be zeroed."""
        return self._calls > 0

    def note(self, metrics: Mapping[str, float]) -> None:
        """Add measurements to those of the next call; leave out those that are NaN or infinite, with a warning.

        Raises:
            AccumulateError: a measurement is not a number, or there would be too many.
        """
        if names := not_finite(metrics):  # it may have been measured on other data than a batch's
            logger.warning("the measurement %r is %s: it is left out", names[0], metrics[names[0]])
            metrics = {name: value for name, value in metrics.items() if name not in names}
        joined = {**self._noted, **checked_metrics(metrics)}
        MetricMeans().check_room(joined)
        self._noted = joined

    def add(self, samples: float | None, metrics: Mapping[str, float]) -> Batch | None:
        """Note a call; return the whole batch, or ``None`` if more calls belong to it.

        Raises:
            TypeError: nothing tells the number of samples, or it is no number.
            ValueError: ``samples`` or a metric of an accumulated batch is out of range.
        """
        count = self._count(samples)
        joined = {**self._noted, **metrics} if self._noted else metrics
        if names := not_finite(joined):
            self._wrong = (
                f"the metric {names[0]!r} of this batch is {joined[names[0]]}: the batch is left out"
            )
            joined = {name: value for name, value in joined.items() if name not in names}
        if self._accumulate > 1:
            count, joined = checked_amount("samples", count), checked_metrics(joined)
            self._metrics.check_room(joined)
        self._noted = {}
        if self._accumulate == 1:
            batch = Batch(count, joined, self._wrong)
            self.drop()
            return batch
        self._calls += 1
        self._samples += count
        self._metrics.add(joined, count)
        if self._calls < self._accumulate:
            return None
        batch = Batch(self._samples, self._metrics.means, self._wrong)
        self.drop()
        return batch

    def _count(self, samples: float | None) -> float:
        if samples is None and self._samples_of is not None:
            samples = self._samples_of()
        if samples is not None:
            count: object = plain_number(samples)
            if isinstance(count, bool) or not isinstance(count, int | float):
                hint = "; use samples.item()" if isinstance(samples, torch.Tensor) else ""
                raise TypeError(f"samples must be a number, got {type(samples).__name__}{hint}")
            return count
        if self._size is None:
            raise TypeError(
                "step() needs the number of samples of its batch: call step(samples=len(inputs)), or give the"
                " optimizer batch_size= or samples_of= when you make it"
            )
        return self._size
