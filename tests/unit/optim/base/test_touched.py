"""Parameters that something else than an update has changed: the next step says so."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch.optim import SGD

from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, LocalUpdates
from tests.unit.optim.fakes import Alone, large_batch
from tests.unit.optim.loops import batch, plain


class Interrupted(SGD):
    """Is interrupted in its step, after the change of the parameters, when the test says so."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_due = False

    def step(self, closure: Any = None) -> Any:
        super().step()
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt


@torch.no_grad()
def clip(model: torch.nn.Module) -> None:
    for weights in model.parameters():
        weights.clamp_(-0.3, 0.3)


def test_a_change_after_step_is_told_at_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    model = plain()
    optimizer = large_batch(Alone(), SGD(model.parameters(), lr=0.1), model=model)
    assert batch(model, optimizer).changed is None
    clip(model)
    report = batch(model, optimizer)
    assert report.changed is not None
    assert report.changed.startswith("0.weight was changed since the last step")
    assert "do it in on_update" in caplog.text
    assert batch(model, optimizer).changed is None


def test_weights_that_are_swapped_in_are_told() -> None:
    model = plain()
    optimizer = large_batch(Alone(), SGD(model.parameters(), lr=0.1), model=model)
    batch(model, optimizer)
    weights = next(model.parameters())
    weights.data = weights.data.clone()
    assert batch(model, optimizer).changed is not None


def test_a_change_in_on_update_is_right() -> None:
    model = plain()
    inner = SGD(model.parameters(), lr=0.1)
    optimizer = large_batch(Alone(), inner, model=model, on_update=lambda _: clip(model))
    for _ in range(3):
        assert batch(model, optimizer).changed is None


def test_a_loaded_state_is_no_change() -> None:
    model = plain()
    optimizer = large_batch(Alone(), SGD(model.parameters(), lr=0.1), model=model)
    batch(model, optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    batch(model, optimizer)
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)
    assert batch(model, optimizer).changed is None


def interrupted(**options: Any) -> tuple[torch.nn.Module, AveragedOptimizer]:
    """Return an optimizer, and its model, whose last update was interrupted."""
    model = plain()
    inner = Interrupted(model.parameters(), lr=0.1)
    optimizer = large_batch(Alone(), inner, model=model, **options)
    batch(model, optimizer)
    inner.is_due = True
    with pytest.raises(KeyboardInterrupt):
        batch(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("loss", [0.5, math.nan], ids=["a good batch", "a batch that is left out"])
def test_an_update_that_was_interrupted_is_told_at_the_next_step(loss: float) -> None:
    """A peer that replays the log would clear the mark with its next average, and take the same one twice."""
    _, optimizer = interrupted()
    report = optimizer.step(samples=4, metrics={"loss": loss})
    assert bool(report.skipped) == math.isnan(loss)
    assert report.changed == "the last update was interrupted, and may be in some of the parameters only"


def test_an_interruption_of_the_schedule_is_one_of_the_update() -> None:
    model = plain()
    inner = SGD(model.parameters(), lr=0.1)

    def factor(update: int) -> float:
        if update == 2:
            raise KeyboardInterrupt
        return 1.0

    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, factor)
    optimizer = large_batch(Alone(), inner, model=model, scheduler=scheduler)
    batch(model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        batch(model, optimizer)
    assert optimizer.step(samples=1.0, metrics={"loss": math.nan}).changed is not None


def test_a_peer_whose_update_was_interrupted_fetches_the_state_of_the_run() -> None:
    model, optimizer = interrupted(state=None, sync_timeout=1e-9)
    report = batch(model, optimizer)
    assert report.changed is not None
    assert report.changed.endswith("this peer fetches the run's state")
    assert report.catching_up is not None
    assert optimizer._states is not None
    assert optimizer._states.follower.is_active
    assert not optimizer._states.follower.is_on_the_log


@pytest.mark.parametrize("shares", [False, True])
def test_an_outer_step_that_was_interrupted_is_not_taken_again_from_the_log(shares: bool) -> None:
    """The anchor has the step, and the lineage does not name it."""
    model = plain()
    made: list[Interrupted] = []

    def outer(anchor: list[torch.Tensor]) -> Interrupted:
        made.append(Interrupted(anchor, lr=1.0))
        return made[-1]

    optimizer = LocalUpdates(
        SGD(model.parameters(), lr=0.1),
        outer,
        cast(Averager, Alone()),
        sync_every=1,
        peers_to_start=2,
        sync_timeout=1e-9,
        model=model,
        state=None if shares else False,
    )
    assert batch(model, optimizer).changed is None
    made[0].is_due = True
    with pytest.raises(KeyboardInterrupt):
        batch(model, optimizer)
    report = batch(model, optimizer)
    assert report.changed is not None
    assert report.changed.startswith("the last update was interrupted")
    if shares:
        assert optimizer._states is not None
        assert optimizer._states.follower.is_active
        assert not optimizer._states.follower.is_on_the_log
    else:
        assert batch(model, optimizer).changed is None
