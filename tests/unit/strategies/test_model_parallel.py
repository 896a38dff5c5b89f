"""The strategy of peers that divide their model finds the ranks' places, and refuses what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from p2pavg import AveragingConfig, Star
from p2pavg.base.errors import ConfigError
from p2pavg.strategies import DataParallel, Federated, ModelParallel
from tests.unit.strategies.test_optimizers import made_by

LARGE = DataParallel(target_batch_size=64, aggregation="median", topology=Star())
STAGES = ModelParallel(training=LARGE, stages=2, microbatches=4)


@pytest.fixture
def as_rank() -> Iterator[Callable[[int, int], None]]:
    def begin(rank: int, ranks: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_configuration_has_the_rules_of_the_training() -> None:
    config = STAGES.config(AveragingConfig(run_id="lab"))
    assert (config.robust, config.topology) == ("median", LARGE.topology)
    assert config.strategy == STAGES.json


def test_each_rank_has_its_place(as_rank: Callable[[int, int], None]) -> None:
    as_rank(5, 8)
    strategy = ModelParallel(training=LARGE, stages=2, copies=2, shards=2, microbatches=2)
    place = strategy.place()
    assert (place.stage, place.part, place.averages) == (1, "stage 1 of 2, shard 1 of 2", True)
    assert dist.get_process_group_ranks(place.group) == [0, 1, 4, 5]


def test_a_number_of_ranks_that_does_not_fit_is_told_with_the_right_one(
    as_rank: Callable[[int, int], None],
) -> None:
    as_rank(0, 3)
    with pytest.raises(
        ConfigError, match=r"stages 2 needs 2 ranks, and this peer has 3: .*--nproc-per-node=2"
    ):
        STAGES.place()


def test_another_place_is_refused_with_what_to_do(as_rank: Callable[[int, int], None]) -> None:
    as_rank(0, 2)
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ConfigError, match=r"place is missing: make it on all ranks with place = strategy\.place"
    ):
        STAGES.optimizer(model, None, inner)
    other = ModelParallel(training=LARGE, shards=2)
    with pytest.raises(
        ConfigError, match="place is of the mesh stage 1 x copy 1 x shard 2 x tensor 1, which is not"
    ):
        STAGES.optimizer(model, None, inner, place=other.place())
    with pytest.raises(ConfigError, match="stages is 1: there is no pipeline"):
        other.pipeline(model, other.place(), torch.nn.functional.mse_loss)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A peer of one rank, whose collectives work."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_an_averager_of_another_strategy_is_refused_by_the_field() -> None:
    strategy, other = (
        ModelParallel(training=LARGE),
        ModelParallel(training=Federated(rule="fedavg", sync_every=2)),
    )
    with pytest.raises(ConfigError, match="the run 'lab' has another strategy: training is"):
        made_by(strategy, other.config(AveragingConfig(run_id="lab")), place=strategy.place())
    with pytest.raises(ConfigError, match=r"open it with strategy\.config\(config\)"):
        made_by(strategy, AveragingConfig(run_id="lab"), place=strategy.place())
    with pytest.raises(
        ValueError, match="averager is missing: each rank of the first copy averages its part"
    ):
        strategy.optimizer(torch.nn.Linear(2, 1), None, cast(Any, None), place=strategy.place())
    other_thing = cast(Any, torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"averager must be one of p2pavg\.blocking, got Linear"):
        strategy.optimizer(torch.nn.Linear(2, 1), other_thing, cast(Any, None), place=strategy.place())
