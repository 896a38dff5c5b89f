"""The settings of a population, which all of its members share. No I/O, no clock, no random source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from p2pavg.base.errors import ConfigError
from p2pavg.base.messages import pack
from p2pavg.population.space import (
    MAX_HYPERPARAMETERS,
    MAX_NAME_CHARS,
    Choice,
    Draws,
    LogUniform,
    Range,
    Uniform,
    Value,
    is_name,
    is_number,
)

Exploit = Literal["truncation", "tournament"]
Explore = Literal["perturb", "resample"]
Mode = Literal["min", "max"]

EXPLOIT: tuple[Exploit, ...] = ("truncation", "tournament")
EXPLORE: tuple[Explore, ...] = ("perturb", "resample")
MODES: tuple[Mode, ...] = ("min", "max")

MAX_INTERVAL = 2**40
MAX_LAG = 2**20
MAX_SEED = 2**63
MAX_FACTOR = 1e6

_SETTINGS = "p2pavg/population/settings/1"
_START = "p2pavg/population/start/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationSettings:
    """The rules of population based training (Jaderberg et al. 2017), with the defaults of Ray Tune.

    All members of a population need the same settings: words of a member with others count nothing.

    Args:
        space: the hyperparameters that are tuned, 1 to 16, and the values that they may have.
        interval: steps of training between two generations.
        mode: ``"min"`` if a lower score is better, such as a loss; ``"max"`` if a higher one is.
        exploit: the rule by which a member decides whether to copy another one. ``"truncation"``: a member in the
            lowest ``quantile`` of the scores copies a member that is drawn from the highest one. ``"tournament"``: a
            member draws another one, and copies it if its score is better.
        quantile: fraction of the members that truncation replaces, above 0 and at most 0.5.
        explore: how a member that has copied changes the hyperparameters that it got. ``"perturb"``: each is drawn anew
            with ``resample_probability``, and else multiplied by one of ``factors``; a :class:`Choice` goes to a
            neighbouring value. ``"resample"``: all are drawn anew.
        resample_probability: from 0 to 1.
        factors: 1 to 16 numbers above 0.
        max_lag: generations by which a member's training may be behind that of the median member; words of members that
            are further behind count nothing.
        seed: the members' first hyperparameters and all draws follow from it.

    Raises:
        ConfigError: an argument is out of range; the message names it.
    """

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
        _check_space(self.space)
        object.__setattr__(self, "space", MappingProxyType(dict(sorted(self.space.items()))))
        _check_whole("interval", self.interval, 1, MAX_INTERVAL)
        _check_whole("max_lag", self.max_lag, 1, MAX_LAG)
        _check_whole("seed", self.seed, -MAX_SEED, MAX_SEED)
        _check_one_of("mode", self.mode, MODES)
        _check_one_of("exploit", self.exploit, EXPLOIT)
        _check_one_of("explore", self.explore, EXPLORE)
        if not is_number(self.quantile) or not 0 < self.quantile <= 0.5:
            raise ConfigError(f"quantile must be a number above 0 and at most 0.5, got {self.quantile!r}")
        if not is_number(self.resample_probability) or not 0 <= self.resample_probability <= 1:
            raise ConfigError(
                f"resample_probability must be a number from 0 to 1, got {self.resample_probability!r}"
            )
        if not isinstance(self.factors, tuple) or not 0 < len(self.factors) <= MAX_HYPERPARAMETERS:
            raise ConfigError(
                f"factors must be a tuple of 1 to {MAX_HYPERPARAMETERS} numbers, got {self.factors!r}"
            )
        if not all(is_number(factor) and 0 < factor <= MAX_FACTOR for factor in self.factors):
            raise ConfigError(
                f"each of factors must be above 0 and at most {MAX_FACTOR:g}, got {self.factors!r}"
            )

    @property
    def digest(self) -> bytes:
        """32 bytes that depend on every setting."""
        space = tuple((name, range_.fields) for name, range_ in self.space.items())
        numbers = (float(self.quantile), float(self.resample_probability), tuple(map(float, self.factors)))
        rules = (self.mode, self.exploit, self.explore, self.interval, self.max_lag, str(self.seed))
        return hashlib.sha256(pack(_SETTINGS, space, rules, numbers)).digest()

    def first(self, member: str) -> dict[str, Value]:
        """Return the hyperparameters with which a member begins: drawn from the space by its name and the seed."""
        draws = Draws(pack(_START, self.digest, member))
        return {name: range_.draw(draws.fraction()) for name, range_ in self.space.items()}

    def checked(self, hyperparameters: Mapping[str, Value]) -> dict[str, Value]:
        """Return hyperparameters in the order of the space; whole numbers of a range become floats.

        Raises:
            ConfigError: one is missing, unknown or out of its range; the message names it.
        """
        if missing := [name for name in self.space if name not in hyperparameters]:
            raise ConfigError(f"the hyperparameter {missing[0]!r} is missing")
        if unknown := sorted(hyperparameters.keys() - self.space.keys()):
            raise ConfigError(f"the hyperparameter {unknown[0]!r} is not in the population's space")
        found = {}
        for name, range_ in self.space.items():
            value = hyperparameters[name]
            found[name] = float(value) if is_number(value) and not isinstance(range_, Choice) else value
            if not range_.holds(found[name]):
                raise ConfigError(f"the hyperparameter {name} = {value!r} is not in its range: {range_}")
        return found

    def better(self, one: float, other: float) -> bool:
        """Return whether the first score is better than the second one."""
        return one < other if self.mode == "min" else one > other


def _check_space(space: object) -> None:
    if not isinstance(space, Mapping) or not 0 < len(space) <= MAX_HYPERPARAMETERS:
        raise ConfigError(f"space must map 1 to {MAX_HYPERPARAMETERS} names to ranges")
    for name, range_ in space.items():
        if not is_name(name):
            raise ConfigError(
                f"space: a name is an identifier of at most {MAX_NAME_CHARS} ASCII characters, got {name!r}"
            )
        if not isinstance(range_, Uniform | LogUniform | Choice):
            raise ConfigError(f"space: {name} must be a Uniform, a LogUniform or a Choice, got {range_!r}")


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {value!r}")


def _check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
