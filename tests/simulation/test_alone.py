"""Peers that train alone, with ``min_peers=1``, and lone peers that wait for others; on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from p2pavg.base.result import Success
from p2pavg.optim import AveragedOptimizer, LocalUpdates, RunState, StepReport, diloco
from p2pavg.testing import SimulatedLoop
from tests.integration.optim.company import Batches, loss_of
from tests.integration.optim.joiners import (
    BATCH,
    Maker,
    adamw,
    by_diloco,
    common_tensors,
    common_values,
    normalised_model,
)
from tests.simulation.stage import Player, Stage
from tests.simulation.training import train_together

BATCH_SECONDS = 2.0


def local(player: Player, weights: torch.nn.Parameter, **options: Any) -> LocalUpdates:
    return diloco(torch.optim.SGD([weights], lr=0.1), player.averager, sync_every=5, state=False, **options)


def large_batch(player: Player, weights: torch.nn.Parameter, **options: Any) -> AveragedOptimizer:
    inner = torch.optim.SGD([weights], lr=0.1)
    return AveragedOptimizer(inner, player.averager, target_batch_size=40, state=False, **options)


Make = Callable[..., LocalUpdates | AveragedOptimizer]
both = pytest.mark.parametrize("make", [local, large_batch])


def trains(
    make: Make, *, batches: int, seconds: float = BATCH_SECONDS, **options: Any
) -> Callable[[Player], tuple[int, float, float, torch.Tensor]]:
    """Compute some batches; return the updates, the longest step, the time at the end, and the parameters."""

    def work(player: Player) -> tuple[int, float, float, torch.Tensor]:
        weights = torch.nn.Parameter(torch.ones(2))
        optimizer = make(player, weights, **options)
        longest = 0.0
        for _ in range(batches):
            player.sleep(seconds)
            weights.grad = torch.ones(2)
            began = player.stage.now
            optimizer.step(samples=8)
            longest = max(longest, player.stage.now - began)
        optimizer.leave()
        return optimizer.epoch, longest, player.stage.now, weights.detach()

    return work


@both
def test_a_peer_alone_takes_updates_from_the_first_batches_on(
    stages: Callable[..., Stage], make: Make
) -> None:
    stage = stages()
    stage.enter("a", 0.0, trains(make, batches=20, min_peers=1))
    ((epoch, longest, _, weights),) = stage.play()
    assert epoch == 4, "40 samples are 5 batches of 8"
    assert longest == 0.0, "no step waits for other peers"
    assert torch.all(weights < 1.0)
    assert stage.groups == [("a",)] * 4


@both
def test_two_peers_that_start_together_take_no_update_alone(stages: Callable[..., Stage], make: Make) -> None:
    """Otherwise each would go on from parameters of its own."""
    stage = stages()
    for name, at in (("a", 0.0), ("b", 1.5)):
        stage.enter(name, at, trains(make, batches=20, min_peers=1))
    stage.play()
    assert stage.groups
    assert tuple(sorted(stage.groups[0])) == ("a", "b")


@both
def test_a_peer_waits_once_for_the_others_to_start(stages: Callable[..., Stage], make: Make) -> None:
    """Then it computes on, instead of waiting for as long at each later step."""
    stage = stages()
    stage.enter("a", 0.0, trains(make, batches=40, sync_timeout=50.0))
    ((epoch, longest, end, _),) = stage.play()
    assert epoch == 0
    assert longest == pytest.approx(50.0)
    assert end == pytest.approx(40 * BATCH_SECONDS + 50.0)


@both
def test_a_peer_that_comes_after_this_wait_is_met(stages: Callable[..., Stage], make: Make) -> None:
    stage = stages()
    for name, at in (("a", 0.0), ("b", 100.0)):
        stage.enter(name, at, trains(make, batches=60, sync_timeout=50.0))
    (first, _, _, _), (second, _, _, _) = stage.play()
    assert first == second > 0


def test_a_peer_whose_others_have_left_goes_on_alone_within_seconds() -> None:
    """They leave while it looks for a group with them."""
    others, waited = 1, list[float]()

    def train(loop: SimulatedLoop) -> None:
        weights = torch.nn.Parameter(torch.zeros(50))
        inner = torch.optim.SGD([weights], lr=0.1)
        count = 1 + others
        optimizer = AveragedOptimizer(
            inner, loop.averager, target_batch_size=2, min_peers=1, peers_to_start=count
        )
        for step in range(6 if loop.index == 0 else 3):
            loop.sleep(1.0 if loop.index == 0 else 8.0)
            weights.grad = torch.ones(50)
            report = optimizer.step(samples=2.0 if loop.index == 0 else 1.0)
            if loop.index == 0 and step >= 3:
                waited.append(report.waited_seconds)
                assert report.updated
        if loop.index:
            loop.sleep(3.0)
            optimizer.leave()
            loop.sleep(100.0)

    train_together(train, 1 + others)
    assert max(waited) < 8.0, waited


FROM_AFAR = 15
"""Updates that the first peer takes by itself."""
TOGETHER = 4


@pytest.mark.parametrize("make", [adamw, by_diloco])
def test_peers_join_one_that_trains_alone(make: Maker) -> None:
    """Its updates have no log, so it pauses until they have its state and a batch."""
    epochs: dict[int, int] = {}
    joined: set[int] = set()

    def train(loop: SimulatedLoop) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        while loop.index and epochs.get(0, 0) < FROM_AFAR:
            loop.sleep(1.0)
        model, batches = normalised_model(seed=loop.index), Batches(loop.index, BATCH)
        together = 0

        def note(report: StepReport) -> None:
            nonlocal together
            together += isinstance(report.result, Success) and len(report.result.peers) == 3

        options = {"min_peers": 1, "on_update": note, "batch_size": BATCH}
        optimizer = make(model, loop.averager, RunState(model), options)
        for _ in range(400):
            if together == TOGETHER:
                break
            loop.sleep(0.3)
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, batches.next()))
            optimizer.step()
            epochs[loop.index] = optimizer.epoch
        joined.add(loop.index)
        while len(joined) < 3:
            loop.sleep(1.0)
        assert together == TOGETHER
        return common_tensors(optimizer, model), common_values(optimizer)

    found = train_together(train, 3, group_size=2)
    for tensors, values in found:
        assert values == found[0][1]
        assert values["epoch"] >= FROM_AFAR + TOGETHER
        for name, tensor in tensors.items():
            if make is adamw or name.startswith("anchor"):
                assert torch.equal(tensor, found[0][0][name]), name
