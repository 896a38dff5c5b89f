"""Ranges of hyperparameters: how values are drawn, and how they change when a member explores. No I/O, no clock.

Draws follow from a seed, and a value follows from its draw, the same on every machine. There is no random source.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard, TypeVar

from p2pavg.base.errors import ConfigError

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
