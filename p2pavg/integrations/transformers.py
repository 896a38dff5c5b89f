"""Training with the ``Trainer`` of Hugging Face's transformers: a callback and a pair of optimizer and schedule.

::

    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(inner, 100, 1000)  # counts updates of the run
    optimizer = AveragedOptimizer(inner, averager, target_batch_size=4096, batch_size=32, scheduler=schedule)
    trainer = Trainer(model, args, train_dataset=data, optimizers=optimizers(optimizer),
                      callbacks=[TransformersCallback(optimizer)])

The Trainer's checkpoints hold the optimizer's state, with its schedule.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

try:
    from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "p2pavg.integrations.transformers needs transformers: pip install 'p2pavg[transformers]'"
    ) from error

from p2pavg.optim.base.wrapper import PeerOptimizer
from p2pavg.optim.large_batch.averaged import AveragedOptimizer

logger = logging.getLogger(__name__)


class OwnSchedule(LRScheduler):
    """Stands for the schedule that an optimizer steps itself: its own ``step`` changes no rate.

    The ``Trainer`` steps its schedule after each batch, and an update may take several.

    Args:
        optimizer: the optimizer of a run.
    """

    def __init__(self, optimizer: PeerOptimizer) -> None:
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]  # a rate in a tensor stays one
        """Return the present rates."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:  # type: ignore[override]
        """Return the present rates, for logs."""
        return [float(rate) for rate in self.get_lr()]


def optimizers(optimizer: PeerOptimizer) -> tuple[PeerOptimizer, OwnSchedule]:
    """Return the pair for ``Trainer(optimizers=...)``.

    Without a schedule of its own, the ``Trainer`` would make a linear one and step it with this peer's batches, so that
    the rates of the peers differed.
    """
    return optimizer, OwnSchedule(optimizer)


class TransformersCallback(TrainerCallback):  # type: ignore[misc]
    """Ends the training after a number of updates, and logs the run's progress beside the Trainer's figures.

    Args:
        optimizer: the optimizer that the ``Trainer`` has.
        updates: number of updates of the run after which the training ends; ``None`` for the Trainer's ``max_steps``
            alone, which counts this peer's batches.

    Raises:
        ValueError: at the beginning of the training, if the ``Trainer`` steps a schedule of its own.
    """

    def __init__(self, optimizer: PeerOptimizer, *, updates: int | None = None) -> None:
        self.optimizer = optimizer
        self._updates = updates

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Check that peers with different batches cannot take different steps."""
        if not isinstance(self.optimizer, AveragedOptimizer):
            return
        is_constant = args.lr_scheduler_type == SchedulerType.CONSTANT
        if not isinstance(given.get("lr_scheduler"), OwnSchedule) and not is_constant:
            raise ValueError(
                "the Trainer steps a schedule with this peer's batches: give the schedule to AveragedOptimizer"
                " (scheduler=), and Trainer(optimizers=p2pavg.integrations.transformers.optimizers(optimizer)); or"
                ' train at one rate with TrainingArguments(lr_scheduler_type="constant")'
            )
        if args.max_grad_norm:
            logger.warning(
                "TrainingArguments.max_grad_norm clips this peer's gradients before they are averaged; to clip the"
                " average, set it to 0 and give max_grad_norm to the AveragedOptimizer"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> TrainerControl:
        """End the training after the last update."""
        if self._updates is not None and self.optimizer.epoch >= self._updates:
            control.should_training_stop = True
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: MutableMapping[str, float] | None = None,
        **given: Any,
    ) -> None:
        """Log the run's progress, and give this peer's loss to the run."""
        if logs is None or self.optimizer.report is None:
            return
        if "loss" in logs:
            self.optimizer.note({"loss": float(logs["loss"])})
        report = self.optimizer.report
        figures: dict[str, float] = {f"run_{name}": value for name, value in report.metrics.items()}
        figures |= {"run_updates": report.epoch, "run_peers": report.peers}
        logs.update(figures)  # for the callbacks after this one
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """End the training: give other peers the last updates that they lack, and leave the run."""
        self.optimizer.finish()
