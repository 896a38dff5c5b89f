"""Peers that would diverge are told: other recipes, rates set by hand, differing parameters, a false source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD

from p2pavg.optim import AveragedOptimizer, LocalUpdates, StepReport, fedavg
from p2pavg.testing import SimulatedLoop
from tests.integration.optim.company import Batches, loss_of, small_model, vector_of
from tests.simulation.training import train_together

BATCH = 4
BATCH_SECONDS = 0.5
MOST_BATCHES = 100
TO_BE_HEARD = 30.0
"""Seconds for which a peer stays, so that the others hear it: a peer that leaves withdraws its entries."""
COMMON: dict[str, Any] = {"peers_to_start": 2, "sync_timeout": 1.0, "check_every": 5, "state": False}
"""Options of all optimizers. With states, the peer that is behind would take the other's state, or end."""


def large_batch(model: torch.nn.Module, loop: SimulatedLoop, **options: Any) -> AveragedOptimizer:
    inner = SGD(model.parameters(), lr=options.pop("lr", 0.1))
    given = COMMON | {"target_batch_size": 2 * BATCH, "max_samples_per_peer": BATCH, "model": model}
    return AveragedOptimizer(inner, loop.averager, **(given | options))


def local(model: torch.nn.Module, loop: SimulatedLoop) -> LocalUpdates:
    inner = SGD(model.parameters(), lr=0.05)
    return fedavg(inner, loop.averager, sync_every=1, model=model, **COMMON)


def train_until(
    loop: SimulatedLoop,
    model: torch.nn.Module,
    optimizer: AveragedOptimizer | LocalUpdates,
    ready: Callable[[StepReport], bool],
    before: Callable[[], None] = lambda: None,
) -> list[StepReport]:
    """Train until a report that the test waits for, and stay to be heard; return all reports."""
    batches, reports = Batches(loop.index, BATCH), list[StepReport]()
    while not reports or not ready(reports[-1]):
        assert len(reports) < MOST_BATCHES, "it is never told"
        before()
        loop.sleep(BATCH_SECONDS)
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(model, batches.next()))
        reports.append(optimizer.step(samples=BATCH))
    loop.sleep(TO_BE_HEARD)
    return reports


def differs(report: StepReport) -> bool:
    return bool(report.differs)


def test_peers_with_different_recipes_never_average_and_get_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(loop: SimulatedLoop) -> tuple[str, ...]:
        model = small_model()
        optimizer = large_batch(model, loop, lr=(0.1, 0.01)[loop.index])
        reports = train_until(loop, model, optimizer, differs)
        assert not any(report.updated for report in reports)
        return reports[-1].differs

    first, second = train_together(train, 2)
    assert first == ("1 peer of this run trains with lr 0.01, this one with 0.1",)
    assert second == ("1 peer of this run trains with lr 0.1, this one with 0.01",)
    assert caplog.text.count(first[0]) == 1, "each sentence is logged once"


def test_rate_set_by_hand_on_one_peer_separates_it_with_a_reason() -> None:
    def train(loop: SimulatedLoop) -> tuple[int, tuple[str, ...]]:
        model = small_model()

        def by_hand(report: StepReport) -> None:  # one call of step may take two updates
            rate = 0.1 / (1 + report.epoch)
            optimizer.param_groups[0]["lr"] = 7 * rate if loop.index and report.epoch == 3 else rate

        optimizer = large_batch(model, loop, on_update=by_hand)
        reports = train_until(loop, model, optimizer, differs)
        return optimizer.epoch, reports[-1].differs

    (first, told), (second, other) = train_together(train, 2)
    assert (first, second) == (4, 4), "they average no more"
    assert told == ("1 peer of this run took update 4 with lr 0.17500000000000002, this one with lr 0.025",)
    assert other == ("1 peer of this run took update 4 with lr 0.025, this one with lr 0.17500000000000002",)


@pytest.mark.parametrize("make", [large_batch, local])
def test_drifted_parameters_are_reported_by_both_peers(
    make: Callable[[torch.nn.Module, SimulatedLoop], AveragedOptimizer | LocalUpdates],
) -> None:
    """Neither averaged gradients nor outer steps remove drift: all peers add the same values."""

    def train(loop: SimulatedLoop) -> tuple[int, str | None]:
        model, done = small_model(), list[bool]()
        optimizer = make(model, loop)

        def perturb() -> None:
            if loop.index and optimizer.epoch >= 5 and not done:
                done.append(True)
                shared = list[torch.Tensor](model.parameters())
                if isinstance(optimizer, LocalUpdates):
                    shared = list(optimizer._anchor.tensors)
                with torch.no_grad():
                    shared[1][0] += 1e-3

        reports = train_until(loop, model, optimizer, lambda report: report.drifted is not None, perturb)
        return reports[-1].epoch, reports[-1].drifted

    for epoch, drifted in train_together(train, 2):
        assert epoch >= 10, "reported before there was a difference"
        assert drifted is not None
        assert drifted.startswith("1 peer (..")
        assert drifted.endswith("than this one: 0.bias differs")


def test_batch_norms_statistics_are_the_same_on_all_peers() -> None:
    def train(loop: SimulatedLoop) -> tuple[list[torch.Tensor], torch.Tensor]:
        model = torch.nn.Sequential(small_model()[0], torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))  # type: ignore[index]
        with torch.no_grad():
            for parameter in model[2].parameters():
                parameter.fill_(0.1)
        train_until(loop, model, large_batch(model, loop), lambda report: report.epoch >= 4)
        return list(model.buffers()), vector_of(model)

    (buffers, one), (others, other) = train_together(train, 2)
    assert torch.equal(one, other)
    for mine, theirs in zip(buffers[:2], others[:2], strict=True):
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, torch.zeros(8))
