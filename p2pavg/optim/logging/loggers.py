"""Loggers of updates: TensorBoard, Weights & Biases, and a base for others.

All of them take the same two things: the reports of an optimizer's ``step``, and the events of an averager.
"""

from __future__ import annotations

import abc
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.base.state import Lineage
from p2pavg.telemetry.events import AnyEvent, RoundEnded, RoundKind, UpdateTaken

# The event of an update, for the subscribers of an optimizer's averager.


def tell_update(averager: Averager, lineage: Lineage, report: StepReport) -> None:
    """Tell of an update: ``report`` is of the step that took it, and ``lineage`` is the one after it."""
    result = report.result if isinstance(report.result, Success) else None
    members = () if result is None else (*result.peers, *result.observers)
    averager.events.emit(
        UpdateTaken(
            time=time.time(),
            run_id=averager.config.run_id,
            epoch=report.epoch,
            lineage=lineage.state,
            group_id="" if result is None else result.group_id,
            peers=(averager.peer_id,) if result is None else result.peers,
            samples=report.samples if result is None else result.total_weight,
            metrics=report.metrics,
            grad_norm=report.grad_norm,
            update_norm=report.update_norm,
            learning_rates=report.learning_rates,
            outer_rate=report.outer_rate,
            replayed=result is not None and averager.peer_id not in members,
            certificate=b"" if result is None else result.certificate,
        )
    )


# Figures of updates and rounds by name, for loggers.


def figures_of_update(update: StepReport | UpdateTaken) -> dict[str, float]:
    """Return the figures that an update's report and its event have in common."""
    found: dict[str, float] = {f"metrics/{name}": value for name, value in update.metrics.items()}
    for name in ("grad_norm", "update_norm", "outer_rate"):
        if (value := getattr(update, name)) is not None:
            found[name] = value
    rates = update.learning_rates
    if len(rates) == 1:
        return found | {"learning_rate": rates[0]}
    return found | {f"learning_rate/{group}": rate for group, rate in enumerate(rates)}


def figures_of_result(result: Success) -> dict[str, float]:
    """Return the figures of the round of an update, as its report has them."""
    return {
        "round/peers": len(result.peers),
        "round/samples": result.total_weight,
        "round/seconds": result.duration,
        "round/bytes_sent": result.bytes_sent,
        "round/bytes_received": result.bytes_received,
    }


def figures_of_round(event: RoundEnded) -> dict[str, float]:
    """Return the figures of a round that succeeded."""
    return {
        "round/peers": len(event.contributors),
        "round/samples": event.samples,
        "round/seconds": event.duration,
        "round/bytes_sent": sum(event.sent.values()),
        "round/bytes_received": sum(event.received.values()),
        "round/lost": len(event.lost),
        "round/clipped": len(event.clipped),
    }


class FiguresLog(abc.ABC):
    """Base of loggers: give it to ``on_update=`` of an optimizer, or to ``averager.subscribe``, and not to both.

    The step of all curves is the epoch. These are the curves:

    * ``metrics/...``: the means over the update's peers.
    * ``grad_norm``, and ``update_norm`` where the optimizer measures it; ``outer_rate`` of local updates.
    * ``learning_rate``; with several parameter groups ``learning_rate/0`` and so on.
    * ``round/...``: contributing ``peers``, their ``samples``, ``seconds``, and this peer's ``bytes_sent`` and
      ``bytes_received``. From events, also ``lost`` and ``clipped``, the numbers of members.

    Reports without an update are skipped, and so are events other than updates and rounds.
    """

    def __init__(self) -> None:
        self._round: tuple[str, dict[str, float]] = ("", {})

    def __call__(self, news: StepReport | AnyEvent) -> None:
        """Write the figures of a report or an event."""
        match news:
            case StepReport(result=Success() as result):
                self.write(figures_of_update(news) | figures_of_result(result), news.epoch)
            case RoundEnded() if news.result is RoundKind.SUCCESS:
                self._round = (news.group_id, figures_of_round(news))  # the update of this round comes next
            case UpdateTaken():
                group_id, of_round = self._round
                figures = figures_of_update(news) | (of_round if news.group_id == group_id else {})
                self.write(figures, news.epoch)

    @abc.abstractmethod
    def write(self, figures: Mapping[str, float], epoch: int) -> None:
        """Write figures at an epoch. Call it for figures of your own, such as ``{"held_out/loss": 2.1}``."""

    def close(self) -> None:  # noqa: B027 - a logger may have nothing to close
        """Flush and close the log; leaving a ``with`` block does it too."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoardLog(FiguresLog):
    """Writes every update's figures for TensorBoard: see :class:`FiguresLog`.

    Args:
        log_dir: the folder, a separate one for each peer; created when missing.

    Raises:
        ImportError: TensorBoard is not installed; the message says how to install it.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoardLog needs TensorBoard: pip install tensorboard") from error
        super().__init__()
        self._writer: Any = SummaryWriter(os.fspath(log_dir))

    def write(self, figures: Mapping[str, float], epoch: int) -> None:
        """See :class:`FiguresLog`."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, epoch)

    def close(self) -> None:
        """See :class:`FiguresLog`."""
        self._writer.close()


class WandbLog(FiguresLog):
    """Writes every update's figures to Weights & Biases: see :class:`FiguresLog`.

    The epoch is the x axis of all curves. W&B's own step stays free for what the training loop logs itself.

    Args:
        run: a run of ``wandb.init``, which the caller finishes. Without one, this logger makes and finishes one.
        init: arguments of ``wandb.init`` without ``run``, such as ``project="gpt"`` and ``mode="offline"``.

    Raises:
        ImportError: wandb is not installed; the message says how to install it.
        ValueError: both ``run`` and arguments of ``wandb.init`` were given.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        if run is not None and init:
            raise ValueError(f"run and {', '.join(sorted(init))} exclude each other: the run exists already")
        self._owned = run is None
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise ImportError("WandbLog needs wandb: pip install wandb") from error
            run = wandb.init(**init)
        super().__init__()
        self._run = run
        self._defined = False

    def write(self, figures: Mapping[str, float], epoch: int) -> None:
        """See :class:`FiguresLog`."""
        if not self._defined:
            self._defined = True
            self._run.define_metric("epoch")
            for name in ("metrics/*", "round/*", "learning_rate/*", "held_out/*"):
                self._run.define_metric(name, step_metric="epoch")
            for name in ("grad_norm", "update_norm", "learning_rate"):
                self._run.define_metric(name, step_metric="epoch")
        self._run.log({**figures, "epoch": epoch})

    def close(self) -> None:
        """See :class:`FiguresLog`. A run of the caller goes on."""
        if self._owned:
            self._run.finish()
