"""Training with Lightning: a callback that lets the module's optimizer train with peers.

::

    trainer = Trainer(max_steps=1000, callbacks=[LightningCallback(averager, target_batch_size=4096)])
    trainer.fit(module, loader)

The module stays as it is. Lightning's checkpoints hold the optimizer's state, with its schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "p2pavg.integrations.lightning needs lightning: pip install 'p2pavg[lightning]'"
    ) from error

from p2pavg.blocking import Averager
from p2pavg.optim.base.wrapper import PeerOptimizer
from p2pavg.optim.large_batch.averaged import AveragedOptimizer


class LightningCallback(Callback):  # type: ignore[misc]
    """Wraps the optimizer of a ``LightningModule``, and counts the samples of its batches.

    A schedule that the module steps with its batches (``"interval": "step"``) becomes the optimizer's: with
    ``AveragedOptimizer`` it is stepped once per update of the run. The training loss travels with the updates, as the
    metric ``loss``, and the run's progress goes to the trainer's loggers.

    Args:
        averager: averager of the run.
        recipe: function that makes the optimizer of the inner one, the averager and ``options``, such as
            :func:`p2pavg.optim.diloco`.
        updates: number of updates of the run after which the training ends; ``None`` for the trainer's own limits,
            which count this peer's batches.
        options: further arguments of ``recipe``, such as ``target_batch_size``.

    Raises:
        ValueError: at the beginning of the training, if the module has several optimizers, or a schedule that cannot
            follow the run's updates, or if the trainer has several processes.
    """

    def __init__(
        self,
        averager: Averager,
        *,
        recipe: Callable[..., PeerOptimizer] = AveragedOptimizer,
        updates: int | None = None,
        **options: Any,
    ) -> None:
        self._averager = averager
        self._recipe = recipe
        self._updates = updates
        self._options = options
        self._samples = 0
        self._logged = 0  # the last update that was logged
        self._optimizer: PeerOptimizer | None = None

    @property
    def optimizer(self) -> PeerOptimizer:
        """The optimizer of the run.

        Raises:
            RuntimeError: the training has not begun.
        """
        if self._optimizer is None:
            raise RuntimeError("the training has not begun: Trainer.fit makes the optimizer")
        return self._optimizer

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the module's optimizer, before the trainer restores a checkpoint."""
        if trainer.world_size > 1:
            raise ValueError(
                "LightningCallback is for one process a peer; see p2pavg.optim.ReplicatedOptimizer for more"
            )
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"LightningCallback needs a module with one optimizer, got {len(trainer.optimizers)}"
            )
        options = dict(self._options)
        if "batch_size" not in options and "samples_of" not in options:
            options["samples_of"] = self._take_samples
        schedule = self._taken_schedule(trainer)
        if schedule is not None:
            options.setdefault("scheduler", schedule)
        self._optimizer = self._recipe(trainer.optimizers[0], self._averager, **options)
        trainer.optimizers = [self._optimizer]

    def _taken_schedule(self, trainer: Trainer) -> Any:
        """Take the module's schedule from the trainer; return it, or ``None`` if there is none."""
        configs = trainer.strategy.lr_scheduler_configs
        if not configs:
            return None
        config = configs[0]
        if len(configs) > 1 or config.interval != "step" or config.frequency != 1 or config.reduce_on_plateau:
            raise ValueError(
                "the module's schedule cannot follow the run's updates: return one schedule with"
                ' {"interval": "step"} from configure_optimizers; it is stepped once per update'
            )
        configs.clear()
        return config.scheduler

    def _take_samples(self) -> int:
        samples, self._samples = self._samples, 0
        return samples

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples of a batch."""
        self._samples += batch_size_of(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Give the loss to the run. Lightning has divided it by the number of accumulated batches."""
        value = float(loss.detach()) * trainer.accumulate_grad_batches
        if math.isfinite(value):  # the step itself refuses the gradients of such a loss
            self.optimizer.note({"loss": value})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log an update, and end the training after the last one."""
        report = self.optimizer.report
        # The report stays for all batches that make one step together.
        if report is not None and report.updated and report.epoch != self._logged:
            self._logged = report.epoch
            figures = {f"run_{name}": value for name, value in report.metrics.items()}
            figures |= {"run_updates": float(report.epoch), "run_peers": float(report.peers)}
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)
        if self._updates is not None and self.optimizer.epoch >= self._updates:
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the training: give other peers the last updates that they lack, and leave the run."""
        self.optimizer.finish()


# The number of samples of a batch, for frameworks that call `step` themselves.


def batch_size_of(batch: object) -> int:
    """Return the number of samples of a batch: the length of its first tensor that has one.

    Args:
        batch: a tensor, or tensors in mappings, tuples and lists, also nested.

    Raises:
        ValueError: there is no such tensor.
    """
    found = _first_length(batch)
    if found is None:
        raise ValueError(
            f"the number of samples of a {type(batch).__name__} is not known: it has no tensor with a first dimension."
            " Give the optimizer batch_size= or samples_of="
        )
    return found


def _first_length(batch: object) -> int | None:
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.dim() else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next((found for part in parts if (found := _first_length(part)) is not None), None)


class SampleCounter:
    """Counts the samples that a model is trained on, by its calls in training mode with gradients.

    Give its method :meth:`take` to an optimizer as ``samples_of=``. It counts each call of the model, so a loop that
    calls the model several times for a batch needs ``batch_size=`` instead.

    Args:
        model: the module that the loop calls.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._samples = 0
        self._hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def take(self) -> int:
        """Return the number of samples since the last call."""
        samples, self._samples = self._samples, 0
        return samples

    def close(self) -> None:
        """Count no more."""
        self._hook.remove()

    def _count(self, model: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if model.training and torch.is_grad_enabled():
            self._samples += batch_size_of([*args, kwargs])
