"""The batches behind the calls of an optimizer's ``step``: their samples and measurements. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from p2pavg.allreduce.vector.metrics import MetricMeans, checked_metrics
from p2pavg.optim.base.state import checked_amount, checked_count

SamplesOf = Callable[[], float]
"""Returns the number of samples behind the gradients at the time of the call."""
NO_METRICS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples and passes behind one update of the gradients."""

    samples: float
    metrics: Mapping[str, float]


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
        self._calls, self._samples, self._metrics = 0, 0.0, MetricMeans()

    @property
    def is_pending(self) -> bool:
        """True between two calls whose gradients belong together: they must not be zeroed."""
        return self._calls > 0

    def note(self, metrics: Mapping[str, float]) -> None:
        """Add measurements to those of the next call.

        Raises:
            AccumulateError: a measurement is not a finite number, or there would be too many.
        """
        joined = {**self._noted, **checked_metrics(metrics)}
        MetricMeans().check_room(joined)
        self._noted = joined

    def add(self, samples: float | None, metrics: Mapping[str, float]) -> Batch | None:
        """Note a call; return the whole batch, or ``None`` if more calls belong to it.

        Raises:
            TypeError: nothing tells the number of samples.
            ValueError: ``samples`` or a metric of an accumulated batch is out of range.
        """
        count = self._count(samples)
        joined = {**self._noted, **metrics} if self._noted else metrics
        if self._accumulate > 1:
            count, joined = checked_amount("samples", count), checked_metrics(joined)
            self._metrics.check_room(joined)
        self._noted = {}
        if self._accumulate == 1:
            return Batch(count, joined)
        self._calls += 1
        self._samples += count
        self._metrics.add(joined, count)
        if self._calls < self._accumulate:
            return None
        batch = Batch(self._samples, self._metrics.means)
        self.drop()
        return batch

    def _count(self, samples: float | None) -> float:
        if samples is not None:
            return samples
        if self._samples_of is not None:
            return self._samples_of()
        if self._size is None:
            raise TypeError(
                "step() needs the number of samples of its batch: call step(samples=len(inputs)), or give the"
                " optimizer batch_size= or samples_of= when you make it"
            )
        return self._size
