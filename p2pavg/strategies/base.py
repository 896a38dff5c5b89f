"""The base of all strategies: their texts, the averager's configuration, and the optimizer that they make."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from dataclasses import Field, fields, replace
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from p2pavg.base.errors import ConfigError
from p2pavg.blocking import Averager
from p2pavg.group.strategy import VERSION, canonical, read_table, toml_lines
from p2pavg.optim.base.arguments import check_averager
from p2pavg.runs.config import AveragingConfig

MAX_TOLD = 3  # fields in which two strategies differ


class Strategy(abc.ABC):
    """A way to train with other peers, as a value. Its subclasses are frozen dataclasses."""

    __slots__ = ()

    kind: ClassVar[str]
    """Its name in JSON and TOML."""
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def table(self) -> dict[str, Any]:
        """The strategy as plain values. Fields that are ``None`` or empty are left out."""
        found: dict[str, Any] = {"version": VERSION, "kind": self.kind}
        for each in fields(self):
            value = self._plain(each.name)
            if each.init and value is not None and value != {}:
                found[each.name] = dict(value) if isinstance(value, Mapping) else value
        return found

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
        if averager is None:
            raise ConfigError(f"a {self.kind} strategy needs an averager")
        check_averager(averager)
        self._check_config(averager.config)
        return self._build(model, averager, inner, allow=allow, **options)

    @abc.abstractmethod
    def _build(
        self,
        model: nn.Module,
        averager: Averager,
        inner: Optimizer,
        *,
        allow: Collection[str] = (),
        **options: Any,
    ) -> Any:
        """Make the optimizer. The averager's configuration is the strategy's."""

    def _plain(self, name: str) -> Any:
        """Return a field as a plain value."""
        return getattr(self, name)

    def _settings(self) -> dict[str, Any]:
        """Return the settings of an averager that follow from the strategy."""
        return {}

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
            told = "; ".join(differences(self.table, read_table(config.strategy)))
            raise ConfigError(f"the run {config.run_id!r} has another strategy: {told}")


def differences(mine: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one sentence for each field in which another strategy's table differs from this one's, three at most."""
    names = [name for name in sorted({*mine, *other}) if _listed(mine.get(name)) != _listed(other.get(name))]
    if mine.get("kind") != other.get("kind"):
        names = ["kind"]
    return tuple(f"{name} is {other.get(name)!r}, this one's {mine.get(name)!r}" for name in names[:MAX_TOLD])


def _listed(value: Any) -> Any:
    """Return a value with lists in place of tuples, as JSON has them."""
    if isinstance(value, Mapping):
        return {name: _listed(each) for name, each in value.items()}
    return list(value) if isinstance(value, tuple) else value
