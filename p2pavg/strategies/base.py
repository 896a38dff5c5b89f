"""The base of all strategies: their texts, checks of their fields, and the optimizer that they make."""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, fields, replace
from inspect import signature
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from p2pavg.base.errors import ConfigError
from p2pavg.blocking import Averager
from p2pavg.group.aggregation import resolve_rule
from p2pavg.group.strategy import VERSION, canonical, read_table, toml_lines
from p2pavg.group.topology import resolve_topology
from p2pavg.optim import Cells
from p2pavg.optim.base.arguments import check_averager
from p2pavg.population.settings import Choice, LogUniform, Uniform, is_number
from p2pavg.runs.config import AveragingConfig

MAX_TOLD = 3  # fields in which two strategies differ
MEAN = "mean"
MAX_COUNT = 2**40
MAX_NUMBER = 1e15


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of :meth:`Strategy.optimizer`."""

    model: nn.Module
    averager: Averager | None
    inner: Optimizer
    options: dict[str, Any]
    allow: Collection[str] = ()


# The kinds are classes, and only the recipes are entries of a table: a user's type checker and editor know the fields
# of a dataclass, and not the arguments of a signature that is read when the program runs. Which fields the optimizer
# gets comes from its own signature (`_arguments`).
class Strategy(abc.ABC):
    """A way to train with other peers, as a value. Its subclasses are frozen dataclasses."""

    __slots__ = ()

    kind: ClassVar[str]
    """Its name in JSON and TOML."""
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def table(self) -> dict[str, Any]:
        """The strategy as plain values. Fields that are ``None`` or empty are left out."""
        found = {each.name: plain(getattr(self, each.name)) for each in fields(self)}
        given = {name: value for name, value in found.items() if value is not None and value != {}}
        return {"version": VERSION, "kind": self.kind, **given}

    @property
    def json(self) -> str:
        """The strategy as JSON in one form: equal strategies have equal texts. :func:`read_json` reads it."""
        return canonical(self.table)

    @property
    def toml(self) -> str:
        """The strategy as a TOML table ``[strategy]``, as in run files. :func:`read_toml` reads it."""
        return "\n".join(toml_lines(self.table, "strategy")) + "\n"

    def config(self, config: AveragingConfig) -> AveragingConfig:
        """Return the configuration of an averager that trains with this strategy.

        It has the strategy's aggregation and selection, and its text: peers with other strategies never meet.

        Raises:
            ConfigError: the configuration has another strategy already, such as that of the run file.
        """
        if config.strategy:
            self._check_same(config)
        return replace(config, strategy=self.json, **self._settings())

    def optimizer(
        self,
        model: nn.Module,
        averager: Averager | None,
        inner: Optimizer,
        *,
        allow: Collection[str] = (),
        **options: Any,
    ) -> Any:
        """Return the optimizer that the strategy says; see the subclass for its class.

        Args:
            model: the model that is trained.
            averager: averager whose configuration is of :meth:`config`; :class:`Local` needs none.
            inner: a torch optimizer of the model's parameters.
            allow: functions, as ``"module:function"``, that a :class:`Custom` strategy may run although it was read
                from a text.
            options: further options of what is made, such as ``state`` or ``wait``.

        Raises:
            ConfigError: the averager's configuration differs from the strategy, or its function is not allowed, or not
                there; the message says which field.
        """
        self._check_averager(averager)
        return self._make(Given(model, averager, inner, options, allow))

    @abc.abstractmethod
    def _make(self, given: Given) -> Any:
        """Make the optimizer. The averager has been checked."""

    def _settings(self) -> dict[str, Any]:
        """Return the settings of an averager that follow from the strategy."""
        return {}

    def _arguments(self, make: Callable[..., object]) -> dict[str, Any]:
        """Return the fields that are arguments of what is made, as its signature names them."""
        arguments = signature(make).parameters
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name in arguments}

    def _check_averager(self, averager: Averager | None) -> None:
        if averager is None:
            raise ConfigError(f"a {self.kind} strategy needs an averager")
        check_averager(averager)
        self._check_config(averager.config)

    def _check_config(self, config: AveragingConfig) -> None:
        if not config.strategy:
            raise ConfigError(
                "the averager knows of no strategy: open it with strategy.config(config), so that peers with another"
                " one hear of it"
            )
        self._check_same(config)
        for name, value in self._settings().items():
            if getattr(config, name) != value:
                raise ConfigError(
                    f"{name} of the averager is {getattr(config, name)!r}, the strategy's is {value!r}:"
                    " open the averager with strategy.config(config)"
                )

    def _check_same(self, config: AveragingConfig) -> None:
        if config.strategy != self.json:
            told = "; ".join(_differences(self.table, read_table(config.strategy)))
            raise ConfigError(f"the run {config.run_id!r} has another strategy: {told}")


def plain(value: object) -> Any:
    """Return the value of a field as JSON and TOML have it."""
    match value:
        case Strategy():  # inside of another one, whose version is for both
            return {name: each for name, each in value.table.items() if name != "version"}
        case Cells():
            found = {each.name: getattr(value, each.name) for each in fields(value)}
            return {name: each for name, each in found.items() if each is not None}
        case Choice():
            return {"kind": "choice", "values": value.values}
        case Uniform() | LogUniform():
            kind = "uniform" if isinstance(value, Uniform) else "log_uniform"
            return {"kind": kind, "low": float(value.low), "high": float(value.high)}
        case Mapping():
            return {name: plain(each) for name, each in value.items()}
    return value


def _differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each field in which another strategy's table differs from this one's, three at most."""
    names = [name for name in sorted({*mine, *other}) if _text(mine.get(name)) != _text(other.get(name))]
    if mine["kind"] != other["kind"]:
        names = ["kind"]
    return [f"{name} is {other.get(name)!r}, this one's {mine.get(name)!r}" for name in names[:MAX_TOLD]]


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


# Checks of the fields of strategies. An error begins with the field's name.


def check_number(name: str, value: object) -> None:
    """Raise ConfigError unless this is a number above 0 that is not too large."""
    if not is_number(value) or not 0 < value <= MAX_NUMBER:
        raise ConfigError(f"{name} must be a number above 0 and at most {MAX_NUMBER:g}, got {value!r}")


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
