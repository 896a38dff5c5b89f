"""Peers that would diverge are told: other recipes, rates set by hand, differing parameters, a false source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD

import p2pavg
from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, LocalUpdates, StepReport, SyncError, sync_parameters
from p2pavg.optim import fedavg as make_fedavg
from p2pavg.optim.base.state import digest_of
from p2pavg.optim.large_batch import sync as sync_module
from tests.integration.optim.company import Batches, config, loss_of, small_model, train_together, vector_of

BATCH = 4
ENOUGH_SECONDS = 60.0  # for a busy machine; usually a second suffices


def large_batch(
    model: torch.nn.Module,
    averager: Averager,
    on_update: Callable[[StepReport], None] | None = None,
    **options: Any,
) -> AveragedOptimizer:
    rate = options.pop("lr", 0.1)
    return AveragedOptimizer(
        SGD(model.parameters(), lr=rate),
        averager,
        target_batch_size=options.pop("target_batch_size", 2 * BATCH),
        max_samples_per_peer=BATCH,
        max_grad_norm=options.pop("max_grad_norm", None),
        peers_to_start=2,
        sync_timeout=1.0,
        check_every=5,
        model=model,
        on_update=on_update,
        state=False,  # otherwise the peer that is behind takes the other's state, or ends
    )


def one_batch(
    model: torch.nn.Module, batches: Batches, optimizer: AveragedOptimizer | LocalUpdates
) -> StepReport:
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model, batches.next()))
    return optimizer.step(samples=batches.size)


def train_until(
    model: torch.nn.Module,
    batches: Batches,
    optimizer: AveragedOptimizer | LocalUpdates,
    ready: Callable[[StepReport], bool],
    before: Callable[[], None] = lambda: None,
) -> list[StepReport]:
    """Train until a report that the test waits for; return all reports."""
    reports: list[StepReport] = []
    end = time.monotonic() + ENOUGH_SECONDS
    while not reports or not ready(reports[-1]):
        assert time.monotonic() < end, "it is never told"
        before()
        reports.append(one_batch(model, batches, optimizer))
    return reports


@pytest.mark.parametrize(
    ("name", "mine", "others"),
    [("lr", 0.1, 0.01), ("max_grad_norm", 1.0, 0.5), ("target_batch_size", 8, 4096)],
)
def test_peers_with_different_recipes_never_average_and_get_the_reason(
    name: str, mine: float, others: float, caplog: pytest.LogCaptureFixture
) -> None:
    heard = threading.Barrier(2, timeout=ENOUGH_SECONDS)

    def work(peer: int, averager: Averager) -> tuple[str, ...]:
        model, batches = small_model(), Batches(peer, BATCH)
        changes: dict[str, Any] = {name: (mine, others)[peer]}
        optimizer = large_batch(model, averager, **changes)
        reports = train_until(model, batches, optimizer, lambda report: bool(report.differs))
        assert not any(report.updated for report in reports)
        heard.wait()  # a peer that leaves withdraws its entries
        return reports[-1].differs

    first, second = train_together(work, 2)
    assert first == (f"1 peer of this run trains with {name} {others:g}, this one with {mine:g}",)
    assert second == (f"1 peer of this run trains with {name} {mine:g}, this one with {others:g}",)
    assert caplog.text.count(first[0]) == 1, "each sentence is logged once"


def test_rate_set_by_hand_on_one_peer_separates_it_with_a_reason() -> None:
    heard = threading.Barrier(2, timeout=ENOUGH_SECONDS)

    def work(peer: int, averager: Averager) -> tuple[int, tuple[str, ...]]:
        model, batches = small_model(), Batches(peer, BATCH)

        def by_hand(report: StepReport) -> None:  # one call of step may take two updates
            rate = 0.1 / (1 + report.epoch)
            optimizer.param_groups[0]["lr"] = 7 * rate if peer and report.epoch == 3 else rate

        optimizer = large_batch(model, averager, by_hand)
        reports = train_until(model, batches, optimizer, lambda report: bool(report.differs))
        heard.wait()
        return optimizer.epoch, reports[-1].differs

    (first, told), (second, other) = train_together(work, 2)
    assert (first, second) == (4, 4), "they average no more"
    assert told == ("1 peer of this run took update 4 with lr 0.17500000000000002, this one with lr 0.025",)
    assert other == ("1 peer of this run took update 4 with lr 0.025, this one with lr 0.17500000000000002",)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["large batch", "local updates"])
def test_drifted_parameters_are_reported_by_both_peers(kind: str) -> None:
    """Neither averaged gradients nor outer steps remove drift: all peers add the same values."""
    heard = threading.Barrier(2, timeout=ENOUGH_SECONDS)

    def work(peer: int, averager: Averager) -> tuple[list[int], str | None]:
        model, batches = small_model(), Batches(peer, BATCH)
        optimizer: AveragedOptimizer | LocalUpdates
        if kind == "large batch":
            optimizer = large_batch(model, averager)
        else:
            inner = SGD(model.parameters(), lr=0.05)
            optimizer = make_fedavg(
                inner,
                averager,
                sync_every=1,
                peers_to_start=2,
                sync_timeout=5.0,
                check_every=5,
                model=model,
                state=False,
            )
        done: list[bool] = []

        def perturb() -> None:
            if peer and optimizer.epoch >= 5 and not done:
                done.append(True)
                tensors = list(model.parameters()) if kind == "large batch" else optimizer._anchor.tensors  # type: ignore[union-attr]
                with torch.no_grad():
                    tensors[1][0] += 1e-3

        reports = train_until(model, batches, optimizer, lambda report: report.drifted is not None, perturb)
        heard.wait()
        return [report.epoch for report in reports], reports[-1].drifted

    for epochs, drifted in train_together(work, 2):
        assert epochs[-1] >= 10, "reported before there was a difference"
        assert drifted is not None
        assert drifted.startswith("1 peer (..")
        assert drifted.endswith("than this one: 0.bias differs")


def test_batch_norms_statistics_are_the_same_on_all_peers() -> None:
    def work(peer: int, averager: Averager) -> tuple[list[torch.Tensor], torch.Tensor]:
        model = torch.nn.Sequential(small_model()[0], torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))  # type: ignore[index]
        with torch.no_grad():
            for parameter in model[2].parameters():
                parameter.fill_(0.1)
        batches = Batches(peer, BATCH)
        optimizer = large_batch(model, averager)
        train_until(model, batches, optimizer, lambda report: report.epoch >= 6)
        return [buffer.clone() for buffer in model.buffers()], vector_of(model)

    (buffers, one), (others, other) = train_together(work, 2)
    assert torch.equal(one, other)
    for mine, theirs in zip(buffers[:2], others[:2], strict=True):
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, torch.zeros(8))


def test_stranger_that_claims_to_be_the_source_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """The stranger joins first, with other parameters; the observer waits for the named source."""
    fooled = threading.Event()
    ids: list[str] = ["", "", ""]
    known = threading.Barrier(3, timeout=ENOUGH_SECONDS)

    def work(peer: int, averager: Averager) -> torch.Tensor:
        model = small_model()
        ids[peer] = averager.peer_id
        known.wait()
        if peer == 2:
            stranger = replace(averager.config, run_id=averager.config.run_id + sync_module.RUN_SUFFIX)
            stranger = replace(stranger, compression=None, group_size=2, min_group_size=2)
            with averager.sibling(stranger) as sibling:
                result = None
                while not isinstance(result, p2pavg.Success):
                    sibling.clear()
                    sibling.accumulate([99 * parameter.detach() for parameter in model.parameters()])
                    result = sibling.step(wait=None)
            fooled.set()
            return torch.empty(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 - peer)
        if peer == 0:
            assert fooled.wait(ENOUGH_SECONDS)
        sync_parameters(
            averager, model.parameters(), source=peer == 0, peers=2, source_id=ids[0], timeout=ENOUGH_SECONDS
        )
        return vector_of(model)

    source, observer, _ = train_together(work, 3, config(3, match_timeout=2.0))
    assert torch.equal(source, 3 * vector_of(small_model()))
    assert torch.equal(observer, source)
    assert f"not the named source: {ids[2]}" in caplog.text


def test_no_peer_accepts_tensors_that_another_did_not_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    lying: set[threading.Thread] = set()

    def digest(tensors: list[torch.Tensor]) -> bytes:
        return b"x" * 32 if threading.current_thread() in lying else digest_of(tensors)

    monkeypatch.setattr(sync_module, "digest_of", digest)

    def work(peer: int, averager: Averager) -> None:
        model = small_model()
        if peer == 2:
            lying.add(threading.current_thread())
        before = vector_of(model)
        with pytest.raises(SyncError, match="received other parameters than this one"):
            sync_parameters(averager, model.parameters(), source=not peer, peers=3, timeout=ENOUGH_SECONDS)
        assert torch.equal(vector_of(model), before)

    train_together(work, 3)
