"""Local updates beyond the plain algorithms: observers, failed rounds, codecs, saved states, a common start."""

from __future__ import annotations

import copy
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

import p2pavg
from p2pavg.blocking import Averager, open_averager
from p2pavg.optim import ErrorFeedback, LocalUpdates, StepReport, SyncError, fedavg, sync_parameters
from tests.integration.optim.company import (
    LISTEN,
    Batches,
    config,
    loss_of,
    small_model,
    train_together,
    until,
    vector_of,
)
from tests.unit.optim.samples import residual_norm

SYNC_EVERY = 3


def optimizer_of(model: torch.nn.Module, averager: Averager, peers: int, **options: Any) -> LocalUpdates:
    inner = SGD(model.parameters(), lr=0.05)
    given: dict[str, Any] = {"sync_every": SYNC_EVERY, "peers_to_start": peers}
    return fedavg(inner, averager, **(given | options))


def one_step(model: torch.nn.Module, batches: Batches, optimizer: LocalUpdates) -> StepReport:
    optimizer.zero_grad()
    loss = loss_of(model, batches.next())
    torch.autograd.backward(loss)
    return optimizer.step(samples=batches.size, metrics={"loss": loss.item()})


def wait_for_another(optimizer: LocalUpdates) -> None:
    """Wait until this peer has read another peer's progress."""
    end = time.monotonic() + 30
    while optimizer._together.run.survey().peers < 2:
        assert time.monotonic() < end
        time.sleep(0.01)


def anchor_of(optimizer: LocalUpdates) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in optimizer.anchor])


def test_some_peers_contribute_and_all_have_the_same_anchor() -> None:
    """An observer keeps its local steps for a later round."""
    peers, updates = 4, 6

    def work(peer: int, averager: Averager) -> tuple[torch.Tensor, list[p2pavg.Success], list[float]]:
        model, batches = small_model(), Batches(peer, 4)
        optimizer = optimizer_of(model, averager, peers)
        rounds, kept = [], []
        for _ in until(optimizer, updates):
            report = one_step(model, batches, optimizer)
            assert report.behind is None
            if isinstance(report.result, p2pavg.Success):
                rounds.append(report.result)
                kept.append(float((vector_of(model) - anchor_of(optimizer)).abs().max()))
        return anchor_of(optimizer), rounds, kept

    half = p2pavg.RandomFraction(0.5, seed=3)
    found = train_together(work, peers, config(peers, participation=half))
    assert all(torch.equal(anchor, found[0][0]) for anchor, _, _ in found)
    for number in range(updates):
        results = [rounds[number] for _, rounds, _ in found]
        assert all(set(result.peers) == set(results[0].peers) for result in results)
        assert (len(results[0].peers), len(results[0].observers)) == (2, 2)
    weights = [dict(result.weights) for result in found[0][1]]
    assert max(max(weight.values()) for weight in weights) > 4 * SYNC_EVERY, "samples of more than one round"
    assert any(away == 0 for _, _, kept in found for away in kept), "contributors go on from the anchor"
    assert any(away > 0 for _, _, kept in found for away in kept), "observers keep what they learned"


def test_next_round_includes_the_steps_of_a_failed_one() -> None:
    """The other peer does not come to a round. The pseudo-gradient grows, and so does its weight."""

    def work(peer: int, averager: Averager) -> None:
        model, batches = small_model(), Batches(peer, 4)
        optimizer = optimizer_of(model, averager, 1, sync_timeout=1.0)
        start = anchor_of(optimizer)
        if peer:
            one_step(model, batches, optimizer)
            ended.wait(60)
            return
        wait_for_another(optimizer)
        for round_ in (1, 2, 3):
            for _ in range(SYNC_EVERY):
                report = one_step(model, batches, optimizer)
            assert isinstance(report.result, p2pavg.NoPeers)
            assert averager.weight == 4 * SYNC_EVERY * round_
            assert isinstance(averager.accumulated, list)
            pseudo = torch.cat([tensor.reshape(-1) for tensor in averager.accumulated])
            assert torch.equal(pseudo, start - vector_of(model))
        assert torch.equal(anchor_of(optimizer), start)
        assert optimizer.epoch == 0
        ended.set()

    ended = threading.Event()
    train_together(work, 2, config(2, match_timeout=0.3))


def test_steps_during_a_late_round_count_in_the_next_one() -> None:
    """The first peer's `sync_timeout` ends before the second peer comes; it trains on and loses no step."""

    def work(peer: int, averager: Averager) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
        model, batches = small_model(), Batches(peer, 4)
        optimizer = optimizer_of(model, averager, 1, sync_timeout=0.5 if peer == 0 else 60.0)
        if peer:
            one_step(model, batches, optimizer)
            late.wait(30)
        else:
            wait_for_another(optimizer)
        anchors, away, weights = [], [], []
        for _ in until(optimizer, 2):
            report = one_step(model, batches, optimizer)
            if isinstance(report.result, p2pavg.InProgress):
                late.set()
            if isinstance(report.result, p2pavg.Success):
                anchors.append(anchor_of(optimizer))
                away.append((vector_of(model) - anchors[-1]).abs().max())
                weights.append(report.result.weights[averager.peer_id])
        return anchors, away, weights

    late = threading.Event()
    (one, away, weights), (other, nothing, _) = train_together(work, 2, config(2, match_timeout=20.0))
    assert all(map(torch.equal, one, other))
    assert weights[0] == 4 * SYNC_EVERY, "what the round began with"
    assert weights[1] > 4 * SYNC_EVERY, "and the rest with the next one"
    assert away[0] > 0, "the steps since are lost"
    assert nothing == [0, 0]


