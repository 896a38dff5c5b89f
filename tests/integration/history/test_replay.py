"""Histories of optimizers over real libp2p: a replay without the program gives the peers' parameters, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, LocalUpdates, RunState, diloco, fedadam
from p2pavg.optim.base.wrapper import PeerOptimizer
from p2pavg.tools.history.checking import check_history
from tests.integration.optim.company import Batches, config, loss_of, small_model, train_together, until

pytestmark = pytest.mark.one_worker

PEERS, UPDATES = 2, 4


def with_buffers() -> torch.nn.Module:
    model = small_model()
    assert isinstance(model, torch.nn.Sequential)
    return torch.nn.Sequential(model[0], torch.nn.BatchNorm1d(8), *list(model)[1:])


def averaged(model: torch.nn.Module, averager: Averager, state: RunState) -> AveragedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return AveragedOptimizer(inner, averager, target_batch_size=32, state=state)


def in_bfloat16() -> torch.nn.Module:
    return small_model().to(torch.bfloat16)


def local(recipe: Callable[..., LocalUpdates], **options: Any) -> Callable[..., LocalUpdates]:
    def make(model: torch.nn.Module, averager: Averager, state: RunState) -> LocalUpdates:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        return recipe(inner, averager, sync_every=4, state=state, **options)

    return make


CASES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., PeerOptimizer], str]] = {
    "buffers": (with_buffers, averaged, "blockwise8"),
    "bfloat16": (in_bfloat16, averaged, "fp32"),
    "fragments": (small_model, local(diloco, fragments=2), "blockwise8"),
    "fedadam": (small_model, local(fedadam, lr=0.01), "int4"),
    "sparse": (small_model, local(diloco), "topk:64:16"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_replay_gives_the_parameters_of_the_peers(tmp_path: Path, name: str) -> None:
    make_model, make, codec = CASES[name]

    def work(index: int, averager: Averager) -> list[torch.Tensor]:
        model, batches = make_model(), Batches(index, 8)
        optimizer = make(model, averager, RunState(model, history=tmp_path / str(index)))
        for _ in until(optimizer, UPDATES):
            optimizer.zero_grad()
            inputs, targets = (part.to(next(model.parameters()).dtype) for part in batches.next())
            torch.autograd.backward(loss_of(model, (inputs, targets)))
            optimizer.step(samples=8)
        if isinstance(optimizer, LocalUpdates):
            return optimizer.anchor
        return [*(parameter.detach() for parameter in model.parameters()), *_averaged_buffers(model)]

    found = train_together(work, PEERS, config(PEERS, compression=codec))
    for index, tensors in enumerate(found):
        report = check_history(tmp_path / str(index))
        assert (report.faults, report.holes, report.first, report.replayed) == ([], [], 0, UPDATES)
        assert report.replica is not None
        mine = [*report.replica.parameters, *report.replica.buffers.values()]
        assert len(mine) == len(tensors)
        assert all(map(torch.equal, mine, tensors))


def _averaged_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if "running" in name]
