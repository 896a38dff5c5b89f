"""Large-batch training over real libp2p: the peers' common steps match one process with the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

import p2pavg
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, StepReport
from tests.integration.optim.company import (
    Batches,
    config,
    loss_of,
    small_model,
    train_together,
    until,
    vector_of,
)

PEERS = 4
BATCH = 4
UPDATES = 20
CLIP = 0.2


def optimizer_of(model: torch.nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2)


def schedule(optimizer: AdamW) -> StepLR:
    return StepLR(optimizer, step_size=10, gamma=0.5)


def in_one_process() -> tuple[list[float], torch.Tensor]:
    """Train in one process on the combined batches; return the loss of every update and the final parameters."""
    model = small_model()
    optimizer = optimizer_of(model)
    scheduler = schedule(optimizer)
    peers = [Batches(peer, BATCH) for peer in range(PEERS)]
    losses = []
    for _ in range(UPDATES):
        batches = [peer.next() for peer in peers]
        optimizer.zero_grad()
        loss = loss_of(model, (torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, vector_of(model)


def averaged(model: torch.nn.Module, averager: Averager, **options: Any) -> AveragedOptimizer:
    inner = optimizer_of(model)
    given: dict[str, Any] = {
        "target_batch_size": PEERS * BATCH,
        "max_samples_per_peer": BATCH,
        "peers_to_start": PEERS,
        "scheduler": schedule(inner),
        "max_grad_norm": CLIP,
    }
    return AveragedOptimizer(inner, averager, **(given | options))


def one_batch(model: torch.nn.Module, batches: Batches, optimizer: AveragedOptimizer) -> StepReport:
    optimizer.zero_grad()
    loss = loss_of(model, batches.next())
    torch.autograd.backward(loss)
    return optimizer.step(samples=batches.size, metrics={"loss": loss.item()})


@pytest.mark.parametrize("codec", [None, "blockwise8"])
def test_peers_match_one_process_with_the_whole_batch(codec: str | None) -> None:
    losses, expected = in_one_process()

    def work(peer: int, averager: Averager) -> tuple[list[StepReport], torch.Tensor]:
        model, batches = small_model(), Batches(peer, BATCH)
        optimizer = averaged(model, averager)
        reports = [one_batch(model, batches, optimizer) for _ in range(UPDATES)]
        return reports, vector_of(model)

    # An update without one of the peers would be right, and another one than that of the whole batch. A machine that
    # stops a peer for ten seconds makes one, so there is a second try.
    for _ in range(2):
        found = train_together(work, PEERS, config(PEERS, compression=codec, match_timeout=120.0))
        if all(report.peers == PEERS and report.updated for reports, _ in found for report in reports):
            break
    for reports, parameters in found:
        assert all(report.updated for report in reports), "\n".join(str(r) for r in reports if not r.updated)
        assert [report.epoch for report in reports] == list(range(1, UPDATES + 1))
        assert torch.equal(parameters, found[0][1]), "peers with different parameters"
        assert [r.metrics["loss"] for r in reports] == [r.metrics["loss"] for r in found[0][0]]
    curve = torch.tensor([report.metrics["loss"] for report in found[0][0]])
    away = (curve - torch.tensor(losses)).abs().max()
    assert away < (1e-4 if codec is None else 2e-2), f"the loss is {away} away"
    if codec is None:
        assert (found[0][1] - expected).abs().max() < 1e-4
    assert max(report.grad_norm or 0.0 for report in found[0][0]) > CLIP, "nothing was ever clipped"


def test_overlap_takes_every_update_and_stays_identical() -> None:
    updates = 12

    def work(peer: int, averager: Averager) -> tuple[int, torch.Tensor]:
        model, batches = small_model(), Batches(peer, BATCH)
        seen: list[StepReport] = []
        optimizer = averaged(model, averager, overlap=True, on_update=seen.append)
        for _ in until(optimizer, updates):
            one_batch(model, batches, optimizer)
        assert [report.epoch for report in seen] == list(range(1, updates + 1))
        return len(seen), vector_of(model)

    found = train_together(work, PEERS)
    assert all(torch.equal(parameters, found[0][1]) for _, parameters in found)


def test_without_a_limit_the_faster_peer_does_more() -> None:
    """The target alone decides when to update; each peer contributes as many samples as it can."""

    def work(peer: int, averager: Averager) -> tuple[float, torch.Tensor]:
        model, batches = small_model(), Batches(peer, (1, 7)[peer])
        weights: list[float] = []

        def note(report: StepReport) -> None:
            assert isinstance(report.result, p2pavg.Success)
            assert report.result.total_weight >= 40
            weights.append(report.result.weights[averager.peer_id])

        optimizer = averaged(
            model, averager, target_batch_size=40, max_samples_per_peer=None, peers_to_start=2, on_update=note
        )
        for _ in until(optimizer, 5):
            one_batch(model, batches, optimizer)
        return sum(weights), vector_of(model)

    (slow, one), (fast, other) = train_together(work, 2)
    assert torch.equal(one, other)
    assert fast > slow


def test_peer_alone_accumulates_and_reports_it() -> None:
    """It does not wait either: that would cost the match timeout for every batch."""

    def work(_peer: int, averager: Averager) -> list[StepReport]:
        model, batches = small_model(), Batches(0, BATCH)
        optimizer = averaged(
            model, averager, target_batch_size=2 * BATCH, max_samples_per_peer=None, peers_to_start=1
        )
        before = vector_of(model)
        reports = [one_batch(model, batches, optimizer) for _ in range(3)]
        assert torch.equal(vector_of(model), before), "parameters changed without a round"
        assert averager.weight == 3 * BATCH
        return reports

    [reports] = train_together(work, 1, config(2, match_timeout=1000.0))
    assert [report.result for report in reports] == [None] * 3
    assert [report.peers for report in reports] == [1] * 3
    assert [report.samples for report in reports] == [BATCH, 2 * BATCH, 3 * BATCH]
    assert not any(report.updated for report in reports)


def test_peer_with_other_first_parameters_is_told() -> None:
    """The two equal peers continue; the third takes no part until it loads the state of one of them."""

    def work(peer: int, averager: Averager) -> tuple[str | None, torch.Tensor]:
        model, batches = small_model(), Batches(peer, BATCH)
        if peer == 2:
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
        optimizer = averaged(
            model,
            averager,
            target_batch_size=2 * BATCH,
            peers_to_start=2,
            scheduler=None,
            sync_timeout=15.0,
            state=False,
        )
        report = one_batch(model, batches, optimizer)
        while report.epoch < 3 and report.behind is None:
            report = one_batch(model, batches, optimizer)
        return report.behind, vector_of(model)

    (first, one), (second, two), (third, other) = train_together(work, 3, config(3, match_timeout=2.0))
    assert (first, second) == (None, None)
    assert torch.equal(one, two)
    assert third is not None
    assert third.startswith("2 peers are at epoch")
    assert not torch.equal(one, other)


@pytest.mark.long
def test_saved_state_continues_identically() -> None:
    """Every peer stops after some updates and starts again from the first one's state."""
    half = 5
    saved: list[dict[str, Any]] = [{}, {}]

    def first(peer: int, averager: Averager) -> None:
        model, batches = small_model(), Batches(peer, BATCH)
        optimizer = averaged(model, averager, target_batch_size=2 * BATCH, peers_to_start=2)
        for _ in until(optimizer, half):
            one_batch(model, batches, optimizer)
        saved[peer] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def second(peer: int, averager: Averager) -> torch.Tensor:
        model, batches = small_model(), Batches(peer, BATCH)
        for _ in range(half):
            batches.next()
        optimizer = averaged(model, averager, target_batch_size=2 * BATCH, peers_to_start=2)
        averager.accumulate([torch.ones_like(p) for p in model.parameters()], weight=99.0)  # discarded
        state = copy.deepcopy(saved[0])  # torch loads without copying, and these peers share a process
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert optimizer.epoch == half
        for _ in until(optimizer, 2 * half):
            one_batch(model, batches, optimizer)
        return vector_of(model)

    def at_once(peer: int, averager: Averager) -> torch.Tensor:
        model, batches = small_model(), Batches(peer, BATCH)
        optimizer = averaged(model, averager, target_batch_size=2 * BATCH, peers_to_start=2)
        for _ in until(optimizer, 2 * half):
            one_batch(model, batches, optimizer)
        return vector_of(model)

    train_together(first, 2)
    stopped, uninterrupted = train_together(second, 2), train_together(at_once, 2)
    assert torch.equal(stopped[0], stopped[1])
    # The order in the group changes from run to run; a sum of two floats does not depend on it.
    assert torch.equal(stopped[0], uninterrupted[0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target_batch_size": 0}, "target_batch_size"),
        ({"target_batch_size": float("inf")}, "target_batch_size"),
        ({"max_samples_per_peer": -1}, "max_samples_per_peer"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
        ({"sync_timeout": 0}, "sync_timeout"),
        ({"peers_to_start": 1.5}, "peers_to_start"),
    ],
)
def test_arguments_that_are_out_of_range_are_named(changes: dict[str, Any], named: str) -> None:
    def work(_peer: int, averager: Averager) -> None:
        with pytest.raises(ValueError, match=named):
            averaged(small_model(), averager, **changes)
        with pytest.raises(ValueError, match="inner has no parameters"):
            AveragedOptimizer(SGD([torch.zeros(1)], lr=0.1), averager, target_batch_size=1)

    train_together(work, 1)
