"""The strategies of this version that have no file of their own, as frozen values."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, ClassVar

from torch.optim import Optimizer

from p2pavg.base.errors import ConfigError
from p2pavg.base.formats import PeerText
from p2pavg.blocking import Averager
from p2pavg.group.participation import RandomFraction
from p2pavg.group.topology import BUTTERFLY, Gossip, Topology, resolve_topology
from p2pavg.optim import AveragedOptimizer, CellOptimizer, Cells, LocalUpdates, MixedUpdates
from p2pavg.optim.local import recipes
from p2pavg.optim.local.local_options import LocalOptions, SyncEvery
from p2pavg.population.settings import check_whole, is_number
from p2pavg.strategies.base import (
    MAX_COUNT,
    MAX_NUMBER,
    MEAN,
    Given,
    Strategy,
    check_aggregation,
    check_number,
    check_one_of,
    checked_cells,
    checked_topology,
)

# The table of the recipes that a federated strategy can name. Their options are read from their signatures.


class NamedRecipe:
    """A function of :mod:`p2pavg.optim` that makes an optimizer with the rule of a paper.

    Its options in a strategy are its arguments that are annotated as ``float``, ``float | None`` or a rate.

    Args:
        make: the function. Its name is that of the rule.
        needs: what an option without a default is, for the error that it is missing.
    """

    def __init__(self, make: Callable[..., LocalUpdates], needs: str = "") -> None:
        found = signature(make, eval_str=True)
        self.make = make
        self.name = make.__name__
        self.mixes = found.return_annotation is MixedUpdates
        """True if each round has a few peers only."""
        numbers = {
            n: each
            for n, each in found.parameters.items()
            if each.annotation in (float, float | None, recipes.Rate)
        }
        self.options = (*numbers, *(("group_size",) if self.mixes else ()))
        """Names of the options, which are numbers."""
        self._required = [name for name, each in numbers.items() if each.default is Parameter.empty]
        self._needs = needs

    def check(self, given: object) -> None:
        """Raise ConfigError unless this is a table of options of the recipe, all in range."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"options must be a table of numbers, got {type(given).__name__}")
        for name, value in given.items():
            if name not in self.options:
                allowed = ", ".join(self.options) or "none"
                raise ConfigError(f"options.{name} is unknown; {self.name} has {allowed}")
            if not is_number(value) or not 0 <= value <= MAX_NUMBER:
                raise ConfigError(f"options.{name} must be a number from 0, got {value!r}")
        if missing := [name for name in self._required if name not in given]:
            raise ConfigError(f"options.{missing[0]} is missing: {self.name} needs {self._needs}")


RECIPES: Mapping[str, NamedRecipe] = MappingProxyType(
    {
        each.name: each
        for each in (
            NamedRecipe(recipes.diloco),
            NamedRecipe(recipes.sparseloco),
            NamedRecipe(recipes.fedavg),
            NamedRecipe(recipes.fedprox, needs="the strength of its pull"),
            NamedRecipe(recipes.fedadagrad),
            NamedRecipe(recipes.fedadam),
            NamedRecipe(recipes.fedyogi),
            NamedRecipe(recipes.gossip),
            NamedRecipe(recipes.noloco),
        )
    }
)
"""The recipes by name, in the order of error messages."""


