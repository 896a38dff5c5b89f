"""Reads strategies from JSON, TOML, run files and configurations. Errors name the field."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

from p2pavg.base.errors import ConfigError
from p2pavg.base.formats import PeerText
from p2pavg.group.strategy import canonical, read_table
from p2pavg.population import Population, PopulationSettings
from p2pavg.population.settings import Choice, LogUniform, Range, Uniform
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.strategies.base import Given, Strategy
from p2pavg.strategies.kinds import Custom, DataParallel, Federated, Local
from p2pavg.strategies.model_parallel import ModelParallel

# The strategy of peers that train with different hyperparameters and copy the best, as a frozen value.


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulationBased(PopulationSettings, Strategy):
    """Peers train with different hyperparameters, and copy the best: see :class:`p2pavg.population.PopulationSettings`.

    Its optimizer is a :class:`~p2pavg.population.Population`, whose ``step(score)`` comes after that of ``inner``.

    Raises:
        ConfigError: an argument is out of range; the message begins with its name.
    """

    kind: ClassVar[str] = "population_based"

    @property
    def settings(self) -> PopulationSettings:
        """The settings of the population."""
        return PopulationSettings(**self._arguments(PopulationSettings))

    def _make(self, given: Given) -> Population:
        assert given.averager is not None  # checked before
        return Population(given.averager, given.model, given.inner, self.settings, **given.options)


KINDS: Mapping[str, type[Strategy]] = MappingProxyType(
    {each.kind: each for each in (Local, DataParallel, Federated, PopulationBased, ModelParallel, Custom)}
)
"""The kinds, by the name that they have in JSON and TOML."""
RANGES: Mapping[str, type[Range]] = MappingProxyType(
    {"uniform": Uniform, "log_uniform": LogUniform, "choice": Choice}
)
"""The ranges of a population's space, by the name that they have in JSON and TOML."""
INSIDE = (DataParallel.kind, Federated.kind)
"""The kinds of strategies that another one can have inside, as its ``training``."""
MAX_TOML_CHARS = 8192


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
    return _read("strategy", {name: value for name, value in table.items() if name != "version"})


def _read(where: str, table: Mapping[str, Any]) -> Strategy:
    """Read a strategy of plain values. Errors begin with ``where`` and the name of the field."""
    kind = KINDS.get(table["kind"])
    if kind is None:
        raise ConfigError(f"{where}.kind must be one of {', '.join(KINDS)}, got {table['kind']!r}")
    given = {name: value for name, value in table.items() if name != "kind"}
    known = {each.name: each for each in fields(kind)}
    if unknown := sorted(given.keys() - known.keys()):
        names = ", ".join(known) or "no fields"
        raise ConfigError(f"{where}.{unknown[0]} is unknown; {kind.kind} has {names}")
    required = [n for n, each in known.items() if each.default is each.default_factory is MISSING]
    if missing := [name for name in required if name not in given]:
        raise ConfigError(f"{where}.{missing[0]} is missing")
    values = {name: _value(name, given[name], f"{where}.{name}") for name in known if name in given}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None


def _value(name: str, given: Any, where: str) -> Any:
    """Return the value of a field from the plain one, which JSON or TOML has."""
    if name == "training":
        return _training(where, given)
    if name == "space":
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where} must be a table of ranges")
        return {each: _range(f"{where}.{each}", its) for each, its in given.items()}
    if name == "function" and isinstance(given, str):
        return PeerText(given)  # never run unless the caller allows it by name
    return tuple(given) if isinstance(given, list) else given


def _training(where: str, table: object) -> Strategy:
    if not isinstance(table, Mapping) or table.get("kind") not in INSIDE:
        raise ConfigError(f"{where}.kind must be one of {', '.join(INSIDE)}")
    if "version" in table:
        raise ConfigError(f"{where}.version is unknown: strategy.version is for both")
    return _read(where, table)


def _range(where: str, given: object) -> Range:
    table: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    kind = table.pop("kind", None)
    if not isinstance(kind, str) or kind not in RANGES:
        raise ConfigError(f"{where}.kind must be one of {', '.join(RANGES)}")
    wanted = {each.name for each in fields(RANGES[kind])}
    if table.keys() != wanted:
        names, found = (", ".join(sorted({"kind", *each})) for each in (wanted, table))
        raise ConfigError(f"{where} must have {names}, and has {found}")
    if isinstance(table.get("values"), list):
        table["values"] = tuple(table["values"])
    try:
        return RANGES[kind](**table)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None
