"""Reads strategies from JSON, TOML, run files and configurations. Errors name the field."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

from p2pavg.base.errors import ConfigError
from p2pavg.group.strategy import VERSION, canonical, read_table
from p2pavg.population.space import Choice, LogUniform, Range, Uniform
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.strategies.base import Strategy
from p2pavg.strategies.kinds import Custom, DataParallel, Federated, Local
from p2pavg.strategies.model_parallel import ModelParallel
from p2pavg.strategies.population import PopulationBased

KINDS: Mapping[str, type[Strategy]] = MappingProxyType(
    {each.kind: each for each in (Local, DataParallel, Federated, PopulationBased, ModelParallel, Custom)}
)
"""The kinds, by the name that they have in JSON and TOML."""
MAX_TOML_CHARS = 8192

_RANGES: dict[str, type[Uniform] | type[LogUniform]] = {"uniform": Uniform, "log_uniform": LogUniform}


def read_json(text: str) -> Strategy:
    """Read a strategy from JSON.

    Raises:
        ConfigError: the text is no strategy; the message names the field that is wrong.
    """
    return read_plain(read_table(text))


def read_toml(text: str) -> Strategy:
    """Read a strategy from TOML with a table ``[strategy]``.

    Raises:
        ConfigError: the text is no strategy; the message names the field that is wrong.
    """
    if len(text) > MAX_TOML_CHARS:
        raise ConfigError(f"a strategy has at most {MAX_TOML_CHARS} characters as TOML")
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not TOML: {error}") from None
    if found.keys() != {"strategy"} or not isinstance(found["strategy"], dict):
        raise ConfigError("the TOML of a strategy has one table, [strategy]")
    return read_plain(found["strategy"])


def strategy_of(source: AveragingConfig | RunFile) -> Strategy | None:
    """Return the strategy of a configuration or of a run file; ``None`` if it has none.

    Raises:
        ConfigError: it is malformed; the message names the field.
    """
    return read_json(source.strategy) if source.strategy else None


def read_plain(table: Mapping[str, Any]) -> Strategy:
    """Read a strategy from a table of plain values.

    Raises:
        ConfigError: a field is missing, unknown or out of range; the message names it.
    """
    canonical(table)
    given = {name: value for name, value in table.items() if name not in ("version", "kind")}
    kind = KINDS.get(table["kind"])
    if kind is None:
        raise ConfigError(f"strategy.kind must be one of {', '.join(KINDS)}, got {table['kind']!r}")
    known = {each.name: each for each in fields(kind) if each.init}
    if unknown := sorted(given.keys() - known.keys()):
        raise ConfigError(
            f"strategy.{unknown[0]} is unknown; {table['kind']} has {', '.join(known) or 'no fields'}"
        )
    required = [
        name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING
    ]
    if missing := [name for name in required if name not in given]:
        raise ConfigError(f"strategy.{missing[0]} is missing")
    if kind is PopulationBased:
        given["space"] = _space(given["space"])
    if kind is ModelParallel:
        given["training"] = _training(given["training"], (DataParallel.kind, Federated.kind))
    if kind is PopulationBased and "training" in given:
        given["training"] = _training(given["training"], (DataParallel.kind,))
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
    try:
        found = kind(**given)
    except ConfigError as error:
        raise ConfigError(f"strategy.{error}") from None
    if isinstance(found, Custom):
        object.__setattr__(found, "is_own", False)
    return found


def _training(table: object, inside: Collection[str]) -> Strategy:
    """Read the strategy inside of another one, which is of one of these kinds."""
    if not isinstance(table, Mapping) or table.get("kind") not in inside:
        raise ConfigError(f"strategy.training.kind must be one of {', '.join(inside)}")
    if "version" in table:
        raise ConfigError("strategy.training.version is unknown: strategy.version is for both")
    try:
        return read_plain({**table, "version": VERSION})
    except ConfigError as error:
        raise ConfigError(str(error).replace("strategy.", "strategy.training.", 1)) from None


def _space(space: object) -> dict[str, Range]:
    if not isinstance(space, Mapping):
        raise ConfigError("strategy.space must be a table of ranges")
    return {name: _range(f"strategy.space.{name}", each) for name, each in space.items()}


def _range(name: str, given: object) -> Range:
    kind = given.get("kind") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or kind not in (*_RANGES, "choice"):
        raise ConfigError(f"{name}.kind must be one of {', '.join(_RANGES)}, choice")
    wanted = {"kind", "values"} if kind == "choice" else {"kind", "low", "high"}
    if given.keys() != wanted:
        raise ConfigError(f"{name} must have {', '.join(sorted(wanted))}, and has {', '.join(sorted(given))}")
    try:
        if kind == "choice":
            values = given["values"]
            return Choice(tuple(values) if isinstance(values, list | tuple) else values)
        return _RANGES[kind](given["low"], given["high"])
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from None
