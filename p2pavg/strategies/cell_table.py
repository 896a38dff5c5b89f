"""The cells of a strategy as a table of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from p2pavg.base.errors import ConfigError
from p2pavg.group.aggregation import resolve_rule
from p2pavg.optim import Cells

_FIELDS = tuple(each.name for each in fields(Cells))


def table_of(cells: Cells) -> dict[str, Any]:
    """Return the cells as plain values. A rule is its text, and ``robust`` is left out if it is ``None``."""
    found = {name: getattr(cells, name) for name in _FIELDS}
    rule = resolve_rule(found.pop("robust"))
    return found if rule is None else found | {"robust": rule.text}


def checked_cells(given: object) -> Cells:
    """Return the cells of a table; return cells unchanged, but for a rule, which becomes its text.

    Raises:
        ConfigError: it is neither, or a field is missing, unknown or out of range; the message names it.
    """
    table = table_of(given) if isinstance(given, Cells) else given
    if not isinstance(table, Mapping):
        raise ConfigError(f"cells must be a table, p2pavg.optim.Cells(count=...) or None, got {given!r}")
    if unknown := sorted(table.keys() - set(_FIELDS)):
        raise ConfigError(f"cells.{unknown[0]} is unknown; cells has {', '.join(_FIELDS)}")
    if "count" not in table:
        raise ConfigError("cells.count is missing")
    try:
        found = Cells(**table)
    except ValueError as error:
        raise ConfigError(f"cells.{error}") from None
    # Peers that write 15 and 15.0 have the same strategy, so they need the same text.
    return replace(found, timeout=float(found.timeout), patience=float(found.patience))
