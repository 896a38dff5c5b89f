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
SETTLE_SECONDS = 0.2  # time for a member to finish its work for others after its own result


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
        """Take one step; return the gradients."""
        self._optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self._model(self._inputs), self._inputs)
        torch.autograd.backward(loss)
        self._optimizer.step()
        return self.gradients()

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the last step; zeros before the first."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self._model.parameters()]


def train(line: Line, averager: blocking.Averager, elements: int) -> None:
    """Train in windows of some seconds, with or without background rounds, on command.

    Every step trains and accumulates in both kinds. The end of a round does not fall into a window without rounds.
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
    """Run rounds without end; they wait while the training peer does not join."""
    gradients = Training(elements).gradients()
    while not line.hears():
        if averager.weight == 0:
            averager.accumulate(gradients)
        averager.step(wait=None)


def stay_aside() -> None:
    """Confine this process to the last core, if the system allows: in a run, members are on other machines."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])


def main() -> None:
    """Run the worker."""
    torch.set_num_threads(1)
    line = Line()
    setup = line.told()
    if setup["index"] > 0:
        stay_aside()
    config = p2pavg.AveragingConfig(run_id="bench", open_run=True, **setup["config"])
    listen = [f"/ip4/{setup['host']}/tcp/0"]
    with blocking.open_averager(config, bootstrap=setup["bootstrap"], listen=listen) as averager:
        line.report(address=averager.addresses[0])
        work = train if setup["index"] == 0 else average
        work(line, averager, setup["elements"])


if __name__ == "__main__":
    main()
