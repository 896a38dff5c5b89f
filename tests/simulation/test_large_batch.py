"""Large-batch training on virtual time: overlap, peers of different speeds, and one with other first parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW

import p2pavg
from p2pavg.optim import AveragedOptimizer, StepReport
from p2pavg.testing import SimulatedLoop
from tests.integration.optim.company import Batches, loss_of, small_model, vector_of
from tests.simulation.training import train_together

BATCH = 4
BATCH_SECONDS = 0.5


class Trainer:
    """One peer's loop of batches."""

    def __init__(
        self, loop: SimulatedLoop, *, size: int = BATCH, other: bool = False, **options: Any
    ) -> None:
        self.loop, self.model, self.batches = loop, small_model(), Batches(loop.index, size)
        if other:
            with torch.no_grad():
                next(self.model.parameters()).add_(1.0)
        inner = AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = AveragedOptimizer(inner, loop.averager, **options)

    def batch(self) -> StepReport:
        self.loop.sleep(BATCH_SECONDS)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss_of(self.model, self.batches.next()))
        return self.optimizer.step(samples=self.batches.size)

    def train(self, updates: int) -> torch.Tensor:
        while self.optimizer.epoch < updates and self.batch().behind is None:
            pass
        return vector_of(self.model)


def test_overlap_takes_every_update_and_stays_identical() -> None:
    """With a lossy codec too: the peers hold the same bits."""
    updates = 8

    def train(loop: SimulatedLoop) -> torch.Tensor:
        seen: list[StepReport] = []
        trainer = Trainer(
            loop,
            target_batch_size=3 * BATCH,
            max_samples_per_peer=BATCH,
            peers_to_start=3,
            overlap=True,
            on_update=seen.append,
        )
        parameters = trainer.train(updates)
        assert [report.epoch for report in seen] == list(range(1, updates + 1))
        return parameters

    first, *others = train_together(train, 3, compression="blockwise8")
    assert all(torch.equal(parameters, first) for parameters in others)


def test_without_a_limit_the_faster_peer_does_more() -> None:
    """The target alone decides when to update; each peer contributes as many samples as it can."""

    def train(loop: SimulatedLoop) -> tuple[torch.Tensor, float]:
        weights: list[float] = []

        def note(report: StepReport) -> None:
            assert isinstance(report.result, p2pavg.Success)
            assert report.result.total_weight >= 40
            weights.append(report.result.weights[loop.averager.peer_id])

        trainer = Trainer(
            loop, size=(1, 7)[loop.index], target_batch_size=40, peers_to_start=2, on_update=note
        )
        return trainer.train(3), sum(weights)

    (one, slow), (other, fast) = train_together(train, 2)
    assert torch.equal(one, other)
    assert fast > slow


def test_peer_with_other_first_parameters_is_told() -> None:
    """The two equal peers continue; the third takes no part until it loads the state of one of them."""

    def train(loop: SimulatedLoop) -> tuple[str | None, torch.Tensor]:
        trainer = Trainer(
            loop,
            other=loop.index == 2,
            target_batch_size=2 * BATCH,
            peers_to_start=2,
            sync_timeout=15.0,
            state=False,
        )
        parameters = trainer.train(3)
        report = trainer.optimizer.report
        assert report is not None
        return report.behind, parameters

    (first, one), (second, two), (third, other) = train_together(train, 3)
    assert (first, second) == (None, None)
    assert torch.equal(one, two)
    assert third is not None
    assert third.startswith("2 peers are at epoch")
    assert not torch.equal(one, other)
