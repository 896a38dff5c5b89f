"""Batches that are left out because a metric is NaN or infinite: reported, and the loop goes on."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import SGD

import p2pavg
from p2pavg.optim import LocalUpdates
from tests.unit.optim.fakes import Alone, Make, both, parameter


@both
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_batch_whose_loss_is_not_finite_is_left_out(
    make: Make, loss: float, caplog: pytest.LogCaptureFixture
) -> None:
    weights = parameter(1.0, 2.0)
    averager = Alone()
    optimizer = make(averager, SGD([weights], lr=0.1), batch_size=4)
    for bad in (True, True, False):
        weights.grad = torch.full((2,), math.nan if bad else 1.0)
        report = optimizer.step(metrics={"loss": loss if bad else 0.5})
        assert (report.skipped is not None) == bad
        assert report.updated == (not bad)
        if bad:
            assert report.skipped == f"the metric 'loss' of this batch is {loss}: the batch is left out"
            assert weights.tolist() == [1.0, 2.0]
    assert averager._taken.metrics.means["loss"] == 0.5
    assert caplog.text.count("the batch is left out") == 1, "further warnings come after pauses"
    assert bool(weights.isfinite().all())


@both
def test_one_bad_pass_leaves_out_all_that_autograd_has_added_up(make: Make) -> None:
    weights = parameter(1.0)
    optimizer = make(Alone(), SGD([weights], lr=0.1), batch_size=4, accumulate=2)
    for losses, updated in (((1.0, math.nan), False), ((math.nan, 1.0), False), ((1.0, 1.0), True)):
        for index, loss in enumerate(losses):
            weights.grad = torch.ones(1)
            report = optimizer.step(metrics={"loss": loss})
            assert optimizer.is_pending == (index == 0)
        assert report.updated == updated
        assert (report.skipped is None) == updated


@both
@pytest.mark.parametrize("value", ["1.0", None, 1e200])
def test_other_mistakes_are_errors_as_before(make: Make, value: object) -> None:
    optimizer = make(Alone(), SGD([weights := parameter(1.0)], lr=0.1), batch_size=4)
    weights.grad = torch.ones(1)
    with pytest.raises(p2pavg.AccumulateError, match="loss"):
        optimizer.step(metrics={"loss": value})  # type: ignore[dict-item]


@both
def test_a_run_that_begins_with_a_batch_that_is_left_out_begins_with_the_present_parameters(
    make: Make,
) -> None:
    """The anchor of local updates, too: the parameters were loaded after the optimizer was made."""
    weights = parameter(1.0)
    optimizer = make(Alone(), SGD([weights], lr=0.0), batch_size=4)
    with torch.no_grad():
        weights.fill_(5.0)
    weights.grad = torch.ones(1)
    assert optimizer.step(metrics={"loss": math.nan}).skipped is not None
    if isinstance(optimizer, LocalUpdates):
        assert optimizer.anchor[0].tolist() == [5.0]
    weights.grad = torch.ones(1)
    assert optimizer.step().updated
    assert weights.tolist() == [5.0]
