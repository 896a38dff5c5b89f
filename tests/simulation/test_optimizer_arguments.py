"""An optimizer refuses a program's mistakes in words, before anything has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import p2pavg
from p2pavg.base.errors import AccumulateError
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, LocalUpdates, RunState, diloco
from p2pavg.testing import MemoryNetwork, run_loops, simulate
from tests.unit.optim.fakes import Alone

SAMPLES = 8


def alone(train: Callable[[Any], Any], **settings: Any) -> Any:
    """Return what the loop of one peer returns."""
    config = p2pavg.AveragingConfig(run_id="arguments", match_timeout=2.0, **settings)

    async def main() -> Any:
        return await run_loops(MemoryNetwork(), 1, train, config=config)

    (found,) = simulate(main)
    return found


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 1, dtype=dtype)


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def averaged(model: torch.nn.Module, averager: Any, inner: Any = None, **given: Any) -> AveragedOptimizer:
    inner = sgd(model) if inner is None else inner
    return AveragedOptimizer(inner, averager, target_batch_size=SAMPLES, min_peers=1, **given)


def step(optimizer: Any, model: torch.nn.Module, samples: Any = SAMPLES) -> Any:
    optimizer.zero_grad()
    model(torch.ones(SAMPLES, 8)).square().mean().backward()
    return optimizer.step(samples=samples)


def local(model: torch.nn.Module, averager: Any, inner: Any = None, **given: Any) -> LocalUpdates:
    return diloco(sgd(model) if inner is None else inner, averager, sync_every=5, min_peers=1, **given)


@pytest.mark.parametrize("make", [averaged, local])
@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"inner": "x"}, TypeError, "inner must be a torch.optim.Optimizer, or a list of some, got str"),
        ({"inner": torch.optim.SGD([torch.zeros(1)])}, ValueError, "inner has no parameters"),
        ({"inner": torch.optim.LBFGS(model_of().parameters())}, TypeError, "LBFGS"),
        ({"scheduler": ReduceLROnPlateau(sgd(model_of()))}, TypeError, "needs a metric .* ReduceLROnPlateau"),
        ({"scheduler": "x"}, TypeError, "scheduler must be one of torch.optim.lr_scheduler, got str"),
        ({"scheduler": StepLR(sgd(model_of()), 1)}, ValueError, "scheduler sets the rates of another SGD"),
        ({"on_update": 5}, TypeError, "on_update must be a function of one report, got int"),
        ({"state": model_of()}, ValueError, "model is a Linear of which `inner` trains no parameter"),
        ({"process_group": "x"}, TypeError, "process_group must be a group of torch.distributed"),
        ({"sync_timeout": 0}, ValueError, "sync_timeout"),
        ({"peers_to_start": 1.5}, ValueError, "peers_to_start"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_argument_is_named(
    make: Callable[..., Any], given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        make(model_of(), Alone(), **given)


@pytest.mark.parametrize(
    "given",
    [
        {"target_batch_size": 0},
        {"target_batch_size": float("inf")},
        {"max_samples_per_peer": -1},
        {"max_grad_norm": "1"},
    ],
)
def test_an_amount_that_is_out_of_range_is_named(given: dict[str, Any]) -> None:
    options: dict[str, Any] = {"target_batch_size": SAMPLES} | given
    with pytest.raises(ValueError, match=next(iter(given))):
        AveragedOptimizer(sgd(model_of()), cast(Averager, Alone()), **options)


@pytest.mark.parametrize(
    ("outer", "words"),
    [
        (sgd(model_of()), "outer must be a function"),
        (torch.optim.LBFGS, "outer must make a torch.optim.Optimizer that needs no closure"),
        (lambda _tensors: None, "got NoneType"),
    ],
    ids=["an optimizer", "LBFGS", "nothing"],
)
def test_a_wrong_outer_optimizer_is_named(outer: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        LocalUpdates(sgd(model_of()), outer, cast(Averager, Alone()), sync_every=5)


@pytest.mark.parametrize(
    ("dtype", "make"),
    [(torch.float64, averaged), (torch.complex64, averaged), (torch.complex64, local)],
    ids=["float64", "complex", "complex, local"],
)
def test_a_parameter_that_cannot_be_averaged_is_named(dtype: torch.dtype, make: Callable[..., Any]) -> None:
    model = model_of(dtype)
    with pytest.raises(AccumulateError, match=rf"weight is {dtype}, and .* convert the model"):
        make(model, Alone(), state=model)


@pytest.mark.parametrize("samples", [np.int64(8), np.float32(8.0), np.ones(8, bool).sum()], ids=repr)
def test_a_number_of_numpy_is_a_number(samples: Any) -> None:
    def train(loop: Any) -> None:
        model = model_of()
        optimizer = averaged(model, loop.averager, max_samples_per_peer=np.int64(8))
        assert step(optimizer, model, samples).updated
        local = diloco(sgd(model), loop.averager, sync_every=cast(int, np.int64(1)), min_peers=1)
        assert step(local, model, samples) is not None

    alone(train)


@pytest.mark.parametrize("samples", [torch.tensor(8), "8", True], ids=repr)
def test_samples_that_are_no_number_are_refused_before_they_count(samples: Any) -> None:
    def train(loop: Any) -> None:
        model = model_of()
        optimizer = averaged(model, loop.averager)
        with pytest.raises(TypeError, match="samples must be a number, got"):
            step(optimizer, model, samples)
        assert loop.averager.weight == 0.0

    alone(train)


def test_an_averager_whose_tensors_change_says_what_to_do() -> None:
    def train(loop: Any) -> None:
        model = model_of()
        model.bias.requires_grad_(False)
        averaged(model, loop.averager)
        model.bias.requires_grad_(True)
        with pytest.raises(
            AccumulateError, match=r"2 tensors were given, 1 before.*close it and open another one"
        ):
            averaged(model, loop.averager)

    alone(train)


def test_a_step_within_on_update_is_an_error_and_not_a_hang() -> None:
    def train(loop: Any) -> None:
        model = model_of()
        optimizer: AveragedOptimizer = averaged(
            model, loop.averager, on_update=lambda _report: step(optimizer, model)
        )
        with pytest.raises(RuntimeError, match="step was called within a step"):
            step(optimizer, model)
        assert optimizer.epoch == 1

    alone(train)


def test_an_option_that_a_joiner_would_lack_is_told_of_where_it_appears(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """This peer's own next start could not read its checkpoint."""

    def train(loop: Any) -> None:
        model = model_of()
        inner = sgd(model)
        scale = inner.param_groups[0].update
        optimizer = averaged(
            model, loop.averager, inner, state=model, on_update=lambda _report: scale(lr_scale=0.5)
        )
        for _ in range(3):
            assert step(optimizer, model).updated

    alone(train)
    told = [record.getMessage() for record in caplog.records if "came after" in record.getMessage()]
    (sentence,) = told
    assert sentence.startswith("the optimizer's option 'lr_scale' of group 0 came after")


