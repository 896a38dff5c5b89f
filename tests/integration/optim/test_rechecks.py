"""Spot checks over real libp2p: honest peers pass, and one that leaves out half of its samples is met no more."""

from __future__ import annotations

import logging
import threading
from typing import TypeAlias

import pytest
import torch

from p2pavg import Success
from p2pavg.blocking import Averager
from p2pavg.group.recheck import Recheck
from p2pavg.optim import AveragedOptimizer
from tests.integration.optim.company import config, loss_of, small_model, train_together, until

pytestmark = pytest.mark.one_worker

PEERS, SAMPLES = 3, 16
Seen: TypeAlias = "tuple[list[Recheck], list[tuple[int, tuple[str, ...]]]]"
HOW = config(PEERS, compression="blockwise8", recheck=1.0, match_timeout=5.0)


def batch_of(peer_id: str, update: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one of the batches of a peer for an update: it follows from its place."""
    generator = torch.Generator().manual_seed(hash((peer_id, update, number)) % 2**31)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    noise = torch.randn(SAMPLES, 1, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin() + noise


def gradients_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss_of(model, batch), list(model.parameters())))


def train(averager: Averager, updates: int, *, cheats: bool, stop: threading.Event) -> Seen:
    """Return the rechecks, and the members of the rounds that ended after each number of finds."""
    model = small_model()

    def recompute(peer_id: str, update: int, samples: float) -> list[torch.Tensor]:
        count = round(samples / SAMPLES)
        batches = [gradients_of(model, batch_of(peer_id, update, number)) for number in range(count)]
        return [torch.stack(each).mean(0) for each in zip(*batches, strict=True)]

    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    # With the run's states: one honest peer may find the cheat an update before the other, which then meets the cheat
    # once more, and the first one has to follow.
    optimizer = AveragedOptimizer(
        inner,
        averager,
        target_batch_size=PEERS * SAMPLES,
        recompute=recompute,
        peers_to_start=PEERS,
        sync_timeout=20.0,
    )
    found: list[Recheck] = []
    met: list[tuple[int, tuple[str, ...]]] = []
    place = (-1, 0)  # of the last batch: the updates before, and its number since
    for _ in until(optimizer, updates):
        if stop.is_set():
            break
        place = (optimizer.epoch, place[1] + 1 if place[0] == optimizer.epoch else 0)
        inputs, targets = batch_of(averager.peer_id, *place)
        kept = SAMPLES // 2 if cheats else SAMPLES
        optimizer.zero_grad()
        for parameter, gradient in zip(
            model.parameters(), gradients_of(model, (inputs[:kept], targets[:kept])), strict=True
        ):
            parameter.grad = gradient
        report = optimizer.step(samples=SAMPLES)
        if isinstance(report.result, Success):
            met.append((sum(recheck.differs for recheck in found), report.result.peers))
        found += report.rechecks
    return found, met


def test_honest_peers_pass() -> None:
    stop = threading.Event()
    found = train_together(lambda _, averager: train(averager, 8, cheats=False, stop=stop), PEERS, HOW)
    rechecks = [recheck for of_peer, _ in found for recheck in of_peer]
    # Each of 24 contributions is expected to be checked once: 48 draws with one half.
    assert 8 <= len(rechecks) <= 40
    assert not any(recheck.differs for recheck in rechecks)
    assert max(recheck.difference for recheck in rechecks) < 0.01


def test_a_peer_that_leaves_out_half_of_its_samples_is_met_no_more(caplog: pytest.LogCaptureFixture) -> None:
    stop, ids = threading.Event(), {}

    def work(index: int, averager: Averager) -> Seen:
        ids[index] = averager.peer_id
        try:
            return train(averager, 16, cheats=index == 2, stop=stop)
        finally:
            if index != 2:
                stop.set()  # the one that is alone waits for no end

    with caplog.at_level(logging.WARNING):
        found = train_together(work, PEERS, HOW)
    differing = [recheck for of_peer, _ in found for recheck in of_peer if recheck.differs]
    assert differing
    assert {recheck.peer_id for recheck in differing} == {ids[2]}
    # By chance, half of a batch may have nearly the gradient of the whole one, and most have not.
    assert max(recheck.difference / recheck.allowed for recheck in differing) > 2.0
    assert f"{ids[2]}: its contribution has the norm" in caplog.text
    # The honest peers need not find it in the same round: each bans it after its own second find. By then, a group
    # with it may have been formed.
    for _, met in found[:2]:
        after = [members for finds, members in met if finds > 1]
        assert not any(ids[2] in members for members in after[1:]), met
    assert any(finds > 1 for _, met in found[:2] for finds, _ in met), (
        "neither honest peer went on after two finds"
    )
