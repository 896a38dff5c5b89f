"""One peer of a run whose history is kept: python -m tests.integration.history.work RUN HOME OPTIONS."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio
from safetensors.torch import save_file

import p2pavg
from p2pavg.optim import AveragedOptimizer, RunState


def model_of() -> torch.nn.Module:
    """Return a model with the same parameters in every process."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return model


def train(run: str, home: str | None, options: dict[str, Any]) -> None:
    """Train, and write the model at the end."""
    torch.set_num_threads(1)
    model = model_of()
    config = p2pavg.join_run(run, home=home, match_timeout=10.0)
    generator = torch.Generator().manual_seed(options["seed"])
    with p2pavg.blocking.open_averager(config) as averager:
        print("peer", averager.peer_id, "at", averager.addresses[0], flush=True)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = AveragedOptimizer(
            inner,
            averager,
            target_batch_size=64,
            scheduler=torch.optim.lr_scheduler.OneCycleLR(inner, 0.02, 1000),
            max_grad_norm=1.0,
            state=RunState(model, history=options.get("history")),
            peers_to_start=options["peers"],
        )
        said, evidence = -1, options.get("evidence")
        while optimizer.epoch < options["updates"]:
            inputs = torch.randn(8, 16, generator=generator)
            optimizer.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean().backward()
            report = optimizer.step(samples=8)
            time.sleep(0.1)
            if optimizer.epoch != said:
                said = optimizer.epoch
                peers = len(report.result.peers) if isinstance(report.result, p2pavg.Success) else 0
                print(f"update {said} of {peers} peers", flush=True)
            if evidence and Path(evidence).exists():
                # As if it had found the lie in a round: nothing of a real peer lies as easily.
                averager._call(partial(accuse, averager, Path(evidence).read_bytes()))
                evidence = None
        save_file({name: parameter.detach() for name, parameter in model.named_parameters()}, options["out"])
    print("ended", flush=True)


async def accuse(averager: p2pavg.blocking.Averager, evidence: bytes) -> None:
    """Accuse a peer, and wait until it is excluded: on a busy machine the run might be over before."""
    run = averager._averager._run
    run.accuse(evidence)
    while not run.excluded:
        await trio.sleep(0.05)


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2] or None, json.loads(sys.argv[3]))
