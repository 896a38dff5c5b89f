"""`ReplicatedOptimizer` on a peer of one rank: what it passes on to rank 0's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from p2pavg import RandomFraction
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, ReplicatedOptimizer
from p2pavg.optim.ranks.replicas import _Mirror
from p2pavg.optim.ranks.shards import Ranks
from tests.unit.optim.fakes import Alone, Make, large_batch, local


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


def made(network: nn.Module, **options: Any) -> ReplicatedOptimizer:
    given: dict[str, Any] = {"target_batch_size": 4, "peers_to_start": 2, "batch_size": 4}
    inner = SGD(network.parameters(), lr=0.5)
    return ReplicatedOptimizer.of(inner, network, cast(Averager, Alone()), **(given | options))


def backward(network: nn.Module) -> torch.Tensor:
    loss = network(torch.ones(4, 3)).square().mean()
    torch.autograd.backward(loss)
    return cast(torch.Tensor, loss)


def test_it_is_an_optimizer_with_the_groups_of_inner() -> None:
    network = nn.Linear(3, 1)
    optimizer = made(network)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.optimizer is not None
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    backward(network)
    report = optimizer.step()
    scheduler.step()
    assert report.learning_rates == (0.5,)
    assert optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(RuntimeError, match="cannot be added"):
        optimizer.add_param_group({})


@pytest.mark.parametrize("how", ["leave", "finish"])
def test_it_ends_as_its_optimizer_does(how: str) -> None:
    network, averager = nn.Linear(3, 1), Alone()
    optimizer = ReplicatedOptimizer.of(
        SGD(network.parameters(), lr=0.5),
        network,
        cast(Averager, averager),
        target_batch_size=4,
        batch_size=2,
    )
    backward(network)
    optimizer.step()
    assert not averager.progress_board.withdrawn
    getattr(optimizer, how)()
    assert averager.progress_board.withdrawn


def test_a_closure_returns_its_loss() -> None:
    network = nn.Linear(3, 1)
    optimizer = made(network)
    loss = optimizer.step(lambda: backward(network))
    assert loss > 0
    assert optimizer.updated
    assert optimizer.epoch == 1


def test_gradients_stay_between_accumulated_passes() -> None:
    network = nn.Linear(3, 1)
    optimizer = made(network, accumulate=2)
    backward(network)
    assert not optimizer.step().updated
    optimizer.zero_grad()
    assert network.weight.grad is not None
    backward(network)
    assert optimizer.step().updated
    optimizer.zero_grad()
    assert network.weight.grad is None


def test_gradients_stay_after_an_error_between_accumulated_passes() -> None:
    network = nn.Linear(3, 1)
    optimizer = made(network, accumulate=2)
    backward(network)
    assert not optimizer.step().updated
    with pytest.raises(ValueError, match="samples"):
        optimizer.step(samples=-1.0)
    optimizer.zero_grad()
    assert network.weight.grad is not None, "the next pass adds to those of the first"


def test_a_batch_that_overflows_is_left_out() -> None:
    network = nn.Linear(3, 1)
    optimizer = made(network)
    scaler = torch.amp.GradScaler("cpu")
    torch.autograd.backward(scaler.scale((network(torch.ones(4, 3)) * float("inf")).sum()))
    report = scaler.step(optimizer)
    scaler.update()
    assert report.skipped  # type: ignore[union-attr]  # torch says a number
    assert optimizer.epoch == 0
    assert not hasattr(optimizer.optimizer, "found_inf")
    optimizer.zero_grad()
    backward(network)
    assert optimizer.step().updated


def test_a_state_goes_on_in_another_one() -> None:
    network, other = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer, loaded = made(network), made(other)
    backward(network)
    optimizer.step()
    other.load_state_dict(network.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.epoch == 1
    with pytest.raises(ValueError, match="holds no lineage"):
        loaded.load_state_dict({})


def test_other_ranks_have_groups_to_look_at_and_no_step() -> None:
    weights = nn.Parameter(torch.ones(1))
    mirror = _Mirror([{"params": [weights], "lr": 0.5}], {"lr": 0.1})
    assert mirror.param_groups[0]["lr"] == 0.5
    with pytest.raises(RuntimeError, match="rank 0 of this peer takes the steps"):
        mirror.step()


class BrokenError(RuntimeError):
    """An error of rank 0 of any kind."""


def test_the_other_ranks_hear_of_any_error_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for it in a collective operation, and would wait without end."""

    def fail(*_: Any, **__: Any) -> Any:
        raise BrokenError

    told: list[object] = []
    heard: list[object] = []
    gather, as_the_first = Ranks.gather, Ranks.as_the_first

    def heard_gather(ranks: Ranks, said: object) -> Any:
        told.append(said)
        return gather(ranks, said)

    def heard_first(ranks: Ranks, work: Callable[[], object]) -> Any:
        heard.append(work())
        return as_the_first(ranks, work)

    monkeypatch.setattr(Ranks, "gather", heard_gather)
    network = nn.Linear(3, 1)
    with pytest.raises(BrokenError):
        ReplicatedOptimizer.of(
            SGD(network.parameters(), lr=0.5), network, cast(Averager, Alone()), recipe=fail
        )
    assert told == ["BrokenError"]

    optimizer = made(network)
    monkeypatch.setattr(AveragedOptimizer, "load_state_dict", fail)
    monkeypatch.setattr(Ranks, "as_the_first", heard_first)
    with pytest.raises(BrokenError):
        optimizer.load_state_dict(optimizer.state_dict())
    assert heard == ["BrokenError"]


@pytest.mark.parametrize(
    ("make", "config", "options", "named"),
    [
        # Participants would be drawn for each rank, so one update would mix different samples.
        (large_batch, {"participation": RandomFraction(0.5)}, {}, "participation"),
        (local, {"participation": RandomFraction(0.5)}, {}, "participation"),
        (large_batch, {}, {"overlap": True}, "overlap"),
        (local, {}, {"delay": 1}, "delay"),
    ],
)
def test_what_sharded_ranks_cannot_have_is_named(
    make: Make, config: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    weights = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=f"{named} cannot be used with a process_group"):
        make(Alone(**config), SGD([weights]), process_group=dist.group.WORLD, **options)


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(ValueError, match="target_batch_size"):
        made(nn.Linear(3, 1), target_batch_size=0)
