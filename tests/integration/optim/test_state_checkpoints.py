"""Checkpoints of local updates: a process that begins again has all that it had; one that does not fit is refused."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

import p2pavg
from p2pavg.base.errors import StateError
from p2pavg.blocking import Averager, open_averager
from p2pavg.optim import AveragedOptimizer, ErrorFeedback, LocalUpdates, RunState, diloco, fedavg
from p2pavg.peer.shared_states import ShareSettings
from tests.integration.optim.company import LISTEN, Batches, config, loss_of, train_together, until

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


def check_equal(found: Any, expected: Any, path: str = "") -> None:
    """Check that two nested values have the same bits."""
    assert type(found) is type(expected), path
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, path
        assert found.numpy().tobytes() == expected.numpy().tobytes(), path
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            check_equal(found[key], expected[key], f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for index, value in enumerate(expected):
            check_equal(found[index], value, f"{path}/{index}")
    else:
        assert found == expected, path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Train three peers, of which some observe; return their folder, and what each had at its last checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    alone = threading.Lock()

    def work(index: int, averager: Averager) -> dict[str, Any]:
        model, batches = model_of(5), Batches(index, 4)
        state = RunState(model, folder / str(index), every=UPDATES, keep=1)
        optimizer, kept = local_optimizer(model, averager, state), {}
        for _ in until(optimizer, UPDATES):
            state.extras["data_position"] = {"batch": optimizer.epoch, "order": torch.arange(3)}
            loss = loss_of(model, batches.next())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            with alone:
                torch.rand(1)
            report = optimizer.step(samples=4)
            if report.updated and optimizer.epoch == UPDATES:
                kept = own_of(optimizer, model)
        return kept

    return folder, train_together(work, PEERS, half_contribute())


def open_alone(how: p2pavg.AveragingConfig) -> Any:
    return open_averager(how, listen=LISTEN)


class TestRestored:
    def test_a_process_that_begins_again_has_all_that_the_former_one_had(
        self, saved: tuple[Path, list[dict[str, Any]]]
    ) -> None:
        folder, kept = saved
        for index, expected in enumerate(kept):
            model = model_of(6)
            torch.manual_seed(77)
            with open_alone(half_contribute()) as averager:
                state = RunState(model, folder / str(index))
                optimizer = local_optimizer(model, averager, state)
                found = own_of(optimizer, model)
                random = found.pop("random")
                check_equal(found, {k: v for k, v in expected.items() if k != "random"})
                assert random.tolist() != torch.Generator().manual_seed(77).get_state().tolist()
                assert optimizer.epoch == UPDATES
                assert state.extras["data_position"]["batch"] == UPDATES - 1
                assert state.extras["data_position"]["order"].tolist() == [0, 1, 2]
        progress = [each["saved"]["samples"] for each in kept]
        assert max(progress) > 0, "an observer has progress that the others do not have yet"
        residuals = [each["saved"]["feedback"]["residual"] for each in kept]
        assert any(residual is not None and float(residual.norm()) > 0 for residual in residuals)

    def test_a_checkpoint_that_is_being_written_when_the_averager_closes_is_written(self) -> None:
        written: list[int] = []
        with open_alone(config(2)) as averager:
            averager.declare([torch.zeros(3)])
            sharing = averager.share_states(ShareSettings(log_bytes=2**20))
            sharing._token.run_sync_soon(time.sleep, 0.5)  # what follows is heard of at once
            sharing.in_background(lambda: written.append(1))
            sharing._token.run_sync_soon(sharing._nursery.cancel_scope.cancel)  # as the averager's end does
        assert written == [1]


def refused(folder: Path, make: Callable[[Averager, RunState], Any], model: torch.nn.Module) -> str:
    """Return the reason for which an optimizer refuses the checkpoint of the first peer."""
    with open_alone(half_contribute()) as averager, pytest.raises(StateError) as error:
        make(averager, RunState(model, folder / "0"))
    return str(error.value)


class TestRefused:
    def test_a_checkpoint_of_another_model_is_refused_and_the_tensor_is_named(
        self, saved: tuple[Path, list[dict[str, Any]]]
    ) -> None:
        model = model_of(5, width=9)
        reason = refused(saved[0], lambda averager, state: local_optimizer(model, averager, state), model)
        assert "0.weight" in reason
        assert "9" in reason

    def test_a_checkpoint_of_other_settings_is_refused_and_they_are_named(
        self, saved: tuple[Path, list[dict[str, Any]]]
    ) -> None:
        model = model_of(5)
        reason = refused(
            saved[0], lambda averager, state: local_optimizer(model, averager, state, sync_every=4), model
        )
        assert "sync_every 3" in reason
        assert "this peer with 4" in reason

    def test_a_checkpoint_of_another_kind_of_optimizer_is_refused(
        self, saved: tuple[Path, list[dict[str, Any]]]
    ) -> None:
        model = model_of(5)

        def make(averager: Averager, state: RunState) -> AveragedOptimizer:
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            return AveragedOptimizer(inner, averager, target_batch_size=8, state=state)

        assert "another kind of optimizer" in refused(saved[0], make, model)

    def test_a_checkpoint_without_this_peers_feedback_is_refused(
        self, saved: tuple[Path, list[dict[str, Any]]]
    ) -> None:
        model = model_of(5)
        reason = refused(
            saved[0], lambda averager, state: local_optimizer(model, averager, state, feedback=None), model
        )
        assert "feedback" in reason

    def test_every_refusal_names_the_file(self, saved: tuple[Path, list[dict[str, Any]]]) -> None:
        model = model_of(5, width=9)
        reason = refused(saved[0], lambda averager, state: local_optimizer(model, averager, state), model)
        assert str(saved[0] / "0") in reason


class TestMisuse:
    def test_one_run_state_serves_one_optimizer(self) -> None:
        model = model_of(5)
        state = RunState(model)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with open_alone(config(2)) as averager:
            fedavg(inner, averager, sync_every=2, state=state)
        with open_alone(config(2)) as averager, pytest.raises(ValueError, match="another optimizer"):
            fedavg(inner, averager, sync_every=2, state=state)

    def test_the_model_of_the_state_is_that_of_the_optimizer(self) -> None:
        model = model_of(5)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with open_alone(config(2)) as averager, pytest.raises(ValueError, match="model of the RunState"):
            fedavg(inner, averager, sync_every=2, state=RunState(model), model=model_of(5))


def wait_for(release: threading.Event) -> None:
    assert release.wait(60.0)


def test_a_checkpoint_waits_for_other_work_and_is_not_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The work is a snapshot for another peer, say. The checkpoint comes after the first update that follows it."""
    caplog.set_level(logging.WARNING, "p2pavg.optim")

    def work(index: int, averager: Averager) -> None:
        release = threading.Event()
        model, batches = model_of(5), Batches(index, 4)
        state = RunState(model, tmp_path / str(index), every=2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fedavg(inner, averager, sync_every=1, state=state, peers_to_start=2)
        assert optimizer._states is not None
        optimizer._states._sharing.in_background(partial(wait_for, release))
        for _ in until(optimizer, 5):
            torch.autograd.backward(loss_of(model, batches.next()))
            if optimizer.epoch == 2:
                release.set()
            while release.is_set() and optimizer._states._sharing.is_working:
                time.sleep(0.01)
            optimizer.step(samples=4)
            optimizer.zero_grad()

    train_together(work, 2)
    for index in range(2):
        names = [path.name for path in (tmp_path / str(index)).iterdir()]
        assert sorted(names) == ["update-000000000003.safetensors", "update-000000000004.safetensors"]
    assert not [record for record in caplog.records if record.name.startswith("p2pavg")]
