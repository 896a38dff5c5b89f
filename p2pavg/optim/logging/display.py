"""Displays of a training loop's reports: a line in the terminal."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from p2pavg.base.formats import in_bytes
from p2pavg.base.limits import WARN_WAIT_SECONDS
from p2pavg.optim.base.report import StepReport
from p2pavg.telemetry.events import AnyEvent, StateMoved, Waits
from p2pavg.telemetry.hub import OnEvent, Subscription

if TYPE_CHECKING:
    from rich.console import Console


class _Subscribable(Protocol):
    def subscribe(self, callback: OnEvent) -> Subscription: ...


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
        averager: if given, a transfer of a state has a bar of its own while it runs, and the line says what a call
            waits for; on a terminal only.
        console: rich console to draw on; standard output if not given. Unless it is a terminal, only the last state is
            drawn.

    Raises:
        ValueError: ``target`` is out of range.
    """

    def __init__(
        self,
        *,
        target: float | None = None,
        metric: str = "loss",
        averager: _Subscribable | None = None,
        console: Console | None = None,
    ) -> None:
        if target is not None and not 0 < target < math.inf:
            raise ValueError(f"target must be a number of samples above 0, got {target!r}")
        # Imported late: a loop without a display does not have to wait for these imports.
        from rich.progress import BarColumn, Progress, TextColumn

        self._target = target
        self._metric = metric
        self._value: float | None = None
        # Without markup: reasons and metrics' names come from other peers, and "[/b]" would raise MarkupError.
        text = TextColumn("{task.description}", markup=False)
        rest = TextColumn("{task.fields[rest]}", markup=False)
        is_plain = target is None and averager is None
        columns = (text, rest) if is_plain else (text, BarColumn(bar_width=20), rest)
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("waiting for the first batch", total=target, rest="")

        self._averager = averager if self._progress.console.is_terminal else None
        self._subscription: Subscription | None = None
        self._transfers: dict[str, Any] = {}

    def __enter__(self) -> RunProgress:
        self._progress.start()
        if self._averager is not None:
            self._subscription = self._averager.subscribe(self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._subscription is not None:
            self._subscription.cancel()
        self._progress.stop()

    def _take(self, event: AnyEvent) -> None:
        """Draw the bar of a transfer, and remove it when the transfer is complete; say why a call waits."""
        if isinstance(event, Waits):
            self._progress.update(self._task, rest=f"waits {event.seconds:,.0f} s: {event.reason}")
        if not isinstance(event, StateMoved):
            return
        task = self._transfers.get(event.direction)
        if event.total and event.done >= event.total:
            if task is not None:
                self._progress.remove_task(self._transfers.pop(event.direction))
            return
        if task is None:
            names = {"download": "fetching a state", "upload": "sending a state"}
            task = self._progress.add_task(names[event.direction], rest="")
            self._transfers[event.direction] = task
        whole = f" of {in_bytes(event.total)}" if event.total else ""
        peers = "1 peer" if event.peers == 1 else f"{event.peers} peers"
        self._progress.update(
            task,
            total=event.total or None,
            completed=event.done,
            rest=f"{in_bytes(event.done)}{whole}  {in_bytes(event.bytes_per_second)}/s  {peers}",
        )

    def show(self, report: StepReport) -> None:
        """Show the progress of this peer and its run."""
        self._value = report.metrics.get(self._metric, self._value)
        samples = f"{report.samples:,.0f}" + ("" if self._target is None else f"/{self._target:,.0f}")
        peers = "1 peer" if report.peers == 1 else f"{report.peers} peers"
        if report.others:
            peers += f" and {report.others} with other parameters"
        rest = f"{samples} samples  {peers}  {report.samples_per_second:,.0f} samples/s"
        if report.waited_seconds >= WARN_WAIT_SECONDS:
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
