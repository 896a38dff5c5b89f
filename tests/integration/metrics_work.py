"""The work of the processes whose metrics Prometheus scrapes: they train a tiny model together."""

from __future__ import annotations

import torch

from p2pavg.metrics import PrometheusMetrics
from p2pavg.optim import AveragedOptimizer
from p2pavg.testing.swarm import Member
from tests.integration.swarm_work import configure


def train(member: Member) -> None:
    """Train until the parent says that it is enough, and report the port of the metrics."""
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    with member.averager(configure(member)) as averager, PrometheusMetrics(averager) as metrics:
        member.report(port=metrics.serve())
        optimizer = AveragedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), averager, target_batch_size=64, peers_to_start=2
        )
        while member.told(timeout=0.05) is None:
            inputs = torch.randn(16, 8)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step(samples=16, metrics={"loss": loss.item()})
