"""Local updates over real libp2p: a common start, and an averager that is closed while its peer waits."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.optim import SGD

import p2pavg
from p2pavg.blocking import Averager, open_averager
from p2pavg.optim import LocalUpdates, fedavg, sync_parameters
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


def one_step(model: torch.nn.Module, batches: Batches, optimizer: LocalUpdates) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model, batches.next()))
    optimizer.step(samples=batches.size)


def test_all_start_from_one_peers_parameters() -> None:
    """The parameters agree to the last bit, although the run's codec is lossy; then the peers train together."""

    def work(peer: int, averager: Averager) -> tuple[torch.Tensor, torch.Tensor]:
        model, batches = small_model(), Batches(peer, 4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + peer)
        sync_parameters(averager, model.parameters(), source=peer == 1, peers=3)
        start = vector_of(model)
        inner = SGD(model.parameters(), lr=0.05)
        optimizer = fedavg(inner, averager, sync_every=3, peers_to_start=3)
        for _ in until(optimizer, 2):
            one_step(model, batches, optimizer)
        return start, vector_of(model)

    found = train_together(work, 3, config(3, compression="blockwise8"))
    assert all(torch.equal(start, 2 * vector_of(small_model())) for start, _ in found)
    assert all(torch.equal(end, found[0][1]) for _, end in found)


def test_closing_ends_waiting_for_other_peers() -> None:
    model = small_model()
    with open_averager(config(2), listen=LISTEN) as averager:
        optimizer = fedavg(SGD(model.parameters(), lr=0.05), averager, sync_every=1, peers_to_start=2)

        def wait_in_vain() -> None:
            with pytest.raises(p2pavg.ClosedError):
                one_step(model, Batches(0, 4), optimizer)

        waiting = threading.Thread(target=wait_in_vain, daemon=True)
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive(), "the wait ended although no other peer is present"
    waiting.join(20.0)
    assert not waiting.is_alive()
