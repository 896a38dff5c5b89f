"""Peers that would diverge are told: other recipes, rates set by hand, differing parameters, a false source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD

import p2pavg
from p2pavg.optim import AveragedOptimizer, LocalUpdates, StepReport, SyncError, fedavg, sync_parameters
from p2pavg.optim.base.state import digest_of
from p2pavg.optim.large_batch import sync as sync_module
from p2pavg.testing import SimulatedLoop
from p2pavg.testing.simulation import simulated_signer
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


@pytest.mark.parametrize(
    ("name", "mine", "others"),
    [("lr", 0.1, 0.01), ("max_grad_norm", 1.0, 0.5), ("target_batch_size", 8, 4096)],
)
def test_peers_with_different_recipes_never_average_and_get_the_reason(
    name: str, mine: float, others: float, caplog: pytest.LogCaptureFixture
) -> None:
    def train(loop: SimulatedLoop) -> tuple[str, ...]:
        model = small_model()
        optimizer = large_batch(model, loop, **{name: (mine, others)[loop.index]})
        reports = train_until(loop, model, optimizer, differs)
        assert not any(report.updated for report in reports)
        return reports[-1].differs

    first, second = train_together(train, 2)
    assert first == (f"1 peer of this run trains with {name} {others:g}, this one with {mine:g}",)
    assert second == (f"1 peer of this run trains with {name} {mine:g}, this one with {others:g}",)
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


def test_stranger_that_claims_to_be_the_source_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """The stranger joins first, with other parameters; the observer waits for the named source."""
    source_id, stranger_id = (simulated_signer(index).peer_id for index in (0, 2))
    fooled: list[bool] = []

    def train(loop: SimulatedLoop) -> torch.Tensor:
        model, averager = small_model(), loop.averager
        if loop.index == 2:
            config = replace(
                averager.config,
                run_id=averager.config.run_id + sync_module.RUN_SUFFIX,
                group_size=2,
                min_group_size=2,
            )
            with averager.sibling(config) as sibling:
                result: p2pavg.RoundResult | None = None
                while not isinstance(result, p2pavg.Success):
                    sibling.clear()
                    sibling.accumulate([99 * parameter.detach() for parameter in model.parameters()])
                    result = sibling.step(wait=None)
            fooled.append(True)
            return torch.empty(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 - loop.index)
        while loop.index == 0 and not fooled:
            loop.sleep(1.0)
        sync_parameters(
            averager, model.parameters(), source=loop.index == 0, peers=2, source_id=source_id, timeout=60.0
        )
        return vector_of(model)  # at once: a peer that has ended has said what it received

    source, observer, _ = train_together(train, 3, match_timeout=2.0)
    assert torch.equal(source, 3 * vector_of(small_model()))
    assert torch.equal(observer, source)
    assert f"not the named source: {stranger_id}" in caplog.text


def test_no_peer_accepts_tensors_that_another_did_not_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    lies = iter([False, False, True])
    monkeypatch.setattr(
        sync_module, "digest_of", lambda tensors: b"x" * 32 if next(lies) else digest_of(tensors)
    )

    def train(loop: SimulatedLoop) -> None:
        model = small_model()
        before = vector_of(model)
        with pytest.raises(SyncError, match="received other parameters than this one"):
            sync_parameters(loop.averager, model.parameters(), source=not loop.index, peers=3, timeout=60.0)
        assert torch.equal(vector_of(model), before)
        loop.sleep(TO_BE_HEARD)

    train_together(train, 3)
