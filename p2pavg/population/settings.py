"""The settings of a population, which all of its members share, and the ranges of its hyperparameters.

Draws follow from a seed, and a value follows from its draw, the same on every machine. No I/O, no clock, no random
source.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeGuard, TypeVar

from p2pavg.base.errors import ConfigError
from p2pavg.base.messages import pack

Value: TypeAlias = "float | int | str | bool"
"""A hyperparameter's value."""

MAX_HYPERPARAMETERS = 16
MAX_NAME_CHARS = 24
"""Of a hyperparameter, or of a value that is text: 16 of them, twice, have to fit into a record."""
MAX_CHOICES = 64
MAX_MAGNITUDE = 1e15
DIGITS = 6
"""Significant digits of a value that was drawn or multiplied. Logarithms differ in the last bit from machine to
machine; the rounded value does not, so every peer computes the same one."""

_BITS = 53  # a float's precision

T = TypeVar("T")


class Draws:
    """A sequence of draws. Two objects with the same seed make the same draws.

    Args:
        seed: any bytes.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = hashlib.sha256(seed).digest()
        self._count = 0

    def fraction(self) -> float:
        """Return a number from 0 to below 1."""
        drawn = hashlib.sha256(self._seed + self._count.to_bytes(8, "big")).digest()
        self._count += 1
        number = int.from_bytes(drawn[:8], "big") >> (64 - _BITS)
        return number / float(1 << _BITS)

    def choose(self, items: Sequence[T]) -> T:
        """Return one of some items, which must not be empty."""
        return items[int(self.fraction() * len(items))]


@dataclass(frozen=True, slots=True)
class _Interval:
    """Numbers from ``low`` to ``high``."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def perturbed(self, value: Value, factor: float, fraction: float) -> Value:  # noqa: ARG002
        """Return the value times a factor, inside the range."""
        return _within(float(value) * factor, self.low, self.high)

    def holds(self, value: object) -> bool:
        """Return whether it is a value of this range."""
        return type(value) is float and self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Uniform(_Interval):
    """Numbers from ``low`` to ``high``, all equally likely.

    Raises:
        ConfigError: the bounds are not finite numbers, or ``low`` is not below ``high``.
    """

    def draw(self, fraction: float) -> float:
        """Return the value of a draw from 0 to 1."""
        return _within(self.low + (self.high - self.low) * fraction, self.low, self.high)

    @property
    def fields(self) -> tuple[str | float, ...]:
        """The range as plain values."""
        return ("uniform", float(self.low), float(self.high))


@dataclass(frozen=True, slots=True)
class LogUniform(_Interval):
    """Numbers from ``low`` to ``high`` above 0, whose logarithms are equally likely: for learning rates.

    Raises:
        ConfigError: the bounds are not finite numbers above 0, or ``low`` is not below ``high``.
    """

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)
        if self.low <= 0:
            raise ConfigError(f"low must be above 0 in a LogUniform, got {self.low!r}")

    def draw(self, fraction: float) -> float:
        """Return the value of a draw from 0 to 1."""
        low, high = math.log(self.low), math.log(self.high)
        return _within(math.exp(low + (high - low) * fraction), self.low, self.high)

    @property
    def fields(self) -> tuple[str | float, ...]:
        """The range as plain values."""
        return ("log uniform", float(self.low), float(self.high))


@dataclass(frozen=True, slots=True)
class Choice:
    """Some values in an order: a perturbation goes to the next or to the previous one.

    Args:
        values: 2 to 64 different numbers, booleans, or texts of at most 24 printable ASCII characters.

    Raises:
        ConfigError: they are not.
    """

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.values, tuple) or not 2 <= len(self.values) <= MAX_CHOICES:
            raise ConfigError(f"values must be a tuple of 2 to {MAX_CHOICES} values")
        if len({(type(value), value) for value in self.values if is_value(value)}) != len(self.values):
            raise ConfigError(
                f"values must be different numbers, or texts of 1 to {MAX_NAME_CHARS} printable ASCII characters"
            )

    def draw(self, fraction: float) -> Value:
        """Return the value of a draw from 0 to 1."""
        return self.values[min(int(fraction * len(self.values)), len(self.values) - 1)]

    def perturbed(self, value: Value, factor: float, fraction: float) -> Value:  # noqa: ARG002
        """Return the next or the previous value, as a draw from 0 to 1 says; at an end, the value itself."""
        index = next(at for at, own in enumerate(self.values) if type(own) is type(value) and own == value)
        index += 1 if fraction >= 0.5 else -1
        return self.values[min(max(index, 0), len(self.values) - 1)]

    def holds(self, value: object) -> bool:
        """Return whether it is one of the values, also by its type."""
        return any(type(value) is type(own) and value == own for own in self.values)

    @property
    def fields(self) -> tuple[Value, ...]:
        """The range as plain values."""
        return ("choice", *self.values)


Range: TypeAlias = Uniform | LogUniform | Choice
"""The values that a hyperparameter may have."""


def is_name(name: object) -> bool:
    """Return whether a hyperparameter may have this name."""
    return (
        isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isascii() and name.isidentifier()
    )


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number; truth values are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_value(value: object) -> bool:
    """Return whether a hyperparameter may have this value."""
    if isinstance(value, str):
        return 0 < len(value) <= MAX_NAME_CHARS and value.isascii() and value.isprintable()
    # Booleans are whole numbers here. The comparison is false for NaN.
    return isinstance(value, int | float) and abs(value) <= MAX_MAGNITUDE


def _check_bounds(low: object, high: object) -> None:
    for name, bound in (("low", low), ("high", high)):
        if not is_number(bound) or not abs(bound) <= MAX_MAGNITUDE:
            raise ConfigError(
                f"{name} must be a number of at most {MAX_MAGNITUDE:g} in magnitude, got {bound!r}"
            )
    if not low < high:  # type: ignore[operator]
        raise ConfigError(f"low must be below high, got {low!r} and {high!r}")


def _within(value: float, low: float, high: float) -> float:
    return min(max(float(f"{value:.{DIGITS}g}"), float(low)), float(high))


# The settings.

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
        check_whole("interval", self.interval, 1, MAX_INTERVAL)
        check_whole("max_lag", self.max_lag, 1, MAX_LAG)
        check_whole("seed", self.seed, -MAX_SEED, MAX_SEED)
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


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raise ConfigError unless this is a whole number in these bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {value!r}")


def _check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
