"""Peers that begin to train end in one lineage, or with a reason; on virtual time, with the real optimizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from p2pavg.optim import AveragedOptimizer, LocalUpdates, StepReport, diloco
from tests.simulation.stage import Player, Stage

UPDATES = 5


def model() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def local(player: Player, weights: torch.nn.Parameter) -> LocalUpdates:
    return diloco(torch.optim.SGD([weights], lr=0.1), player.averager, sync_every=5, state=False)


def large_batch(player: Player, weights: torch.nn.Parameter) -> AveragedOptimizer:
    inner = torch.optim.SGD([weights], lr=0.1)
    return AveragedOptimizer(inner, player.averager, target_batch_size=64, state=False)


Make = Callable[[Player, torch.nn.Parameter], LocalUpdates | AveragedOptimizer]
both = pytest.mark.parametrize("make", [local, large_batch])


def trains(
    make: Make, batch_seconds: float, updates: int = UPDATES
) -> Callable[[Player], tuple[bytes, str | None]]:
    """Run the documented loop; return its final lineage, or the reason why it could not follow."""

    def work(player: Player) -> tuple[bytes, str | None]:
        weights = model()
        optimizer = make(player, weights)
        while optimizer.epoch < updates:
            player.sleep(batch_seconds)
            weights.grad = torch.ones(2)
            report: StepReport = optimizer.step(samples=8)
            if report.behind:
                return optimizer.lineage.state, report.behind
        return optimizer.lineage.state, None

    return work


@both
@pytest.mark.parametrize("seed", range(2))
def test_peers_that_start_at_once_or_a_little_late_are_in_one_lineage(
    stages: Callable[..., Stage], make: Make, seed: int
) -> None:
    """This is with the default ``peers_to_start`` of 2."""
    stage = stages(seed)
    for name in "abc":
        late = stage.dice.choice([0.0, 0.0, 1.5, stage.dice.uniform(0.0, 2.0)])
        stage.enter(name, late, trains(make, stage.dice.choice([0.01, 0.1, 1.0])))
    found = stage.play()
    assert [behind for _, behind in found] == [None] * 3
    assert len({state for state, _ in found}) == 1
    assert {len(group) for group in stage.groups} == {3}


@both
@pytest.mark.parametrize("order", [(0.0, 0.4, 3.0), (3.0, 0.4, 0.0)])
def test_the_order_in_which_peers_start_does_not_matter(
    stages: Callable[..., Stage], make: Make, order: tuple[float, float, float]
) -> None:
    stage = stages(1)
    for name, at in zip("abc", order, strict=True):
        stage.enter(name, at, trains(make, 0.05))
    found = stage.play()
    assert len({state for state, _ in found}) == 1


@both
def test_a_peer_whose_first_batch_takes_long_is_waited_for(stages: Callable[..., Stage], make: Make) -> None:
    """It compiles its model; the others have known it since its optimizer was made."""
    stage = stages()

    def compiles(player: Player) -> tuple[bytes, str | None]:
        def make_and_compile(player: Player, weights: torch.nn.Parameter) -> LocalUpdates | AveragedOptimizer:
            optimizer = make(player, weights)
            player.sleep(20.0)
            return optimizer

        return trains(make_and_compile, 0.1)(player)

    for name in "ab":
        stage.enter(name, 0.0, trains(make, 0.1))
    stage.enter("c", 0.0, compiles)
    found = stage.play()
    assert len({state for state, _ in found}) == 1
    assert {len(group) for group in stage.groups} == {3}


def test_group_is_formed_again_with_a_peer_that_comes_in_time(stages: Callable[..., Stage]) -> None:
    """One peer learns of the third only while it looks for a group of two; the second knows it and waits."""
    stage = stages()
    stage.delays |= {("c", "a"): 3.0, ("c", "b"): 0.1, ("a", "b"): 0.1, ("b", "a"): 0.1}
    for name, at in (("a", 0.0), ("b", 0.0), ("c", 4.5)):
        stage.enter(name, at, trains(local, 0.05))
    found = stage.play()
    assert len({state for state, _ in found}) == 1
    assert {len(group) for group in stage.groups} == {3}


@both
def test_a_peer_that_is_too_late_gets_the_reason_at_once_and_its_loop_ends(
    stages: Callable[..., Stage], make: Make
) -> None:
    stage = stages()
    for name in "ab":
        stage.enter(name, 0.0, trains(make, 0.1, 60))
    ended: list[float] = []

    def third(player: Player) -> tuple[bytes, str | None]:
        came_to = trains(make, 0.1)(player)
        ended.append(stage.now)
        return came_to

    stage.enter("c", 7.0, third)
    (one, _), (other, _), (_, behind) = stage.play()
    assert one == other
    assert behind is not None
    assert behind.startswith("2 peers are at epoch")
    assert ended[0] < 7.0 + 10.0
