"""Displays of a training loop's reports: a line in the terminal, curves for TensorBoard."""

from __future__ import annotations

import math
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from p2pavg.optim.report import StepReport
from p2pavg.optim.waiting import WARN_SECONDS
from p2pavg.result import Success

if TYPE_CHECKING:
    from rich.console import Console


class RunProgress:
    """A line with the run's progress: epoch, loss, samples of the target, peers, samples per second.

    Use it in a ``with`` block, and call :meth:`show` with every report::

        with RunProgress(target=4096) as progress:
            for inputs, targets in batches:
                ...
                progress.show(optimizer.step(samples=len(inputs), metrics={"loss": loss.item()}))

    Args:
        target: number of samples, of all peers together, for one update, if it is fixed; finite and above 0. With
            :class:`~p2pavg.optim.LocalUpdates`, peers * steps * samples of a batch.
        metric: name of the metric of :attr:`StepReport.metrics` to show: its mean over the peers of the last update.
        console: rich console to draw on; standard output if not given. Unless it is a terminal, only the last state is
            drawn.

    Raises:
        ValueError: ``target`` is out of range.
    """

    def __init__(
        self, *, target: float | None = None, metric: str = "loss", console: Console | None = None
    ) -> None:
        if target is not None and not 0 < target < math.inf:
            raise ValueError(f"target must be a number of samples above 0, got {target!r}")
        # Imported late: a loop without a display does not have to wait for these imports.
        from rich.progress import BarColumn, Progress, TextColumn

        self._target = target
        self._metric = metric
        self._value: float | None = None
        text, rest = TextColumn("{task.description}"), TextColumn("{task.fields[rest]}")
        columns = (text, rest) if target is None else (text, BarColumn(bar_width=20), rest)
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("waiting for the first batch", total=target, rest="")

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, report: StepReport) -> None:
        """Show the progress of this peer and its run."""
        self._value = report.metrics.get(self._metric, self._value)
        samples = f"{report.samples:,.0f}" + ("" if self._target is None else f"/{self._target:,.0f}")
        peers = "1 peer" if report.peers == 1 else f"{report.peers} peers"
        if report.others:
            peers += f" and {report.others} with other parameters"
        rest = f"{samples} samples  {peers}  {report.samples_per_second:,.0f} samples/s"
        if report.waited_seconds >= WARN_SECONDS:
            rest += f"  waited {report.waited_seconds:,.0f} s"
        if report.behind is not None:
            rest = f"behind: {report.behind}"
        value = "" if self._value is None else f"  {self._metric} {self._value:.4g}"
        self._progress.update(
            self._task,
            description=f"epoch {report.epoch}{value}",
            completed=report.samples if self._target is None else min(report.samples, self._target),
            rest=rest,
        )


class TensorBoardLog:
    """Writes every update's figures for TensorBoard; fits ``on_update=`` of the optimizers.

    The step of all curves is the epoch. The curves are ``metrics/...``, the means over the update's peers;
    ``grad_norm``; and ``round/...``: contributing ``peers``, their ``samples``, ``seconds``, and this peer's
    ``bytes_sent`` and ``bytes_received``. Reports without an update are skipped.

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
        self._writer: Any = SummaryWriter(os.fspath(log_dir))

    def __call__(self, report: StepReport) -> None:
        """Write the figures of one report."""
        result = report.result
        if not isinstance(result, Success):
            return
        figures: dict[str, float] = {f"metrics/{name}": value for name, value in report.metrics.items()}
        if report.grad_norm is not None:
            figures["grad_norm"] = report.grad_norm
        figures["round/peers"] = len(result.peers)
        figures["round/samples"] = result.total_weight
        figures["round/seconds"] = result.duration
        figures["round/bytes_sent"] = result.bytes_sent
        figures["round/bytes_received"] = result.bytes_received
        for name, value in figures.items():
            self._writer.add_scalar(name, value, report.epoch)

    def close(self) -> None:
        """Flush and close the log; leaving a ``with`` block does it too."""
        self._writer.close()

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
