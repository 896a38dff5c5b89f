"""A peer that trains alone over real libp2p, and peers that join it while it goes on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from p2pavg.blocking import Averager
from p2pavg.optim import RunState, StepReport
from tests.integration.optim.company import WATCHDOG_SECONDS, Batches, config, loss_of, train_together
from tests.integration.optim.joiners import (
    BATCH,
    Maker,
    adamw,
    by_diloco,
    common_tensors,
    common_values,
    normalised_model,
)

ALONE = 15
"""Updates that the first peer takes by itself."""
TOGETHER = 4


@pytest.mark.long
@pytest.mark.parametrize("make", [adamw, by_diloco])
def test_peers_join_one_that_trains_alone(make: Maker) -> None:
    """Its updates have no log, so it pauses until they have its state and a batch."""
    is_far, joined = threading.Event(), threading.Barrier(3)

    def work(peer: int, averager: Averager) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        if peer:
            assert is_far.wait(WATCHDOG_SECONDS)
        model, batches = normalised_model(seed=peer), Batches(peer, BATCH)
        together: list[StepReport] = []

        def note(report: StepReport) -> None:
            if report.result is not None and len(report.result.peers) == 3:  # type: ignore[union-attr]
                together.append(report)

        optimizer = make(
            model, averager, RunState(model), {"min_peers": 1, "on_update": note, "batch_size": BATCH}
        )
        until = time.monotonic() + WATCHDOG_SECONDS
        while len(together) < TOGETHER:
            assert time.monotonic() < until, f"peer {peer} took {len(together)} updates with the others"
            time.sleep(0.02)
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, batches.next()))
            optimizer.step()
            if optimizer.epoch >= ALONE:
                is_far.set()
        joined.wait(WATCHDOG_SECONDS)
        return common_tensors(optimizer, model), common_values(optimizer)

    found = train_together(work, 3, config(2))
    for tensors, values in found:
        assert values == found[0][1]
        assert values["epoch"] >= ALONE + TOGETHER
        for name, tensor in tensors.items():
            if make is adamw or name.startswith("anchor"):
                assert torch.equal(tensor, found[0][0][name]), name
