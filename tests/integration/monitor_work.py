"""The work function of the processes whose run the monitor's tests look at."""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

import p2pavg
from p2pavg.optim import AveragedOptimizer, RunState
from p2pavg.testing.swarm import Member
from p2pavg.tools.monitor.serving import serve_monitor

NAMES = ("garage", "lab-3090", "office", "attic", "cloud-1", "cloud-2", "laptop", "late")


def train(member: Member) -> None:
    """Fit a line together with the others until the test says so."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    generator = torch.Generator().manual_seed(member.index)
    config = p2pavg.AveragingConfig(
        run_id="monitored",
        group_size=8,
        match_timeout=5.0,
        exchange_timeout=15.0,
        name=NAMES[member.index % len(NAMES)],
    )
    with member.averager(config) as averager, ExitStack() as stack:
        if member.arguments.get("monitor"):
            member.report(monitor=stack.enter_context(serve_monitor(averager)))
        optimizer = AveragedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            averager,
            target_batch_size=32.0 * member.arguments.get("peers", 4),
            peers_to_start=member.arguments.get("peers", 4),
            max_samples_per_peer=32.0,
            state=RunState(model),
        )
        while member.told(0.05) is None:
            inputs = torch.randn(16, 64, generator=generator)
            loss = (model(inputs) - inputs.sum(1, keepdim=True) / 8).square().mean()
            optimizer.zero_grad()
            loss.backward()
            report = optimizer.step(samples=16, metrics={"loss": loss.item()})
            if report.updated:
                member.report(epoch=report.epoch, loss=report.metrics["loss"])
            time.sleep(member.arguments.get("pause", 0.3))
