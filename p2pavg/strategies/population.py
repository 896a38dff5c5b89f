"""The strategy of peers that train with different hyperparameters and copy the best, as a frozen value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from p2pavg.base.errors import ConfigError
from p2pavg.blocking import Averager
from p2pavg.population import Population, PopulationSettings, TeamPopulation
from p2pavg.population.settings import Exploit, Explore, Mode
from p2pavg.population.space import Choice, Range, Uniform
from p2pavg.strategies.base import Strategy
from p2pavg.strategies.kinds import DataParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationBased(Strategy):
    """Peers train with different hyperparameters, and copy the best: see :class:`p2pavg.population.PopulationSettings`.

    Its optimizer is a :class:`~p2pavg.population.Population`, whose ``step(score)`` comes after that of ``inner``. With
    ``training``, several peers form one member of the population, a team: it is a
    :class:`~p2pavg.population.TeamPopulation`, which steps ``inner`` itself, and ``optimizer`` needs ``team=``, the
    name of this peer's team.

    Args:
        training: how the peers of a team train together: :class:`DataParallel` without ``overlap`` and ``cells``.

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
    training: DataParallel | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "space", self.settings.space)
        if self.training is None:
            return
        if not isinstance(self.training, DataParallel):
            raise ConfigError(f"training must be DataParallel, got {type(self.training).__name__}")
        if self.training.overlap:
            raise ConfigError(
                "training.overlap must be False in a team, which may replace its weights at any update"
            )
        if self.training.cells is not None:
            raise ConfigError("training.cells must be None in a team, which has 16 peers at most")

    @property
    def settings(self) -> PopulationSettings:
        """The settings of the population."""
        return PopulationSettings(
            space=self.space,
            interval=self.interval,
            mode=self.mode,
            exploit=self.exploit,
            quantile=self.quantile,
            explore=self.explore,
            resample_probability=self.resample_probability,
            factors=self.factors,
            max_lag=self.max_lag,
            seed=self.seed,
        )

    def _plain(self, name: str) -> Any:
        if name == "space":
            return {each: _plain_range(range_) for each, range_ in self.space.items()}
        if name == "training" and self.training is not None:
            return {each: value for each, value in self.training.table.items() if each != "version"}
        return getattr(self, name)

    def _settings(self) -> dict[str, Any]:
        return {} if self.training is None else self.training._settings()

    def _build(
        self,
        model: nn.Module,
        averager: Averager,
        inner: Optimizer,
        *,
        allow: Collection[str] = (),  # noqa: ARG002 - it runs no function
        **options: Any,
    ) -> Population | TeamPopulation:
        training = self.training
        if training is None:
            return Population(averager, model, inner, self.settings, **options)
        if "team" not in options:
            raise ConfigError(
                "team is missing: give the name of this peer's team, the same on all of its peers"
            )
        numbers = {"target_batch_size": training.target_batch_size, "max_grad_norm": training.max_grad_norm}
        return TeamPopulation(averager, model, inner, self.settings, **{**options, **numbers})


def _plain_range(range_: Range) -> dict[str, Any]:
    if isinstance(range_, Choice):
        return {"kind": "choice", "values": range_.values}
    kind = "uniform" if isinstance(range_, Uniform) else "log_uniform"
    return {"kind": kind, "low": float(range_.low), "high": float(range_.high)}
