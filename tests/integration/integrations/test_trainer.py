"""The callback for the Trainer of transformers, with rounds whose results the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch

from p2pavg.optim import AveragedOptimizer
from p2pavg.optim.coordination import attendance
from tests.unit.optim.fakes import Alone, large_batch

# Importing transformers takes seconds, which only the worker that runs these tests is to spend.
if TYPE_CHECKING:
    from transformers import Trainer

pytestmark = [pytest.mark.one_worker, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[transformers]'")
    monkeypatch.setattr(attendance, "SETTLE_START_SECONDS", 0.0)


class Network(torch.nn.Module):
    """One linear layer that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(inputs).square().mean()}


DATA = [{"inputs": torch.ones(3), "labels": torch.zeros(1)} for _ in range(20)]


Made: TypeAlias = "tuple[Trainer, AveragedOptimizer, list[Any]]"


def made(folder: Path, *, updates: int | None = None, schedule: bool = True, **changes: Any) -> Made:
    from transformers import Trainer, TrainingArguments

    from p2pavg.integrations.lightning import SampleCounter
    from p2pavg.integrations.transformers import TransformersCallback, optimizers

    network = Network()
    reports: list[Any] = []
    inner = torch.optim.SGD(network.parameters(), lr=1.0)
    optimizer = large_batch(
        Alone(),
        inner,
        scheduler=torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5) if schedule else None,
        samples_of=SampleCounter(network).take,
        on_update=reports.append,
        target_batch_size=changes.pop("target_batch_size", 1),
    )
    pair: Any = optimizers(optimizer) if schedule else (optimizer, None)
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    arguments = TrainingArguments(**(given | changes))
    trainer = Trainer(network, arguments, train_dataset=DATA, optimizers=pair)
    trainer.add_callback(TransformersCallback(optimizer, updates=updates))
    return trainer, optimizer, reports


def test_each_batch_counts_its_samples_and_logs_the_run(tmp_path: Path) -> None:
    trainer, optimizer, reports = made(tmp_path)
    trainer.train()
    assert [report.result.total_weight for report in reports] == [8, 8, 4]
    assert [report.learning_rates for report in reports] == [(1.0,), (0.5,), (0.25,)]
    assert optimizer.epoch == 3
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["run_updates"] for entry in logged] == [1, 2, 3]


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    trainer, _, reports = made(tmp_path, gradient_accumulation_steps=2)
    trainer.train()
    assert [report.result.total_weight for report in reports] == [16, 4]


def test_the_training_ends_after_the_last_update(tmp_path: Path) -> None:
    trainer, optimizer, _ = made(tmp_path, updates=2, num_train_epochs=50)
    trainer.train()
    assert optimizer.epoch == 2


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_of_the_trainer_is_refused(kind: str, tmp_path: Path) -> None:
    """It would be stepped with this peer's batches, and the peers' rates would differ."""
    trainer, _, _ = made(tmp_path, schedule=False, lr_scheduler_type=kind)
    with pytest.raises(ValueError, match="give the schedule to AveragedOptimizer"):
        trainer.train()


def test_a_constant_rate_needs_no_schedule(tmp_path: Path) -> None:
    trainer, optimizer, reports = made(tmp_path, schedule=False, lr_scheduler_type="constant")
    trainer.train()
    assert optimizer.epoch == 3
    assert {report.learning_rates for report in reports} == {(1.0,)}


def test_a_checkpoint_holds_the_run(tmp_path: Path) -> None:
    trainer, _, _ = made(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    again, optimizer, reports = made(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [report.epoch for report in reports] == [3]
    assert reports[0].learning_rates == (0.25,)
    assert optimizer.epoch == 3


def test_clipping_before_the_average_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, _, _ = made(tmp_path, max_grad_norm=1.0)
    trainer.train()
    assert "clips this peer's gradients before they are averaged" in caplog.text


def test_a_counter_counts_training_alone() -> None:
    from p2pavg.integrations.lightning import SampleCounter

    model = torch.nn.Linear(3, 1)
    counter = SampleCounter(model)
    model(torch.ones(5, 3))
    with torch.no_grad():
        model(torch.ones(7, 3))
    model.eval()(torch.ones(9, 3))
    assert (counter.take(), counter.take()) == (5, 0)
    model.train()
    counter.close()
    model(torch.ones(5, 3))
    assert counter.take() == 0
