"""The work of a process whose training loop holds Python's lock for seconds."""

from __future__ import annotations

import ctypes

import torch

import p2pavg
from p2pavg.optim import AveragedOptimizer, RunState
from p2pavg.testing.swarm import Member


def train(member: Member) -> None:
    """Take updates, and hold the lock before each batch, as a tokenizer does in an extension."""
    torch.set_num_threads(1)
    libc = ctypes.PyDLL(None)  # unlike CDLL, its calls keep the lock
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    torch.manual_seed(member.index)
    config = p2pavg.AveragingConfig(run_id="holding")
    with member.averager(config) as averager:
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        peers = member.arguments["count"]
        optimizer = AveragedOptimizer(
            inner, averager, target_batch_size=2 * peers, peers_to_start=peers, state=RunState(model)
        )
        while optimizer.epoch < member.arguments["updates"]:
            libc.usleep(int(member.arguments["seconds"] * 1e6))
            optimizer.zero_grad()
            inputs = torch.randn(1, 8)
            (model(inputs) - inputs.sum()).square().mean().backward()
            report = optimizer.step(samples=1)
            if report.updated and isinstance(report.result, p2pavg.Success):
                member.report(epoch=report.epoch, peers=len(report.result.peers))
        member.report(ended=optimizer.epoch, parameters=[float(p.sum()) for p in model.parameters()])
