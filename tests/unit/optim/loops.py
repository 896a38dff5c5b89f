"""Helpers: small models, one batch of a training loop, and other peers' published recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from p2pavg.optim import AveragedOptimizer, LocalUpdates, StepReport
from p2pavg.optim.coordination.word import TOPIC
from p2pavg.runs.records.board import Entry
from tests.unit.optim.fakes import Alone, Board

Either = AveragedOptimizer | LocalUpdates
Make = Callable[..., Either]


def small(seed: int = 3) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights.uniform_(-0.5, 0.5, generator=generator)
    return model


def plain(seed: int = 3) -> nn.Module:
    model = small(seed)
    return nn.Sequential(model[0], model[2])  # type: ignore[index]


def batch(model: nn.Module, optimizer: Either, *, zero: bool = True, scale: float = 1.0) -> StepReport:
    if zero:
        optimizer.zero_grad()
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(optimizer.epoch))
    torch.autograd.backward((scale * model(inputs)).square().mean())
    return optimizer.step(samples=4)


class Talk(Board):
    """A board with the other peers' entries, which the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.others: dict[str, bytes] = {}

    @property
    def entries(self) -> Mapping[str, Entry]:
        return {peer: Entry(value, 1, 1e12) for peer, value in self.others.items()}


def with_talk() -> tuple[Alone, Talk]:
    averager, talk = Alone(), Talk()
    averager.boards[TOPIC] = talk
    return averager, talk