_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Local(Strategy):
    """Each peer trains by itself; nothing is averaged.

    Its optimizer is ``inner``. The averager may be ``None``, and there are no options.
    """

    kind: ClassVar[str] = "local"

    def _check_averager(self, averager: Averager | None) -> None:
        if averager is not None:
            self._check_config(averager.config)

    def _make(self, given: Given) -> Optimizer:
        if given.options:
            raise ConfigError(f"{next(iter(given.options))} is no option of a local strategy, which has none")
        return given.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel(Strategy):
    """All peers together take one large batch per update, and hold the same parameters.

    Its optimizer is an :class:`~p2pavg.optim.AveragedOptimizer`; with ``cells`` a
    :class:`~p2pavg.optim.CellOptimizer`, which trains more than 64 peers.

    Args:
        target_batch_size: samples of all peers together for one update; with ``cells``, of all peers of a cell.
        aggregation: ``"mean"``, or a robust rule as text, such as ``"median"`` (:attr:`AveragingConfig.robust`).
        topology: ``"butterfly"``, in which each member averages a share, or ``"star"``, in which one averages all
            (:attr:`AveragingConfig.topology`).
        max_grad_norm: L2 norm to which the averaged gradient is clipped, if given.
        overlap: average in the background; updates come one batch late.
        cells: the cells into which the peers divide, or a table of the arguments of :class:`~p2pavg.optim.Cells`. They
            go without ``overlap``, and with the aggregation ``"mean"``. All peers share all of these values, also
            ``timeout`` and ``patience``.

    Raises:
        ConfigError: an argument is out of range; the message begins with its name.
    """

    kind: ClassVar[str] = "data_parallel"

    target_batch_size: float
    aggregation: str = MEAN
    topology: str | Topology = BUTTERFLY.text
    max_grad_norm: float | None = None
    overlap: bool = False
    cells: Cells | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_number("target_batch_size", self.target_batch_size)
        check_aggregation(self.aggregation)
        # As text, since a strategy is compared and written as text, and a caller may have given an object.
        object.__setattr__(self, "topology", checked_topology(self.topology))
        if isinstance(resolve_topology(self.topology), Gossip):
            raise ConfigError(
                f"topology cannot be {self.topology!r}: all peers hold the same parameters here; take Federated with"
                " the rule 'gossip' or 'noloco'"
            )
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm)
        if not isinstance(self.overlap, bool):
            raise ConfigError(f"overlap must be true or false, got {self.overlap!r}")
        if self.cells is not None:
            object.__setattr__(self, "cells", checked_cells(self.cells))
            for name, only in (("overlap", False), ("aggregation", MEAN)):
                if getattr(self, name) != only:
                    raise ConfigError(f"{name} must be {only!r} with cells, got {getattr(self, name)!r}")

    @property
    def robust(self) -> str | None:
        """The aggregation as :attr:`AveragingConfig.robust` has it."""
        return None if self.aggregation == MEAN else self.aggregation

    def _settings(self) -> dict[str, Any]:
        return {"robust": self.robust, "topology": self.topology}

    def _make(self, given: Given) -> AveragedOptimizer | CellOptimizer:
        inner, averager = given.inner, given.averager
        assert averager is not None  # checked before
        if isinstance(self.cells, Cells):  # its optimizer's signature does not name all: it passes options on
            return CellOptimizer(
                inner,
                averager,
                cells=self.cells,
                target_batch_size=self.target_batch_size,
                max_grad_norm=self.max_grad_norm,
                # The caller's own options come last: a `state` of it takes the place of the model.
                **{"state": given.model, **given.options},
            )
        numbers = self._arguments(AveragedOptimizer)
        return AveragedOptimizer(inner, averager, **numbers, **{"model": given.model, **given.options})


@dataclass(frozen=True, slots=True, kw_only=True)
class Federated(Strategy):
    """Each peer trains by itself, and every ``sync_every`` steps all take a common outer step.

    Its optimizer is :class:`~p2pavg.optim.LocalUpdates`.

    Args:
        rule: ``"diloco"``, ``"sparseloco"``, ``"fedavg"``, ``"fedprox"``, ``"fedadagrad"``, ``"fedadam"``,
            ``"fedyogi"``, ``"gossip"`` or ``"noloco"``: the recipe of :mod:`p2pavg.optim`.
        sync_every: inner steps between two outer steps, or a time such as ``"30s"``.
        fragments, delay, alpha, grace: the model is averaged in parts, in the background, and without the slowest:
            see :class:`~p2pavg.optim.LocalUpdates`.
        rounds: outer steps after which training is over (:meth:`is_over`); ``None`` for no end.
        selection: fraction of the peers that contribute to each outer step, above 0 and at most 1: they are drawn anew
            for each. The others hold the result.
        seed: the draws follow from it.
        options: numbers of the rule, by name, such as ``{"lr": 0.7, "momentum": 0.9}``; the others are the paper's.
        aggregation, topology: as in :class:`DataParallel`.

    Raises:
        ConfigError: an argument is out of range; the message begins with its name.
    """

    kind: ClassVar[str] = "federated"

    rule: str
    sync_every: SyncEvery
    fragments: int = 1
    delay: int = 0
    alpha: float | None = None
    grace: float | None = None
    rounds: int | None = None
    selection: float = 1.0
    seed: int = 0
    options: Mapping[str, float] = field(default_factory=dict, hash=False)
    aggregation: str = MEAN
    topology: str | Topology = BUTTERFLY.text

    def __post_init__(self) -> None:
        check_one_of("rule", self.rule, RECIPES)
        self._check_steps()
        if self.rounds is not None:
            check_whole("rounds", self.rounds, 1, MAX_COUNT)
        try:
            # Made for its checks only. The one that is used is made with the averager's configuration.
            RandomFraction(self.selection, self.seed)
        except ConfigError as error:
            name = "seed" if "seed" in str(error) else "selection"
            raise ConfigError(f"{name}: {error}") from None
        recipe = RECIPES[self.rule]
        recipe.check(self.options)
        for name, only in (("selection", 1.0), ("fragments", 1), ("grace", None)):
            # Such a rule averages in small groups, where a draw, a fragment or a grace period would leave few
            # peers or none.
            if recipe.mixes and getattr(self, name) != only:
                raise ConfigError(f"{name} must be {only} with {self.rule}, whose rounds have a few peers")
        # A copy that the caller cannot change afterwards: a strategy is a value.
        object.__setattr__(self, "options", MappingProxyType(dict(sorted(self.options.items()))))
        check_aggregation(self.aggregation)
        object.__setattr__(self, "topology", checked_topology(self.topology))
        self._check_gossip()

    def _check_gossip(self) -> None:
        topology = resolve_topology(self.topology)
        if not isinstance(topology, Gossip):
            return
        if not RECIPES[self.rule].mixes:
            raise ConfigError(
                f"topology cannot be {topology.text!r} with {self.rule}, whose outer step all peers take: the rules"
                " 'gossip' and 'noloco' can have it"
            )
        # The size of groups follows from the topology's degree, so the options may only repeat it.
        size = self.options.get("group_size", topology.group_size)
        if size != topology.group_size:
            raise ConfigError(
                f"options.group_size is {size}, and groups of the topology {topology.text!r} have"
                f" {topology.group_size}: leave it out"
            )

    def _check_steps(self) -> None:
        for name in ("fragments", "delay") + (() if isinstance(self.sync_every, str) else ("sync_every",)):
            check_whole(name, getattr(self, name), 0 if name == "delay" else 1, MAX_COUNT)
        try:
            # The optimizer's own checks, now instead of when it is made: a run file with a mistake is refused
            # by its first reader.
            LocalOptions(**self._arguments(LocalOptions), proximal=0.0)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self.grace is not None:
            check_number("grace", self.grace)

    def is_over(self, optimizer: LocalUpdates) -> bool:
        """Return whether an optimizer has taken all ``rounds``: the condition of a training loop."""
        return self.rounds is not None and optimizer.epoch >= self.rounds

    @property
    def robust(self) -> str | None:
        """The aggregation as :attr:`AveragingConfig.robust` has it."""
        return None if self.aggregation == MEAN else self.aggregation

    def _settings(self) -> dict[str, Any]:
        drawn = RandomFraction(self.selection, self.seed) if self.selection < 1 else None
        return {"robust": self.robust, "participation": drawn, "topology": self.topology}

    def _make(self, given: Given) -> LocalUpdates:
        numbers = {**self._arguments(LocalUpdates), **self.options}
        # The strategy's numbers come last, since all peers of the run have to train with the same ones.
        options = {"model": given.model, **given.options, **numbers}
        return RECIPES[self.rule].make(given.inner, given.averager, **options)


