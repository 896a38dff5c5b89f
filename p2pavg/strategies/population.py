"""The strategy of peers that train with different hyperparameters and copy the best, as a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from p2pavg.population import Population, PopulationSettings
from p2pavg.population.settings import Exploit, Explore, Mode
from p2pavg.population.space import Range
from p2pavg.strategies.base import Given, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationBased(Strategy):
    """Peers train with different hyperparameters, and copy the best: see :class:`p2pavg.population.PopulationSettings`.

    Its optimizer is a :class:`~p2pavg.population.Population`, whose ``step(score)`` comes after that of ``inner``.

    Raises:
        ConfigError: an argument is out of range; the message begins with its name.
    """

    kind: ClassVar[str] = "population_based"

    space: Mapping[str, Range] = field(hash=False)
    interval: int
    mode: Mode = "min"
    exploit: Exploit = "truncation"
    quantile: float = 0.25
    explore: Explore = "perturb"
    resample_probability: float = 0.25
    factors: tuple[float, ...] = (1.2, 0.8)
    max_lag: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "space", self.settings.space)

    @property
    def settings(self) -> PopulationSettings:
        """The settings of the population."""
        return PopulationSettings(**self._arguments(PopulationSettings))

    def _make(self, given: Given) -> Population:
        assert given.averager is not None  # checked before
        return Population(given.averager, given.model, given.inner, self.settings, **given.options)
