"""Metrics of a peer: weighted means that travel with its contribution. No I/O, no clock."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping
from typing import SupportsFloat

from p2pavg.base.errors import AccumulateError
from p2pavg.base.limits import MAX_METRIC, MAX_METRICS, MAX_NAME_CHARS
from p2pavg.base.numbers import is_name


def checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics as floats.

    Raises:
        AccumulateError: a name is not 1 to 32 printable characters, or a value is not a finite number.
    """
    if not isinstance(metrics, Mapping):
        raise AccumulateError(f"metrics must be a mapping of names to numbers, got {type(metrics).__name__}")
    for name, value in metrics.items():
        if not isinstance(name, str) or not is_name(name):
            raise AccumulateError(
                f"a metric's name has 1 to {MAX_NAME_CHARS} printable characters, got {name!r}"
            )
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            hint = "; use .item()" if hasattr(value, "item") else ""
            raise AccumulateError(f"metric {name!r} must be a number, got {type(value).__name__}{hint}")
        if not abs(_float_of(value)) <= MAX_METRIC:
            raise AccumulateError(
                f"metric {name!r} must be a finite number, {MAX_METRIC:g} at most in magnitude"
            )
    return {name: float(value) for name, value in metrics.items()}


def not_finite(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of the metrics that are NaN or infinite; other mistakes are those of :func:`checked_metrics`."""
    if not isinstance(metrics, Mapping):
        return ()
    return tuple(
        name
        for name, value in metrics.items()
        if isinstance(value, numbers.Real) and not math.isfinite(_float_of(value))
    )


def _float_of(value: SupportsFloat) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


class MetricMeans:
    """Mean of each metric, by weight, over the calls or peers that gave it.

    Args:
        own: names of metrics that the averager adds to a contribution. Callers cannot give them, and there is room for
            so many others less.
    """

    def __init__(self, own: Collection[str] = ()) -> None:
        self._own = frozenset(own)
        self._most = MAX_METRICS - len(self._own)
        self._found: dict[str, tuple[float, float]] = {}  # name -> mean, weight

    @property
    def means(self) -> dict[str, float]:
        """The means as they are now."""
        return {name: mean for name, (mean, _) in self._found.items()}

    def check_room(self, metrics: Mapping[str, float]) -> None:
        """Raise AccumulateError if a name is the averager's own, or a contribution has no room for all of them."""
        if taken := sorted(metrics.keys() & self._own):
            raise AccumulateError(
                f"metric {taken[0]!r} belongs to the run's topology; give yours another name"
            )
        if len(self._found.keys() | metrics.keys()) > self._most:
            raise AccumulateError(f"at most {self._most} metrics travel with a contribution")

    def add(self, metrics: Mapping[str, float], weight: float) -> None:
        """Add one measurement of each metric, with a weight above 0."""
        for name, value in metrics.items():
            self._take(name, value, weight)

    def merge(self, other: MetricMeans) -> None:
        """Add the means of another instance; leave out names beyond the limit."""
        for name, (mean, weight) in other._found.items():
            if name in self._found or len(self._found) < self._most:
                self._take(name, mean, weight)

    def _take(self, name: str, value: float, weight: float) -> None:
        mean, before = self._found.get(name, (value, 0.0))
        share = weight / (before + weight)
        # A convex combination stays between the two; their difference may overflow a float.
        self._found[name] = (mean * (1 - share) + value * share, before + weight)
