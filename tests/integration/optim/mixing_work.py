"""The work of one process in the tests of mixing: trains until the test says that it is enough."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim import SGD

import p2pavg
from p2pavg.optim import MixedUpdates, StepReport, gossip, noloco
from p2pavg.testing import Member
from tests.integration.optim.company import loss_of, small_model, vector_of

RECIPES = {"gossip": gossip, "noloco": noloco}
BATCH = 16
BATCH_SECONDS = 0.01


def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one batch of the task, which is the same for all peers."""
    inputs = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, 0.5 * inputs.sum(1, keepdim=True)


def held_out_loss(model: torch.nn.Module) -> float:
    """Return the loss on batches that no peer trains with."""
    with torch.no_grad():
        return sum(float(loss_of(model, batch_of(-index))) for index in range(1, 17)) / 16


def train(member: Member) -> None:
    """Train until the test tells this process to end; report each outer step, and the parameters at the end."""
    torch.set_num_threads(1)
    arguments = member.arguments
    config = p2pavg.AveragingConfig(
        run_id="mixing", group_size=2, match_timeout=10.0, exchange_timeout=30.0, compression=None
    )
    model = small_model()
    with member.averager(config) as averager:
        optimizer: MixedUpdates = RECIPES[arguments["recipe"]](
            SGD(model.parameters(), lr=0.05),
            averager,
            sync_every=arguments["sync_every"],
            peers_to_start=arguments["peers"],
            partner_timeout=2.0,
        )
        member.report(held_out=held_out_loss(model))
        seed = 10**6 * (member.index + 1)
        while member.told(0.0) is None:
            time.sleep(BATCH_SECONDS * (1 + member.index * arguments.get("slower", 0)))
            seed += 1
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(seed))
            torch.autograd.backward(loss)
            report = optimizer.step(samples=BATCH, metrics={"loss": loss.item()})
            if report.updated:
                member.report(**told_of(report))
        anchor = torch.cat([tensor.reshape(-1) for tensor in optimizer.anchor])
        member.report(
            final=anchor.tolist(),
            held_out=held_out_loss(model),
            drift=float((vector_of(model) - anchor).norm()),
        )


def told_of(report: StepReport) -> dict[str, Any]:
    """Return what the test wants to know of an outer step."""
    assert isinstance(report.result, p2pavg.Success)
    return {
        "epoch": report.epoch,
        "distance": report.consensus_distance,
        "group": sorted(report.result.peers),
        "loss": report.metrics["loss"],
        "peers": report.peers,
        "drifted": report.drifted,
        "behind": report.behind,
    }
