"""Checks of the fields of strategies. An error begins with the field's name."""

from __future__ import annotations

from collections.abc import Mapping

from p2pavg.base.errors import ConfigError
from p2pavg.group.aggregation import resolve_rule
from p2pavg.group.topology import resolve_topology

MEAN = "mean"
MAX_COUNT = 2**40
MAX_NUMBER = 1e15


def check_number(name: str, value: object) -> None:
    """Raise ConfigError unless this is a number above 0 that is not too large."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
        raise ConfigError(f"{name} must be a number above 0 and at most {MAX_NUMBER:g}, got {value!r}")


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise ConfigError unless this is a whole number from ``least`` on."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
        raise ConfigError(f"{name} must be a whole number from {least} to {MAX_COUNT}, got {value!r}")


def check_aggregation(value: object) -> None:
    """Raise ConfigError unless this is ``"mean"`` or the text of a robust rule."""
    if value == MEAN:
        return
    if not isinstance(value, str):
        raise ConfigError(f"aggregation must be text, got {value!r}")
    try:
        resolve_rule(value)
    except ConfigError as error:
        raise ConfigError(f"aggregation: {error}, or 'mean'") from None


def checked_topology(value: object) -> str:
    """Return the text of a topology; raise ConfigError if it is none."""
    try:
        return resolve_topology(value).text
    except ConfigError as error:
        raise ConfigError(f"topology: {error}") from None


def check_options(options: object, allowed: tuple[str, ...], rule: str) -> None:
    """Raise ConfigError unless these are numbers, by the names that a rule allows."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"options must be a table of numbers, got {type(options).__name__}")
    for name, value in options.items():
        if name not in allowed:
            raise ConfigError(f"options.{name} is unknown; {rule} has {', '.join(allowed) or 'none'}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value <= MAX_NUMBER:
            raise ConfigError(f"options.{name} must be a number from 0, got {value!r}")
