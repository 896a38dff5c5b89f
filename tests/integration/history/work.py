"""One peer of a run whose history is kept: python -m tests.integration.history.work '{"run": ..., ...}'."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import p2pavg
from p2pavg.optim import AveragedOptimizer, RunState, diloco
from p2pavg.state.checkpoint import write_checkpoint
from p2pavg.state.snapshot import Content


def model_of() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3, generator=generator)
    return model


def main(options: dict) -> None:
    torch.set_num_threads(1)
    model = model_of()
    config = p2pavg.join_run(options["run"], home=options["home"], match_timeout=10.0)
    generator = torch.Generator().manual_seed(options["seed"])
    with p2pavg.blocking.open_averager(config) as averager:
        print(averager.peer_id, flush=True)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        state = RunState(model, history=options.get("history"))
        common = {"state": state, "peers_to_start": options["peers"]}
        if options["recipe"] == "diloco":
            optimizer = diloco(inner, averager, sync_every=4, **common)
        else:
            schedule = torch.optim.lr_scheduler.OneCycleLR(inner, 0.02, 1000)
            optimizer = AveragedOptimizer(
                inner, averager, target_batch_size=64, scheduler=schedule, max_grad_norm=1.0, **common
            )
        said = -1
        while optimizer.epoch < options["updates"]:
            inputs = torch.randn(8, 16, generator=generator)
            optimizer.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean().backward()
            optimizer.step(samples=8)
            time.sleep(options["pause"])
            if optimizer.epoch != said:
                said = optimizer.epoch
                print(f"update {said}", flush=True)
        tensors = (
            optimizer.anchor if options["recipe"] == "diloco" else [p.detach() for p in model.parameters()]
        )
        names = [name for name, _ in model.named_parameters()]
        common_part = Content(
            {f"parameter/{name}": tensor for name, tensor in zip(names, tensors, strict=True)}, {}
        )
        write_checkpoint(Path(options["out"]), optimizer.epoch, common_part, Content())
        print("ended", flush=True)


main(json.loads(sys.argv[1]))
