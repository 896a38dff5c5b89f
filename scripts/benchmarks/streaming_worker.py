"""A peer that trains with local updates: computing is a pause, and the inner steps are real."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

import p2pavg
from p2pavg import blocking
from p2pavg.optim import RunState, StepReport, diloco, gossip, noloco
from scripts.benchmarks.worker import Line

FEATURES = 1000
SAMPLES = 8
WARM_UP_UPDATES = 2


class Window:
    """The steps of a window."""

    def __init__(self) -> None:
        self._calls: list[float] = []
        self._updates = 0
        self._failed = 0
        self._weights: list[tuple[float, float]] = []
        self.began = time.monotonic()

    def note(self, call: float, report: StepReport | None, me: str) -> None:
        """Note a step, and the seconds of its call."""
        self._calls.append(call)
        result = None if report is None else report.result
        if isinstance(result, p2pavg.Success):
            self._updates += 1
            self._weights.append((result.weights.get(me, 0.0), result.total_weight))
        elif isinstance(result, p2pavg.Failed | p2pavg.NoPeers):
            self._failed += 1

    def figures(self) -> dict[str, float]:
        """Return the figures of the window, which ends now."""
        took = time.monotonic() - self.began
        waited = sum(self._calls) - len(self._calls) * statistics.median(self._calls)
        mine, everyone = (
            (sum(weights) for weights in zip(*self._weights, strict=True)) if self._weights else (0, 0)
        )
        return {
            "samples_a_second": SAMPLES * len(self._calls) / took,
            "still": max(waited, 0.0) / took,
            "updates": self._updates,
            "failed": self._failed,
            "part": mine / everyone if everyone else 0.0,
        }


def model_of(elements: int) -> torch.nn.Module:
    """Return a model of about so many elements, in layers of equal size, the same on every peer."""
    torch.manual_seed(0)
    layers = max(elements // (FEATURES * FEATURES), 1)
    side = FEATURES if elements >= FEATURES * FEATURES else max(int(elements**0.5), 1)
    return torch.nn.Sequential(*(torch.nn.Linear(side, side) for _ in range(layers)))


def train(line: Line, averager: blocking.Averager, setup: Mapping[str, Any]) -> None:
    """Train without end; report one window, from an update to an update."""
    seconds = line.told()["seconds"]
    model = model_of(setup["elements"])
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(setup["index"])
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    options, batch = setup["options"], setup["batch"] * setup["slowness"][setup["index"]]
    optimizer = None
    if options is not None:
        if setup["recipe"] == "diloco":
            state = RunState(model)
            optimizer = diloco(inner, averager, peers_to_start=setup["count"], state=state, **options)
        else:
            optimizer = {"noloco": noloco, "gossip": gossip}[setup["recipe"]](inner, averager, **options)
    warm_up = WARM_UP_UPDATES * (options or {}).get("fragments", 1)
    window: Window | None = None
    reported = False
    while not line.hears():
        time.sleep(batch)
        began = time.monotonic()
        before = 0 if optimizer is None else optimizer.epoch
        report = None if optimizer is None else optimizer.step(samples=SAMPLES)
        if optimizer is None:
            inner.step()
        ended = time.monotonic()
        if window is not None and not reported:
            window.note(ended - began, report, averager.peer_id)
        is_edge = optimizer is None or (optimizer.epoch != before and optimizer.epoch >= warm_up)
        if window is None and is_edge:
            window = Window()
        elif window is not None and is_edge and not reported and ended > window.began + seconds:
            line.report(**window.figures())
            reported = True


def main() -> None:
    """Run the worker."""
    torch.set_num_threads(1)
    line = Line()
    setup = line.told()
    config = p2pavg.AveragingConfig(run_id="bench", open_run=True, **setup["config"])
    with blocking.open_averager(
        config, bootstrap=setup["bootstrap"], listen=[f"/ip4/{setup['host']}/tcp/0"]
    ) as averager:
        line.report(address=averager.addresses[0])
        train(line, averager, setup)


if __name__ == "__main__":
    main()
