"""The text of a strategy, by which peers of a run that train in the same way know each other. No I/O, no clock.

A strategy is a table of plain values here: :mod:`p2pavg.strategies` knows what they mean. The text is JSON in one form:
sorted keys, no spaces.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from p2pavg.base.errors import ConfigError

MAX_STRATEGY_CHARS = 1024
"""As JSON and as TOML: run files have room for it, and travel in one message to newcomers."""
MAX_DEPTH = 4
VERSION = 1

_MARK = re.compile(r"strategy [0-9a-f]{16}\Z")


def canonical(table: Mapping[str, Any]) -> str:
    """Return the text of a table.

    Raises:
        ConfigError: it has values that are no plain ones, no version or kind, or is too long; the message names the
            key.
    """
    _check_table("strategy", table, MAX_DEPTH)
    if table.get("version") != VERSION or type(table["version"]) is not int:
        raise ConfigError(f"strategy.version must be {VERSION}: this p2pavg reads no other")
    if not isinstance(table.get("kind"), str):
        raise ConfigError("strategy.kind must be text, such as 'data_parallel'")
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False)
    longest = max(len(text), len("\n".join(toml_lines(table, "strategy"))))
    if longest > MAX_STRATEGY_CHARS:
        raise ConfigError(f"strategy has {longest} characters as text, {MAX_STRATEGY_CHARS} is the most")
    return text


def read_table(text: str) -> dict[str, Any]:
    """Return the table of a strategy's JSON.

    Raises:
        ConfigError: the text is too long or no JSON, or its table is none of a strategy.
    """
    if not isinstance(text, str) or len(text) > 4 * MAX_STRATEGY_CHARS:
        raise ConfigError(f"strategy must be JSON of at most {4 * MAX_STRATEGY_CHARS} characters")
    try:
        table = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"strategy is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError("strategy must be a JSON object")
    canonical(table)
    return table


def check_text(text: object) -> None:
    """Raise ConfigError unless this is the canonical text of a strategy."""
    if not isinstance(text, str):
        raise ConfigError(f"strategy must be the text of a strategy, got {type(text).__name__}")
    if canonical(read_table(text)) != text:
        raise ConfigError("strategy must be the canonical text of a strategy: give Strategy.text")


def mark(text: str) -> str:
    """Return the short text that stands for a strategy in the records of a run; empty for none."""
    return f"strategy {hashlib.sha256(text.encode()).hexdigest()[:16]}" if text else ""


def mark_in(rule: str) -> str:
    """Return the mark at the end of the rule of a run entry; empty if there is none."""
    found = _MARK.search(rule)
    return found.group() if found else ""


def toml_lines(table: Mapping[str, Any], name: str) -> list[str]:
    """Return a table as the lines of a TOML table of this name; tables in it come after its values."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in sorted(plain.items()))]
    for key, value in sorted(table.items()):
        if isinstance(value, Mapping):
            lines += ["", *toml_lines(value, f"{name}.{key}")]
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's texts, numbers and truth values are TOML's, of which these are all.
    return json.dumps(value)


def _check_table(name: str, value: object, depth: int) -> None:
    if isinstance(value, Mapping):
        if depth == 0:
            raise ConfigError(f"{name} is nested too deeply")
        for key, each in value.items():
            if not isinstance(key, str) or not key.isidentifier() or not key.isascii():
                raise ConfigError(f"{name} has the key {key!r}, which is no name")
            _check_table(f"{name}.{key}", each, depth - 1)
    elif isinstance(value, list | tuple):
        for each in value:
            if isinstance(each, Mapping | list | tuple):
                raise ConfigError(f"{name} must be a list of plain values")
            _check_table(name, each, depth)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value!r}")
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        raise ConfigError(f"{name} is too large a number")
    elif isinstance(value, str) and not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{name} must be printable ASCII text")
    elif not isinstance(value, str | int | float | bool):
        raise ConfigError(f"{name} must be text, a number, true or false, or a list of them")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice")
    return table
