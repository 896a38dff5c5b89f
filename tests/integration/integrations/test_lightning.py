"""The callback for Lightning, with rounds whose results the test sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from p2pavg.base.result import Success
from p2pavg.optim.coordination import attendance
from tests.unit.optim.fakes import Alone, local

# Importing lightning takes seconds, which only the worker that runs these tests is to spend.
if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from p2pavg.integrations.lightning import LightningCallback

pytestmark = [pytest.mark.one_worker, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: pip install '.[lightning]'")
    monkeypatch.setattr(attendance, "SETTLE_START_SECONDS", 0.0)


def module(*, optimizers: int = 1, interval: str | None = None) -> LightningModule:
    """Return one linear layer, with as many optimizers and schedules as a test wants."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            found = [torch.optim.SGD(self.parameters(), lr=1.0) for _ in range(optimizers)]
            if interval is None:
                return found
            schedule = torch.optim.lr_scheduler.StepLR(found[0], step_size=1, gamma=0.5)
            return {"optimizer": found[0], "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    return Module()


def loader(samples: int = 20) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, 3)), batch_size=8)


def trainer(callback: LightningCallback, folder: Path, **options: Any) -> Trainer:
    from lightning.pytorch import Trainer

    given: dict[str, Any] = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
    return Trainer(
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(given | options),
    )


def with_peers(averager: Alone, **options: Any) -> LightningCallback:
    from p2pavg.integrations.lightning import LightningCallback

    given: dict[str, Any] = {"target_batch_size": 1, "peers_to_start": 2}
    return LightningCallback(averager, **(given | options))  # type: ignore[arg-type]


def test_each_batch_counts_its_samples(tmp_path: Path) -> None:
    weights: list[float] = []
    losses: list[float] = []

    def note(report: Any) -> None:
        assert isinstance(report.result, Success)
        weights.append(report.result.total_weight)
        losses.append(averager._taken.metrics.means["loss"])

    averager = Alone()
    callback = with_peers(averager, on_update=note)
    trainer(callback, tmp_path).fit(module(), loader())
    assert weights == [8, 8, 4]
    assert len(losses) == 3
    assert callback.optimizer.epoch == 3
    assert averager.progress_board.withdrawn, "it has left the run"


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    weights: list[float] = []
    callback = with_peers(Alone(), on_update=lambda report: weights.append(report.result.total_weight))
    trainer(callback, tmp_path, accumulate_grad_batches=2).fit(module(), loader(16))
    assert weights == [16]


def test_an_update_of_several_batches_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.loggers import CSVLogger

    logger, rows = CSVLogger(tmp_path), []
    monkeypatch.setattr(logger, "log_metrics", lambda metrics, **_: rows.append(metrics))
    callback = with_peers(Alone())
    trainer(callback, tmp_path, accumulate_grad_batches=2, logger=logger).fit(module(), loader(48))
    assert callback.optimizer.epoch == 3
    assert [row["run_updates"] for row in rows if "run_updates" in row] == [1.0, 2.0, 3.0]


def test_the_training_ends_after_the_last_update(tmp_path: Path) -> None:
    callback = with_peers(Alone(), updates=2)
    trainer(callback, tmp_path, max_epochs=50).fit(module(), loader())
    assert callback.optimizer.epoch == 2


def test_the_schedule_is_stepped_once_per_update(tmp_path: Path) -> None:
    """The target takes two batches, so the rates are those of half as many steps."""
    rates: list[tuple[float, ...]] = []
    callback = with_peers(
        Alone(), target_batch_size=24, on_update=lambda report: rates.append(report.learning_rates)
    )
    trainer(callback, tmp_path, max_epochs=1).fit(module(interval="step"), loader(32))
    assert rates == [(1.0,), (0.5,)]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"interval": "epoch"}, '"interval": "step"'), ({"optimizers": 2}, "one optimizer, got 2")],
    ids=["a schedule of epochs", "two optimizers"],
)
def test_a_module_that_cannot_follow_a_run_is_refused(options: Any, named: str, tmp_path: Path) -> None:
    given = module(**options)
    given.automatic_optimization = "optimizers" not in options
    with pytest.raises(ValueError, match=named):
        trainer(with_peers(Alone()), tmp_path).fit(given, loader())


def test_a_checkpoint_holds_the_run(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    first, given = with_peers(Alone()), module(interval="step")
    saving = trainer(first, tmp_path)
    saving.fit(given, loader())
    saving.save_checkpoint(path)
    second, other = with_peers(Alone()), module(interval="step")
    trainer(second, tmp_path, max_epochs=2).fit(other, loader(), ckpt_path=path, weights_only=False)
    assert second.optimizer.epoch == 6
    assert second.optimizer.scheduler is not None
    assert second.optimizer.scheduler.last_epoch == 6


def test_local_updates_are_a_recipe(tmp_path: Path) -> None:
    def recipe(inner: torch.optim.Optimizer, averager: Any, **options: Any) -> Any:
        return local(averager, inner, **options)

    from p2pavg.integrations.lightning import LightningCallback

    callback = LightningCallback(Alone(), recipe=recipe, sync_every=3)  # type: ignore[arg-type]
    trainer(callback, tmp_path).fit(module(), loader(24))
    assert callback.optimizer.epoch == 1
