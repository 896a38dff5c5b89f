"""Each strategy makes the optimizer that it says, for an averager of its configuration only."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from inspect import signature
from typing import Any, cast

import pytest
import torch

from p2pavg import AveragingConfig, RandomFraction
from p2pavg.base.errors import ConfigError
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, CellOptimizer, Cells, LocalUpdates, RunState
from p2pavg.population import PopulationSettings
from p2pavg.strategies import Custom, DataParallel, Federated, PopulationBased, Strategy, read_json
from tests.unit.optim.fakes import Alone
from tests.unit.strategies.samples import FUNCTION


def averager_of(config: AveragingConfig) -> Averager:
    averager = Alone()
    averager.config = config
    return cast(Averager, averager)


def config_of(strategy: Strategy, **changes: Any) -> AveragingConfig:
    return strategy.config(AveragingConfig(run_id="lab", **changes))


def made_by(strategy: Strategy, config: AveragingConfig, **options: Any) -> Any:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return strategy.optimizer(model, averager_of(config), inner, **options)


def test_a_strategy_with_cells_makes_their_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is its state, unless the caller gives a :class:`RunState`."""
    given: list[dict[str, Any]] = []

    def note(self: CellOptimizer, inner: Any, averager: Averager, **options: Any) -> None:
        given.append({"inner": inner, "averager": averager, **options})

    monkeypatch.setattr(CellOptimizer, "__init__", note)
    strategy = DataParallel(target_batch_size=64, max_grad_norm=2.0, cells={"count": 3, "every": 5})
    averager, model = averager_of(config_of(strategy)), torch.nn.Linear(2, 1)
    inner, state = torch.optim.SGD(model.parameters(), lr=0.1), RunState(model)
    choices: tuple[dict[str, Any], ...] = ({}, {"state": state, "peers_to_start": 6})
    for options in choices:
        assert isinstance(strategy.optimizer(model, averager, inner, **options), CellOptimizer)
    numbers = {"target_batch_size": 64, "max_grad_norm": 2.0, "cells": Cells(count=3, every=5)}
    common = {"inner": inner, "averager": averager, **numbers}
    assert given == [{**common, "state": model}, {**common, "state": state, "peers_to_start": 6}]


def test_the_configuration_has_the_rules_of_the_strategy() -> None:
    config = config_of(DataParallel(target_batch_size=8, aggregation="median"), group_size=8)
    assert (config.robust, config.group_size, config.participation) == ("median", 8, None)
    config = config_of(Federated(rule="fedavg", sync_every=4, selection=0.5, seed=3))
    assert config.participation == RandomFraction(0.5, 3)
    assert config.robust is None


def test_a_strategy_in_the_background_reaches_the_optimizer() -> None:
    strategy = Federated(rule="diloco", sync_every=8, fragments=2, delay=2, alpha=0.5)
    made = made_by(strategy, config_of(strategy))
    assert isinstance(made, LocalUpdates)
    options = made._options
    assert (options.interval.steps, options.fragments, options.delay, options.alpha) == (4, 2, 2, 0.5)


def test_numbers_of_the_strategy_reach_the_optimizer() -> None:
    strategy = Federated(rule="diloco", sync_every=4, rounds=3, options={"momentum": 0.5, "lr": 0.25})
    made = made_by(strategy, config_of(strategy))
    group = made.outer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.25, 0.5)
    assert not strategy.is_over(made)


@pytest.mark.parametrize(
    ("kind", "make"),
    [(DataParallel, AveragedOptimizer), (Federated, LocalUpdates), (PopulationBased, PopulationSettings)],
)
def test_a_field_has_the_default_of_the_argument(kind: type[Strategy], make: Callable[..., object]) -> None:
    arguments = signature(make).parameters
    shared = [each for each in fields(kind) if each.name in arguments and each.default is not MISSING]
    assert shared
    for each in shared:
        assert each.default == arguments[each.name].default, each.name


class TestCustom:
    """A text may name a function, and never runs it."""

    def test_a_function_that_a_text_names_is_neither_run_nor_imported(self) -> None:
        text = Custom("antigravity_of_strangers.module:run").json
        strategy = read_json(text)
        with pytest.raises(ConfigError, match="is not run for that reason alone"):
            made_by(strategy, config_of(strategy))
        assert "antigravity_of_strangers" not in sys.modules

    @pytest.mark.parametrize(
        "copied",
        [
            lambda read: replace(read, options={"sync_every": 2}),
            copy.copy,
            lambda read: Custom(read.function, read.options),
            lambda read: Custom(**{each.name: getattr(read, each.name) for each in fields(read)}),
        ],
    )
    def test_no_copy_of_it_is_trusted(self, copied: Callable[[Custom], Custom]) -> None:
        """A program changes an option of the strategy in a run file: it has not looked at the function's name."""
        read = read_json(Custom(FUNCTION).json)
        assert isinstance(read, Custom)
        strategy = copied(read)
        with pytest.raises(ConfigError, match="is not run for that reason alone"):
            made_by(strategy, config_of(strategy))

    def test_it_runs_if_the_caller_allows_it_by_name(self) -> None:
        strategy = read_json(Custom(FUNCTION, {"sync_every": 2}).json)
        with pytest.raises(ConfigError, match="is not run for that reason alone"):
            made_by(strategy, config_of(strategy), allow=("tests.unit.strategies.samples:other",))
        assert isinstance(made_by(strategy, config_of(strategy), allow=(FUNCTION,)), LocalUpdates)
