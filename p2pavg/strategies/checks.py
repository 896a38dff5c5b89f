"""Checks of the fields of strategies. An error begins with the field's name. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace

from p2pavg.base.errors import ConfigError
from p2pavg.group.aggregation import resolve_rule
from p2pavg.group.topology import resolve_topology
from p2pavg.optim import Cells
from p2pavg.population.space import is_number

MEAN = "mean"
MAX_COUNT = 2**40
MAX_NUMBER = 1e15


def check_number(name: str, value: object) -> None:
    """Raise ConfigError unless this is a number above 0 that is not too large."""
    if not is_number(value) or not 0 < value <= MAX_NUMBER:
        raise ConfigError(f"{name} must be a number above 0 and at most {MAX_NUMBER:g}, got {value!r}")


def check_count(name: str, value: object, least: int = 1, most: int = MAX_COUNT) -> None:
    """Raise ConfigError unless this is a whole number in these bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {value!r}")


def check_one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ConfigError unless this is one of some texts."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


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


def checked_cells(given: object) -> Cells:
    """Return cells, or those of a table, in the one form that equal cells have.

    Raises:
        ConfigError: it is neither, or a field is missing, unknown or out of range; the message names it.
    """
    found = given if isinstance(given, Cells) else _cells_of(given)
    rule = resolve_rule(found.robust)
    # Peers that write 15 and 15.0 have the same strategy, so they need the same text.
    return replace(
        found,
        timeout=float(found.timeout),
        patience=float(found.patience),
        robust=None if rule is None else rule.text,
    )


def _cells_of(table: object) -> Cells:
    if not isinstance(table, Mapping):
        raise ConfigError(f"cells must be a table, p2pavg.optim.Cells(count=...) or None, got {table!r}")
    names = [each.name for each in fields(Cells)]
    if unknown := sorted(table.keys() - set(names)):
        raise ConfigError(f"cells.{unknown[0]} is unknown; cells has {', '.join(names)}")
    if "count" not in table:
        raise ConfigError("cells.count is missing")
    try:
        return Cells(**table)
    except ValueError as error:
        raise ConfigError(f"cells.{error}") from None
