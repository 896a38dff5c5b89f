"""A member that averages in windows of rounds, with or without telemetry. Another process scrapes its metrics."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch

import p2pavg
from p2pavg import blocking
from p2pavg.base import logs
from p2pavg.metrics import PrometheusMetrics
from scripts.benchmarks.worker import Line

LOOK_SECONDS = 1.0


@contextmanager
def telemetry(averager: blocking.Averager) -> Iterator[int]:
    """Log, count, serve, and look at the run every second, as long as the block runs. Return the metrics' port."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(LOOK_SECONDS):
            averager.members()

    with ExitStack() as stack:
        sink = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        metrics = stack.enter_context(PrometheusMetrics(averager))
        logs.configure(level="info", form="json", stream=sink)
        port = metrics.serve()
        looks = threading.Thread(target=look)
        looks.start()
        try:
            yield port
        finally:
            stop.set()
            looks.join()
            logs.configure(level="warning")


def rounds(averager: blocking.Averager, values: torch.Tensor, count: int) -> list[float]:
    """Average some times, and return the duration of each exchange in seconds."""
    seconds: list[float] = []
    while len(seconds) < count:
        averager.accumulate([values])
        result = averager.step(wait=None)
        while isinstance(result, p2pavg.InProgress):
            result = averager.step(wait=None)
        if not isinstance(result, p2pavg.Success):
            raise RuntimeError(f"{type(result).__name__}: {result.reason}")  # noqa: TRY004 - the network's fault
        seconds.append(result.exchange_duration)
    return seconds


def main() -> None:
    """Run the worker."""
    torch.set_num_threads(1)
    line = Line()
    setup = line.told()
    config = p2pavg.AveragingConfig(run_id="bench", open_run=True, **setup["config"])
    values = torch.randn(setup["elements"])
    logs.configure(level="warning")
    with blocking.open_averager(
        config, bootstrap=setup["bootstrap"], listen=[f"/ip4/{setup['host']}/tcp/0"]
    ) as averager:
        line.report(address=averager.addresses[0])
        while True:
            told = line.told()
            with telemetry(averager) if told["telemetry"] else nullcontext(0) as port:
                line.report(port=port)
                before = time.process_time()
                found = rounds(averager, values, told["rounds"])
                processor = time.process_time() - before
            line.report(seconds=found, processor=processor / told["rounds"], at=time.time())


if __name__ == "__main__":
    main()
