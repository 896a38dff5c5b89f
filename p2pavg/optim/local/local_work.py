"""Counts of one peer's local work: samples that no outer step has taken yet, and their measurements. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pavg.allreduce.vector.metrics import MetricMeans


class LocalWork:
    """The samples behind each fragment's next pseudo-gradient, and the metrics of the inner steps.

    Args:
        fragments: number of fragments.
    """

    def __init__(self, fragments: int) -> None:
        self._samples = [0.0] * fragments
        self._metrics = MetricMeans()
        self._sent: tuple[int, float, MetricMeans] | None = None
        """Of the contribution that is in a round: its fragment, its samples and its metrics."""

    def add(self, samples: float, metrics: Mapping[str, float]) -> None:
        """Note an inner step."""
        self._samples = [before + samples for before in self._samples]
        self._metrics.add(metrics, samples)

    def check_room(self, metrics: Mapping[str, float]) -> None:
        """Raise AccumulateError if these metrics would exceed the names that a contribution carries."""
        self._metrics.check_room(metrics)

    def samples(self, fragment: int) -> float:
        """Return the samples since the last outer step of a fragment that this peer contributed to."""
        return self._samples[fragment]

    def send(self, fragment: int) -> tuple[float, dict[str, float]]:
        """Note a contribution with a fragment's pseudo-gradient; return its weight and its metrics."""
        self.returned()
        self._sent = (fragment, self._samples[fragment], self._metrics)
        means = self._metrics.means
        self._metrics = MetricMeans()
        return self._sent[1], means

    def used(self) -> None:
        """Note that the contribution is in an average."""
        if self._sent is not None:
            fragment, samples, _ = self._sent
            self._samples[fragment] -= samples
            self._sent = None

    def returned(self) -> None:
        """Note that the contribution, if there is one, is in no average."""
        if self._sent is not None:
            self._metrics.merge(self._sent[2])
            self._sent = None

    def drop(self) -> None:
        """Forget all inner steps."""
        self.__init__(len(self._samples))  # type: ignore[misc]

    def drop_fragment(self, fragment: int) -> None:
        """Forget the samples behind a fragment's next pseudo-gradient."""
        self._samples[fragment] = 0.0

    def saved(self) -> float | list[float]:
        """Return the samples, for a saved state."""
        return self._samples[0] if len(self._samples) == 1 else list(self._samples)

    def load(self, saved: float | Sequence[float]) -> None:
        """Continue from :meth:`saved`; raise ValueError if it is of another number of fragments."""
        samples = [float(saved)] if isinstance(saved, int | float) else [float(count) for count in saved]
        if len(samples) != len(self._samples):
            raise ValueError("state: it is of another number of fragments")
        self.drop()
        self._samples = samples