@dataclass(frozen=True, slots=True)
class Custom(Strategy):
    """A strategy of the caller's own: a function that makes the optimizer.

    The function is imported only if the caller has made this value in its own program, or has allowed the function by
    its name: a run file, or any other text, may name a function, and never runs it. Copies of a strategy that was read
    are not trusted either, whichever of their other fields were changed.

    Args:
        function: ``"module:function"``. It is called as ``function(model, averager, inner, **options)``, and returns
            the optimizer.
        options: numbers, texts and truth values for it, by name.

    Raises:
        ConfigError: an argument is out of range; the message begins with its name.
    """

    kind: ClassVar[str] = "custom"

    function: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.function, str) or not _FUNCTION.fullmatch(self.function):
            raise ConfigError(f"function must be like 'module:function', got {self.function!r}")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"options must be a table, got {type(self.options).__name__}")
        for name, value in self.options.items():
            # Options become keyword arguments of the function, beside these three.
            if not isinstance(name, str) or not name.isidentifier() or name in ("model", "averager", "inner"):
                raise ConfigError(f"options has the name {name!r}, which is none of an option")
            if not isinstance(value, str | int | float | bool):
                raise ConfigError(f"options.{name} must be a number, text, true or false, got {value!r}")
        object.__setattr__(self, "options", MappingProxyType(dict(sorted(self.options.items()))))

    def _make(self, given: Given) -> Any:
        function = self._load(given.allow)
        return function(given.model, given.averager, given.inner, **{**given.options, **self.options})

    def _load(self, allow: Collection[str]) -> Callable[..., Any]:
        """Import the function, if the caller wants it."""
        # The distrust is in the name itself, so that it goes along into every copy: a flag of this class would be set
        # anew by dataclasses.replace.
        if isinstance(self.function, PeerText) and self.function not in allow:
            raise ConfigError(
                f"function: {self.function} stands in a text that this program has read, and is not run for that"
                f" reason alone. To run it, give allow=({self.function!r},)"
            )
        module, _, name = self.function.partition(":")
        try:
            # An import runs the module's code, so the distrust above comes first.
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"function: {self.function} cannot be imported: {error}") from None
        if not callable(function):
            raise ConfigError(f"function: {self.function} is no function")
        found: Callable[..., Any] = function
        return found
