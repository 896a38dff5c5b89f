"""Each strategy makes the optimizer that it says, for an averager of its configuration only."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest
import torch

from p2pavg import AveragingConfig, RandomFraction
from p2pavg.base.errors import ConfigError
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, CellOptimizer, Cells, LocalUpdates, RunState
from p2pavg.strategies import Custom, DataParallel, Federated, Local, Strategy, read_json
from tests.unit.optim.fakes import Alone
from tests.unit.strategies.samples import FUNCTION, STRATEGIES

AVERAGING = [
    each
    for each in STRATEGIES
    if each.kind in ("data_parallel", "federated", "custom") and getattr(each, "cells", None) is None
]


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


@pytest.mark.parametrize("strategy", AVERAGING, ids=lambda strategy: strategy.kind)
def test_the_optimizer_is_of_the_class_and_takes_a_step(strategy: Strategy) -> None:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = strategy.optimizer(model, averager_of(config_of(strategy)), inner, peers_to_start=2)
    assert isinstance(optimizer, AveragedOptimizer if strategy.kind == "data_parallel" else LocalUpdates)
    assert optimizer.inner is inner


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


def test_a_local_strategy_is_the_inner_optimizer_and_needs_no_averager() -> None:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Local().optimizer(model, None, inner) is inner
    with pytest.raises(ConfigError, match="wait is no option of a local strategy"):
        Local().optimizer(model, None, inner, wait=1)
    with pytest.raises(ConfigError, match="a data_parallel strategy needs an averager"):
        STRATEGIES[1].optimizer(model, None, inner)


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


def test_an_averager_of_another_strategy_is_refused_by_the_field() -> None:
    mine, other = Federated(rule="fedavg", sync_every=4), Federated(rule="fedavg", sync_every=8)
    with pytest.raises(
        ConfigError, match=r"the run 'lab' has another strategy: sync_every is 8, this one's 4"
    ):
        made_by(mine, config_of(other))
    with pytest.raises(ConfigError, match=r"kind is 'data_parallel', this one's 'federated'"):
        made_by(mine, config_of(STRATEGIES[1]))
    with pytest.raises(ConfigError, match="sync_every is 8"):
        mine.config(config_of(other))


def test_an_averager_without_a_strategy_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"open it with strategy\.config\(config\)"):
        made_by(STRATEGIES[1], AveragingConfig(run_id="lab"))


def test_an_averager_with_the_text_and_other_rules_is_refused() -> None:
    strategy = DataParallel(target_batch_size=8, aggregation="median")
    with pytest.raises(ConfigError, match="robust of the averager is None, the strategy's is 'median'"):
        made_by(strategy, AveragingConfig(run_id="lab", strategy=strategy.json))


class TestCustom:
    """A text may name a function, and never runs it."""

    def test_a_function_that_a_text_names_is_neither_run_nor_imported(self) -> None:
        text = Custom("antigravity_of_strangers.module:run").json
        strategy = read_json(text)
        with pytest.raises(ConfigError, match="is not run for that reason alone"):
            made_by(strategy, config_of(strategy))
        assert "antigravity_of_strangers" not in sys.modules

    def test_it_runs_if_the_caller_allows_it_by_name(self) -> None:
        strategy = read_json(Custom(FUNCTION, {"sync_every": 2}).json)
        with pytest.raises(ConfigError, match="is not run for that reason alone"):
            made_by(strategy, config_of(strategy), allow=("tests.unit.strategies.samples:other",))
        assert isinstance(made_by(strategy, config_of(strategy), allow=(FUNCTION,)), LocalUpdates)

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            ("tests.unit.strategies.samples:nothing", "cannot be imported"),
            ("tests.no_module:run", "cannot be imported"),
            ("tests.unit.strategies.samples:STRATEGIES", "is no function"),
        ],
    )
    def test_a_function_that_is_not_there_is_named(self, function: str, message: str) -> None:
        strategy = Custom(function)
        with pytest.raises(ConfigError, match=message):
            made_by(strategy, config_of(strategy))
