"""Checkpoints of local updates: a process that begins again has all that it had; one that does not fit is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import p2pavg
from p2pavg.base.errors import StateError
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, ErrorFeedback, LocalUpdates, RunState, diloco
from p2pavg.testing import SimulatedLoop
from tests.integration.optim.company import Batches, config, until
from tests.simulation.test_cell_restarts import check_same
from tests.simulation.training import one_step, train_together
from tests.unit.optim.fakes import Alone

pytestmark = pytest.mark.one_worker

PEERS = 3
UPDATES = 4
SYNC_EVERY = 3


def model_of(seed: int, width: int = 8) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return model


def half_contribute() -> p2pavg.AveragingConfig:
    return config(PEERS, compression="blockwise8", participation=p2pavg.RandomFraction(0.5, seed=2))


def local_optimizer(
    model: torch.nn.Module, averager: Averager, state: RunState | None, **options: Any
) -> LocalUpdates:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    given: dict[str, Any] = {
        "sync_every": SYNC_EVERY,
        "scheduler": StepLR(inner, 2),
        "feedback": ErrorFeedback("blockwise8"),
        "peers_to_start": PEERS,
    }
    return diloco(inner, averager, state=state, **(given | options))


def own_of(optimizer: LocalUpdates, model: torch.nn.Module) -> dict[str, Any]:
    """Return a copy of all that a process of this peer needs to go on."""
    return {
        "saved": copy.deepcopy({k: v for k, v in optimizer.state_dict().items() if k != "peer_id"}),
        "model": copy.deepcopy(model.state_dict()),
        "random": torch.get_rng_state(),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Train three peers, of which some observe; return their folder, and what each had at its last checkpoint."""
    folder = tmp_path_factory.mktemp("saved")

    def work(loop: SimulatedLoop) -> dict[str, Any]:
        model, batches = model_of(5), Batches(loop.index, 4)
        state = RunState(model, folder / str(loop.index), every=UPDATES, keep=1)
        optimizer, kept = local_optimizer(model, loop.averager, state), {}
        for _ in until(optimizer, UPDATES):
            state.extras["data_position"] = {"batch": optimizer.epoch, "order": torch.arange(3)}
            torch.rand(1)
            if one_step(loop, model, batches, optimizer).updated and optimizer.epoch == UPDATES:
                kept = own_of(optimizer, model)
        return kept

    return folder, train_together(work, PEERS, half_contribute())


def begin_again() -> Averager:
    """Return the averager of a process that begins again and meets no other peer."""
    averager = Alone()
    averager.config = half_contribute()
    return cast(Averager, averager)


def test_a_process_that_begins_again_has_all_that_the_former_one_had(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, kept = saved
    for index, expected in enumerate(kept):
        model = model_of(6)
        torch.manual_seed(77)
        state = RunState(model, folder / str(index))
        optimizer = local_optimizer(model, begin_again(), state)
        found = own_of(optimizer, model)
        random = found.pop("random")
        check_same(found, {k: v for k, v in expected.items() if k != "random"})
        assert random.tolist() != torch.Generator().manual_seed(77).get_state().tolist()
        assert optimizer.epoch == UPDATES
        assert state.extras["data_position"]["batch"] == UPDATES - 1
        assert state.extras["data_position"]["order"].tolist() == [0, 1, 2]
    progress = [each["saved"]["samples"] for each in kept]
    assert max(progress) > 0, "an observer has progress that the others do not have yet"
    residuals = [each["saved"]["feedback"]["residual"] for each in kept]
    assert any(residual is not None and float(residual.norm()) > 0 for residual in residuals)


def large_batch(model: torch.nn.Module, averager: Averager, state: RunState) -> AveragedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return AveragedOptimizer(inner, averager, target_batch_size=8, state=state)


@pytest.mark.parametrize(
    ("width", "make", "options", "words"),
    [
        (9, local_optimizer, {}, ("0.weight", "9")),
        (8, local_optimizer, {"sync_every": 4}, ("sync_every 3", "this peer with 4")),
        (8, large_batch, {}, ("another kind of optimizer",)),
        (8, local_optimizer, {"feedback": None}, ("feedback",)),
    ],
    ids=["model", "settings", "optimizer", "feedback"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_its_file_and_the_reason(
    saved: tuple[Path, list[dict[str, Any]]],
    width: int,
    make: Callable[..., object],
    options: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    model = model_of(5, width)
    with pytest.raises(StateError) as error:
        make(model, begin_again(), RunState(model, saved[0] / "0"), **options)
    for word in (str(saved[0] / "0"), *words):
        assert word in str(error.value)
