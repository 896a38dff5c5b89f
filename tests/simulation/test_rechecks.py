"""Spot checks: honest peers pass, and one that leaves out half of its samples is met no more; on virtual time."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
import torch

from p2pavg import Success
from p2pavg.group.recheck import Recheck
from p2pavg.optim import AveragedOptimizer
from p2pavg.testing import SimulatedLoop
from p2pavg.testing.simulation import simulated_signer
from tests.integration.optim.company import loss_of, small_model
from tests.simulation.training import train_together

PEERS, SAMPLES, UPDATES = 3, 16, 8
CHEAT = 2
MOST_BATCHES = 60


@dataclass
class Seen:
    """One peer's spot checks, and the members of the rounds that ended after each number of finds."""

    rechecks: list[Recheck] = field(default_factory=list)
    met: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)


def batch_of(peer_id: str, update: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one of the batches of a peer for an update: it follows from its place."""
    generator = torch.Generator().manual_seed(hash((peer_id, update, number)) % 2**31)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    noise = torch.randn(SAMPLES, 1, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin() + noise


def gradients_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss_of(model, batch), list(model.parameters())))


def train(loop: SimulatedLoop, *, cheats: bool = False) -> Seen:
    model, seen = small_model(), Seen()

    def recompute(peer_id: str, update: int, samples: float) -> list[torch.Tensor]:
        count = round(samples / SAMPLES)
        batches = [gradients_of(model, batch_of(peer_id, update, number)) for number in range(count)]
        return [torch.stack(each).mean(0) for each in zip(*batches, strict=True)]

    # With the run's states: one honest peer may find the cheat an update before the other, which then meets the cheat
    # once more, and the first one has to follow.
    optimizer = AveragedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05),
        loop.averager,
        target_batch_size=PEERS * SAMPLES,
        recompute=recompute,
        peers_to_start=PEERS,
        sync_timeout=20.0,
    )
    place = (-1, 0)  # of the last batch: the updates before, and its number since
    for _ in range(MOST_BATCHES):
        if optimizer.epoch >= UPDATES:
            break
        loop.sleep(0.5)
        place = (optimizer.epoch, place[1] + 1 if place[0] == optimizer.epoch else 0)
        inputs, targets = batch_of(loop.averager.peer_id, *place)
        kept = SAMPLES // 2 if cheats else SAMPLES
        optimizer.zero_grad()
        gradients = gradients_of(model, (inputs[:kept], targets[:kept]))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        report = optimizer.step(samples=SAMPLES)
        if isinstance(report.result, Success):
            seen.met.append((sum(recheck.differs for recheck in seen.rechecks), report.result.peers))
        seen.rechecks += report.rechecks
    return seen


def play(*, cheat: int | None = None) -> list[Seen]:
    return train_together(
        lambda loop: train(loop, cheats=loop.index == cheat),
        PEERS,
        compression="blockwise8",
        recheck=1.0,
        match_timeout=5.0,
    )


def test_honest_peers_pass() -> None:
    rechecks = [recheck for seen in play() for recheck in seen.rechecks]
    # Each of 24 contributions is expected to be checked once: 48 draws with one half.
    assert 8 <= len(rechecks) <= 40
    assert not any(recheck.differs for recheck in rechecks)
    assert max(recheck.difference for recheck in rechecks) < 0.01


def test_a_peer_that_leaves_out_half_of_its_samples_is_met_no_more(caplog: pytest.LogCaptureFixture) -> None:
    liar = simulated_signer(CHEAT).peer_id
    with caplog.at_level(logging.WARNING):
        found = play(cheat=CHEAT)
    differing = [recheck for seen in found for recheck in seen.rechecks if recheck.differs]
    assert differing
    assert {recheck.peer_id for recheck in differing} == {liar}
    # By chance, half of a batch may have nearly the gradient of the whole one, and most have not.
    assert max(recheck.difference / recheck.allowed for recheck in differing) > 2.0
    assert f"{liar}: its contribution has the norm" in caplog.text
    # The honest peers need not find it in the same round: each bans it after its own second find. By then, a group
    # with it may have been formed.
    for seen in found[:CHEAT]:
        after = [members for finds, members in seen.met if finds > 1]
        assert after, "this peer did not go on after two finds"
        assert not any(liar in members for members in after[1:]), seen.met
