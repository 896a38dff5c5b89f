"""The work function of the processes in the test of populations."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

import p2pavg
from p2pavg.net.transport import Buffer
from p2pavg.population import LogUniform, Population, PopulationSettings
from p2pavg.state.donor.shelf import Shelf
from p2pavg.testing.swarm import Member
from tests.integration.optim.state_work import digest_of

SETTINGS = PopulationSettings(
    space={"lr": LogUniform(1e-6, 1.0)}, interval=4, quantile=0.5, resample_probability=0.0, max_lag=1000
)
CHUNKS = 6
"""Chunks of 1 MiB in a member's state, at least: it dies in the middle of them."""


def train(member: Member) -> None:
    """Take part until the test says ``last``, and report each generation.

    Arguments: ``lr`` to begin with; ``dies_at``, the number of a piece of its weights at which this member kills itself
    instead of sending it; it claims the best score that there is, so that others copy it.
    """
    torch.set_num_threads(1)
    dies_at = member.arguments.get("dies_at")
    if dies_at is not None:
        _die_while_serving(dies_at)
    torch.manual_seed(member.index)
    model = torch.nn.Linear(8, 1, bias=False)
    # Different in each member, so that half of one model and half of another are neither.
    model.register_parameter("ballast", torch.nn.Parameter(torch.randn(CHUNKS * 2**18)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wanted = torch.linspace(-1.0, 1.0, 8)

    def score() -> float:
        return float((model.weight.detach()[0] - wanted).square().mean())

    config = p2pavg.AveragingConfig(run_id="population")
    with member.averager(config) as averager:
        population = Population(
            averager, model, optimizer, SETTINGS, wait=20.0, members=4, start={"lr": member.arguments["lr"]}
        )
        while member.told(0.0) is None:
            optimizer.zero_grad()
            inputs = torch.randn(32, 8)
            torch.autograd.backward((model(inputs)[:, 0] - inputs @ wanted).square().mean())
            optimizer.step()
            before, momentum = digest_of(model), _momentum(optimizer)
            report = population.step(score if dies_at is None else -1e9)
            if report is None:
                continue
            told: dict[str, Any] = {
                "generation": report.generation,
                "score": report.score,
                "before": before,
                "momentum_before": momentum,
                "after": digest_of(model),
                "momentum_after": _momentum(optimizer),
                "copied_from": report.copied_from,
                "failures": dict(report.failures),
                "reason": report.reason,
            }
            member.report(**told)
        seen = sorted({each.peer_id for each in population.history.generations})
        member.report(seen=seen, ancestors=len(population.lineage))


def _momentum(optimizer: torch.optim.Optimizer) -> float:
    found = [state["momentum_buffer"].double().sum() for state in optimizer.state.values()]
    return float(torch.stack(found).sum())


def _die_while_serving(number: int) -> None:
    original = Shelf.piece

    def piece(self: Shelf, kind: int, blob_id: bytes, index: int) -> Buffer | None:
        if index >= number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, kind, blob_id, index)

    Shelf.piece = piece  # type: ignore[method-assign]
