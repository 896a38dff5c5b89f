"""Helpers: peers that train together on virtual time, each in a loop of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

import p2pavg
from p2pavg.optim import LocalUpdates, StepReport
from p2pavg.testing import MemoryNetwork, SimulatedLoop, run_loops, simulate
from tests.integration.optim.company import Batches, config, loss_of
from tests.simulation.swarm import LAN

T = TypeVar("T")

BATCH_SECONDS = 0.1


def train_together(
    work: Callable[[SimulatedLoop], T], peers: int, how: p2pavg.AveragingConfig | None = None
) -> list[T]:
    """Run ``work(loop)`` for all peers at once; return the results."""

    async def main() -> dict[int, T]:
        return await run_loops(MemoryNetwork(latency=LAN), peers, work, config=how or config(peers))

    found = simulate(main)
    return [found[index] for index in range(peers)]


def one_step(
    loop: SimulatedLoop,
    model: torch.nn.Module,
    batches: Batches,
    optimizer: LocalUpdates,
    seconds: float = BATCH_SECONDS,
) -> StepReport:
    """Compute one batch, which takes virtual time, and give it to the optimizer."""
    loop.sleep(seconds)
    optimizer.zero_grad()
    loss = loss_of(model, batches.next())
    torch.autograd.backward(loss)
    return optimizer.step(samples=batches.size, metrics={"loss": loss.item()})


def wait_until(loop: SimulatedLoop, condition: Callable[[], bool]) -> None:
    """Let virtual time pass until a condition holds: ten minutes at most."""
    for _ in range(12_000):
        if condition():
            return
        loop.sleep(0.05)
    raise AssertionError("it never came")
