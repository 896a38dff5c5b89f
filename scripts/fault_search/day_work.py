"""A member that trains during the operator's day: ``python -m scripts.fault_search.day_work NAME PORT``.

It runs in the folder of the day, and prints one JSON object a line: ``began`` and each ``update`` with the digest of
the parameters, and ``ended``. It trains until the file ``NAME.last`` names an update, and ends after that one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import p2pavg
from p2pavg.optim import AveragedOptimizer, RunState, StepReport
from p2pavg.optim.base.state import digest_of

BATCH = 16
INPUTS = 8
ELEMENTS = 20_000
BATCH_SECONDS = 0.25  # of computing, so that updates come at the pace of people who watch


def say(**what: object) -> None:
    """Print a line, at once."""
    print(json.dumps(what), flush=True)


def main() -> None:
    """See the top of this file."""
    name, port = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(INPUTS, 1)
    model.register_parameter("ballast", torch.nn.Parameter(torch.randn(ELEMENTS)))
    config = p2pavg.AveragingConfig.from_run("lab.run", certificate=f"{name}.cert")
    state = RunState(model, f"{name}-state", every=1, keep=3)

    def updated(report: StepReport) -> None:
        say(update=report.epoch, digest=digest_of(model.parameters()).hex(), loss=report.metrics.get("loss"))

    with p2pavg.blocking.open_averager(
        config,
        listen=[f"/ip4/127.0.0.1/tcp/{port}"],
        bootstrap=p2pavg.read_run_file("lab.run").bootstrap,
        identity=f"{name}.key",
        port_mapping=False,
    ) as averager:
        optimizer = AveragedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
            averager,
            target_batch_size=2 * BATCH,
            peers_to_start=2,
            on_update=updated,
            state=state,
        )
        say(began=optimizer.epoch, digest=digest_of(model.parameters()).hex())
        while optimizer.epoch < last_of(name):
            inputs = torch.randn(BATCH, INPUTS)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            torch.autograd.backward(loss)
            time.sleep(BATCH_SECONDS)
            optimizer.step(samples=BATCH, metrics={"loss": loss.item()})
        say(ended=optimizer.epoch, digest=digest_of(model.parameters()).hex())


def last_of(name: str) -> int:
    """Return the update after which this member ends."""
    file = Path(f"{name}.last")
    text = file.read_text() if file.exists() else ""
    return int(text) if text else sys.maxsize


if __name__ == "__main__":
    main()