def test_a_schedule_of_the_wrapper_and_a_frozen_group_are_no_options_of_the_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """transformers' Trainer makes its schedule of the optimizer that it is given."""

    def train(loop: Any) -> None:
        model = model_of()
        inner = sgd(model)
        optimizer = averaged(model, loop.averager, inner, state=model)
        inner.add_param_group({"params": [torch.zeros(1)]})
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
        for _ in range(3):
            assert step(optimizer, model).updated
            schedule.step()

    alone(train)
    assert "came after" not in caplog.text


def test_local_updates_with_the_parameters_of_another_time_are_refused() -> None:
    """The anchor is the run's; other parameters would count as this peer's progress, back to the first weights."""

    def train(loop: Any) -> None:
        model = model_of()
        first = copy.deepcopy(model.state_dict())
        optimizer = diloco(sgd(model), loop.averager, sync_every=2, min_peers=1)
        while optimizer.epoch < 2:
            step(optimizer, model)
        saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
        model.load_state_dict(first)
        again = diloco(sgd(model), loop.averager, sync_every=2, min_peers=1)
        again.load_state_dict(saved)
        with pytest.raises(ValueError, match="load the model's state that was saved beside"):
            step(again, model)
        model.load_state_dict(weights)
        again = diloco(sgd(model), loop.averager, sync_every=2, min_peers=1)
        again.load_state_dict(saved)
        step(again, model)

    alone(train)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"scaler": 5}, "scaler must be a torch.amp.GradScaler, got int"),
        ({"on_progress": 5}, "on_progress must be a function of one progress, got int"),
        ({"directory": 5}, "directory must be a path, got int"),
    ],
)
def test_a_wrong_argument_of_a_run_state_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        RunState(model_of(), **given)


def test_a_config_of_another_kind_is_named() -> None:
    with pytest.raises(TypeError, match="config must be an AveragingConfig or a run's name, got int"):
        p2pavg.blocking.start_averager(5)  # type: ignore[arg-type]
    with (
        pytest.raises(TypeError, match="config must be an AveragingConfig, got str"),
        p2pavg.blocking.open_averager("run"),  # type: ignore[arg-type]
    ):
        pass
