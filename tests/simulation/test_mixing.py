"""Peers that average with another small group in each round, of which one crashes; on virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD

import p2pavg
from p2pavg.optim import MixedUpdates, StepReport, gossip, noloco
from p2pavg.testing import (
    After,
    Crash,
    Fault,
    FaultPlan,
    MemoryNetwork,
    Milestone,
    SimulatedLoop,
    run_loops,
    simulate,
)
from tests.integration.optim.company import loss_of, small_model
from tests.simulation.swarm import LAN

PEERS = 5
VICTIM = 4
OUTER_STEPS = 8
BATCH = 16
CONFIG = p2pavg.AveragingConfig(
    run_id="mixing", group_size=2, match_timeout=10.0, exchange_timeout=30.0, compression=None
)


def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one batch of the task, which is the same for all peers."""
    inputs = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, 0.5 * inputs.sum(1, keepdim=True)


@torch.no_grad()
def held_out_loss(model: torch.nn.Module) -> float:
    """Return the loss on batches that no peer trains with."""
    return sum(float(loss_of(model, batch_of(-index))) for index in range(1, 17)) / 16


@pytest.mark.parametrize("recipe", [gossip, noloco])
def test_peers_train_in_changing_pairs_and_one_of_them_crashes(recipe: Callable[..., MixedUpdates]) -> None:
    reports: list[StepReport] = []
    epochs = [0] * PEERS

    def train(loop: SimulatedLoop) -> tuple[torch.Tensor, float]:
        model, seed = small_model(), 10**6 * (loop.index + 1)
        optimizer = recipe(
            SGD(model.parameters(), lr=0.05),
            loop.averager,
            sync_every=5,
            peers_to_start=PEERS,
            partner_timeout=2.0,
        )
        while min(epochs[:VICTIM]) < OUTER_STEPS:
            assert optimizer.epoch < 10 * OUTER_STEPS, "another peer finds no partner"
            loop.sleep(0.2)
            seed += 1
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, batch_of(seed)))
            report = optimizer.step(samples=BATCH)
            epochs[loop.index] = optimizer.epoch
            if report.updated:
                reports.append(report)
        return torch.cat([tensor.reshape(-1) for tensor in optimizer.anchor]), held_out_loss(model)

    async def main() -> dict[int, tuple[torch.Tensor, float]]:
        crash = Fault(Crash(VICTIM), After(Milestone.FORMED, count=4))
        network = MemoryNetwork(latency=LAN)
        return await run_loops(network, PEERS, train, config=CONFIG, plan=FaultPlan([crash]))

    found = simulate(main)
    assert sorted(found) == [0, 1, 2, 3], "the victim has crashed"
    for _, loss in found.values():
        assert loss < 0.5 * held_out_loss(small_model()), "each peer has learned"
    groups = [tuple(sorted(report.result.peers)) for report in reports if report.result is not None]  # type: ignore[union-attr]
    assert {len(group) for group in groups} == {2}, "no group is larger than a pair"
    assert len(set(groups)) > PEERS - 1, "the pairs change"
    assert all(report.drifted is None and report.behind is None for report in reports)
    anchors = torch.stack([anchor for anchor, _ in found.values()])
    assert len({tuple(anchor.tolist()) for anchor in anchors}) > 1, "the anchors differ"
    norm = float(anchors.norm(dim=1).mean())
    apart = max(float((one - other).norm()) for one, other in itertools.combinations(anchors, 2))
    assert apart < 0.5 * norm, "the anchors stay near each other"
    distances = [report.consensus_distance for report in reports]
    assert all(distance is not None and 0 <= distance < 0.5 * norm for distance in distances)
