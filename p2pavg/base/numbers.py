"""Numbers in settings: their range, and their text. No I/O, no clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import MAX_NAME_CHARS, MAX_RULE_CHARS

# Checks of names that peers choose and that end up in other peers' logs, results and records.


def is_name(name: str) -> bool:
    """Return whether a tag or a metric may have this name."""
    return bool(name) and name.isprintable() and len(name.encode()) <= MAX_NAME_CHARS


def is_rule(text: str) -> bool:
    """Return whether a participation rule may have this text. An empty text is no rule."""
    return len(text) <= MAX_RULE_CHARS and (not text or text.isprintable())


def check_number(name: str, value: object, most: float, *, least: float = 0.0) -> None:
    """Check that a setting is a number above 0 and at most ``most``; with ``least``, from ``least`` to ``most``.

    Raises:
        ConfigError: it is not; the message has the name, the range and the value.
    """
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not 0 < value <= most or value < least:  # type: ignore[operator]
        range_of = f"from {least:g} to {most:g}" if least else f"above 0 and at most {most:g}"
        raise ConfigError(f"{name} must be a number {range_of}, got {value!r}")


def read_number(text: str) -> float:
    """Return the number in a rule's text.

    Raises:
        ConfigError: it is no number.
    """
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"a rule's parameter must be a number, got {text!r}") from None


# Weights as whole units, and medians by weight.

UNITS = 2**22
"""Units in all. Their sums, and those of twice as many, are exact in float32."""


def units_of(weights: Sequence[float]) -> list[int]:
    """Return the weights as whole, even numbers of units, the same for equal weights.

    Even, so that half of their sum is whole. A contribution of less than a four-millionth of the total counts nothing.

    Args:
        weights: above 0, of at most 128 members.
    """
    largest = max(weights)  # divided first, because the sum of weights may overflow
    total = math.fsum(weight / largest for weight in weights)
    return [2 * round(weight / largest / total * (UNITS / 2)) for weight in weights]


def lower_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the lower weighted median: the least value up to which there is at least half of the weight."""
    ordered = sorted(zip(values, units_of(weights), strict=True))
    passed = itertools.accumulate(units for _, units in ordered)
    middle = sum(units for _, units in ordered) // 2
    return next(value for (value, _), at in zip(ordered, passed, strict=True) if at >= middle)


def bounded_weights(weights: Sequence[float]) -> list[float]:
    """Return the weights as a robust rule counts them: none above the median weight of the group.

    A weight is a claim. Without this bound, one liar that claims the largest weight outweighs all others together, and
    a rule that withstands liars with less than half of the weight withstands none. The median counts members and not
    their weights: while liars are fewer than half of the members, it is at most the largest honest weight.

    All members know the same weights, which their senders signed, so all compute the same bounds.
    """
    middle = sorted(weights)[(len(weights) - 1) // 2]
    return [min(weight, middle) for weight in weights]
