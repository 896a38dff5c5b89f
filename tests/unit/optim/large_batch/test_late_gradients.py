"""Gradients at parameters that an update has replaced count for no later one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from p2pavg.base.result import RoundResult, Success
from p2pavg.optim import AveragedOptimizer
from tests.unit.optim.fakes import Alone, large_batch


class GoesOnWithout(Alone):
    """An averager whose rounds end without this peer: what it contributed comes back."""

    observers: tuple[str, ...] = ()

    def step(self, *, state: bytes, **others: Any) -> RoundResult:
        result = super().step(state=state, **others)
        assert isinstance(result, Success)
        self.accumulate(result.averaged, weight=4.0)
        return replace(result, peers=("a", "b"), observers=self.observers)


def optimizer_on(averager: Alone) -> AveragedOptimizer:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    return large_batch(averager, SGD([parameter], lr=1.0))


def test_a_replayed_update_drops_what_was_accumulated_before_it() -> None:
    averager, other = Alone(), Alone()
    optimizer = optimizer_on(averager)
    optimizer.step(samples=1)
    assert averager.weight == 1.0
    report = optimizer_on(other).step(samples=4)
    assert isinstance(report.result, Success)
    optimizer.replay([torch.ones(2)], report.result)
    assert (optimizer.epoch, averager.weight) == (1, 0.0)


def test_a_replayed_update_moves_the_schedule_on() -> None:
    report = optimizer_on(Alone()).step(samples=4)
    assert isinstance(report.result, Success)
    inner = SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    optimizer = large_batch(Alone(), inner, scheduler=StepLR(inner, step_size=1, gamma=0.5))
    optimizer.replay([torch.ones(2)], report.result)
    assert optimizer.learning_rates == (0.5,)


@pytest.mark.parametrize(
    ("observers", "kept"),
    [
        pytest.param((), 0.0, id="the others went on without it"),
        pytest.param(("me",), 4.0, id="it observed, by the rule of the run"),
    ],
)
def test_an_update_without_this_peer_drops_what_it_had_contributed(
    observers: tuple[str, ...], kept: float
) -> None:
    averager = GoesOnWithout()
    averager.observers = observers
    optimizer = optimizer_on(averager)
    optimizer.step(samples=4)
    assert (optimizer.epoch, averager.weight) == (1, kept)
