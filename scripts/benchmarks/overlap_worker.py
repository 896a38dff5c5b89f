"""A process that trains and averages in the background, or one that only averages."""

from __future__ import annotations

import os
import time

import torch

import p2pavg
from p2pavg import blocking
from scripts.benchmarks.worker import Line

FEATURES = 1024
BATCH = 48
SETTLE_SECONDS = 0.2  # what a member still has to do for others when it has its own result


class Training:
    """Steps of a two-layer model, always the same work: its gradient has about ``elements`` elements."""

    def __init__(self, elements: int) -> None:
        torch.manual_seed(0)
        hidden = max(elements // (2 * FEATURES), 1)
        self._model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, hidden, bias=False),
            torch.nn.ReLU(),
            torch.nn.Linear(hidden, FEATURES, bias=False),
        )
        self._inputs = torch.randn(BATCH, FEATURES)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)

    def step(self) -> list[torch.Tensor]:
        """One step. Returns the gradients."""
        self._optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self._model(self._inputs), self._inputs)
        torch.autograd.backward(loss)
        self._optimizer.step()
        return self.gradients()

    def gradients(self) -> list[torch.Tensor]:
        """Of the last step; zeros before the first."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self._model.parameters()]


def train(line: Line, averager: blocking.Averager, elements: int) -> None:
    """Windows of so many seconds, with rounds in the background or without, as one is told.

    A step trains and accumulates in both. What a round's last moments cost is no part of a window without.
    """
    training = Training(elements)
    training.step()
    while True:
        told = line.told()
        steps, rounds, failed = 0, 0, 0
        began = time.monotonic()
        while time.monotonic() - began < told["seconds"]:
            averager.accumulate(training.step())
            if told["rounds"]:
                result = averager.step(wait=0)
                rounds += isinstance(result, p2pavg.Success)
                failed += not isinstance(result, p2pavg.Success | p2pavg.InProgress)
            steps += 1
        took = time.monotonic() - began
        while told["rounds"] and isinstance(averager.step(wait=None), p2pavg.InProgress):
            pass
        time.sleep(SETTLE_SECONDS)
        line.report(steps_a_second=steps / took, rounds=rounds, failed=failed)


def average(line: Line, averager: blocking.Averager, elements: int) -> None:
    """Rounds without end; they wait when the one that trains does not come."""
    gradients = Training(elements).gradients()
    while not line.hears():
        if averager.weight == 0:
            averager.accumulate(gradients)
        averager.step(wait=None)


def stay_aside() -> None:
    """On the last of the cores, where the system can be told: members of a run are on other machines."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])


def main() -> None:
    """See the top of this file."""
    torch.set_num_threads(1)
    line = Line()
    setup = line.told()
    if setup["index"] > 0:
        stay_aside()
    config = p2pavg.AveragingConfig(run_id="bench", **setup["config"])
    with blocking.open_averager(
        config, bootstrap=setup["bootstrap"], listen=[f"/ip4/{setup['host']}/tcp/0"]
    ) as averager:
        line.report(address=averager.addresses[0])
        work = train if setup["index"] == 0 else average
        work(line, averager, setup["elements"])


if __name__ == "__main__":
    main()
