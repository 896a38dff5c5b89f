"""One strategy of each kind, and the function of a custom one."""

from __future__ import annotations

from typing import Any

import torch

from p2pavg import Star
from p2pavg.blocking import Averager
from p2pavg.optim import Cells, LocalUpdates, fedavg
from p2pavg.population import Choice, LogUniform
from p2pavg.strategies import Custom, DataParallel, Federated, Local, ModelParallel, PopulationBased, Strategy

FUNCTION = "tests.unit.strategies.samples:often"

STRATEGIES: tuple[Strategy, ...] = (
    Local(),
    DataParallel(
        target_batch_size=64.5, aggregation="median", topology=Star(), max_grad_norm=1.0, overlap=True
    ),
    Federated(rule="fedprox", sync_every=4, options={"mu": 0.01}, selection=0.5, seed=7),
    PopulationBased(space={"lr": LogUniform(1e-4, 1.0), "nesterov": Choice((True, False))}, interval=10),
    Custom(FUNCTION, {"sync_every": 2}),
    ModelParallel(training=Federated(rule="diloco", sync_every=4), shards=2, copies=2, tensor=2),
    DataParallel(target_batch_size=64, cells=Cells(count=4, every=10, delay=2, timeout=5.0, robust="median")),
)


def often(
    model: torch.nn.Module,
    averager: Averager,
    inner: torch.optim.Optimizer,
    *,
    sync_every: int,
    **options: Any,
) -> LocalUpdates:
    """Make the optimizer of the custom strategy."""
    return fedavg(inner, averager, sync_every=sync_every, **{"model": model, **options})