@pytest.mark.parametrize("with_feedback", [False, True])
def test_error_feedback_of_lossy_codecs(with_feedback: bool) -> None:
    def work(peer: int, averager: Averager) -> tuple[torch.Tensor, float]:
        model, batches = small_model(), Batches(peer, 4)
        feedback = ErrorFeedback("int8") if with_feedback else None
        optimizer = optimizer_of(model, averager, 2, feedback=feedback)
        for _ in until(optimizer, 4):
            one_step(model, batches, optimizer)
        return vector_of(model), 0.0 if feedback is None else residual_norm(feedback)

    (one, first), (other, second) = train_together(work, 2, config(2, compression="int8"))
    assert torch.equal(one, other)
    # So short a vector is one peer's share, and that peer averages its own contribution unencoded.
    assert (max(first, second) > 0) == with_feedback


@pytest.mark.long
@pytest.mark.parametrize("audit", ["before:1", "after"])
def test_sparse_values_are_averaged_and_the_others_kept(audit: str) -> None:
    def work(peer: int, averager: Averager) -> tuple[torch.Tensor, list[float], list[int]]:
        model, batches = small_model(), Batches(peer, 4)
        optimizer = optimizer_of(model, averager, 3)
        residuals, sent, start = [], [], anchor_of(optimizer)
        for _ in until(optimizer, 4):
            report = one_step(model, batches, optimizer)
            if isinstance(report.result, p2pavg.Success):
                assert not report.result.lost
                residuals.append(float(optimizer.state_dict()["feedback"]["residual"].norm()))
                now = anchor_of(optimizer)
                sent.append(int((now != start).sum()))
                start = now
        return vector_of(model), residuals, sent

    found = train_together(work, 3, config(3, compression="topk:64:4", audit=audit))
    for vector, residuals, sent in found:
        assert torch.equal(vector, found[0][0])
        assert min(residuals) > 0
        chunks = -(-len(vector) // 64)
        assert all(0 < each <= 8 * chunks for each in sent), "averages have twice as many values"


@pytest.mark.long
def test_saved_state_continues_identically() -> None:
    saved: list[dict[str, Any]] = [{}, {}]
    make = partial(LocalUpdates, sync_every=SYNC_EVERY, peers_to_start=2)

    def outer(tensors: list[torch.Tensor]) -> SGD:
        return SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)

    def train(peer: int, averager: Averager, *, begin: int, end: int) -> torch.Tensor:
        model, batches = small_model(), Batches(peer, 4)
        optimizer = make(SGD(model.parameters(), lr=0.05), outer, averager)
        for _ in range(begin * SYNC_EVERY):
            batches.next()
        if begin:
            state = copy.deepcopy(saved[peer])  # torch loads without copying, and these peers share a process
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for _ in until(optimizer, end):
            one_step(model, batches, optimizer)
        saved[peer] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return vector_of(model)

    train_together(partial(train, begin=0, end=2), 2)
    stopped = train_together(partial(train, begin=2, end=5), 2)
    at_once = train_together(partial(train, begin=0, end=5), 2)
    assert torch.equal(stopped[0], stopped[1])
    assert torch.equal(stopped[0], at_once[0])


def test_all_start_from_one_peers_parameters() -> None:
    """The parameters agree to the last bit, although the run's codec is lossy; then the peers train together."""

    def work(peer: int, averager: Averager) -> tuple[torch.Tensor, torch.Tensor]:
        model, batches = small_model(), Batches(peer, 4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + peer)
        sync_parameters(averager, model.parameters(), source=peer == 1, peers=3)
        start = vector_of(model)
        optimizer = optimizer_of(model, averager, 3)
        for _ in until(optimizer, 2):
            one_step(model, batches, optimizer)
        return start, vector_of(model)

    found = train_together(work, 3, config(3, compression="blockwise8"))
    assert all(torch.equal(start, 2 * vector_of(small_model())) for start, _ in found)
    assert all(torch.equal(end, found[0][1]) for _, end in found)


def test_two_sources_are_an_error() -> None:
    def work(_peer: int, averager: Averager) -> None:
        with pytest.raises(SyncError, match="2 peers claim to be the source"):
            sync_parameters(averager, small_model().parameters(), source=True, peers=2)

    train_together(work, 2)


def test_closing_ends_waiting_for_other_peers() -> None:
    model = small_model()
    with open_averager(config(2), listen=LISTEN) as averager:
        optimizer = optimizer_of(model, averager, 2, sync_every=1)
        waiting = threading.Thread(target=waits_in_vain, args=(model, optimizer), daemon=True)
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive(), "the wait ended although no other peer is present"
    waiting.join(20.0)
    assert not waiting.is_alive()


def waits_in_vain(model: torch.nn.Module, optimizer: LocalUpdates) -> None:
    with pytest.raises(p2pavg.ClosedError):
        one_step(model, Batches(0, 4), optimizer)


def test_sync_times_out_without_a_source() -> None:
    def work(peer: int, averager: Averager) -> None:
        model = small_model()
        before = vector_of(model)
        with pytest.raises(SyncError, match=r"did not arrive within 1 s"):
            sync_parameters(averager, model.parameters(), source=bool(peer), peers=3, timeout=1.0)
        assert torch.equal(vector_of(model), before)

    train_together(work, 2, config(2, match_timeout=0.4))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sync_every": 0}, "sync_every"),
        ({"proximal": -1.0}, "proximal"),
        ({"sync_timeout": "5"}, "sync_timeout"),
    ],
)
def test_arguments_that_are_out_of_range_are_named(changes: dict[str, Any], named: str) -> None:
    def work(_peer: int, averager: Averager) -> None:
        with pytest.raises(ValueError, match=named):
            optimizer_of(small_model(), averager, 2, **changes)

    train_together(work, 1)
