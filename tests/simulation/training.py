"""Helpers: peers that train together on virtual time, each in a loop of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

import p2pavg
from p2pavg.optim import LocalUpdates, StepReport
from p2pavg.testing import FaultPlan, MemoryNetwork, SimulatedLoop, run_loops, simulate
from tests.integration.optim.company import Batches, config, loss_of
from tests.simulation.swarm import LAN

T = TypeVar("T")

BATCH_SECONDS = 0.1


def train_together(
    work: Callable[[SimulatedLoop], T],
    peers: int,
    how: p2pavg.AveragingConfig | None = None,
    *,
    plan: FaultPlan | None = None,
    **settings: object,
) -> list[T]:
    """Run ``work(loop)`` for all peers at once; return the results of those that have not crashed.

    Args:
        how: each peer's configuration.
        plan: faults of the run.
        settings: of the configuration, if there is none; it is uncompressed by default.
    """
    chosen = how or config(peers, **settings)

    async def main() -> dict[int, T]:
        return await run_loops(MemoryNetwork(latency=LAN), peers, work, config=chosen, plan=plan)

    return [found for _, found in sorted(simulate(main).items())]


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
