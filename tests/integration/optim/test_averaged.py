"""Large-batch training over real libp2p: the peers' common steps match one process with the whole batch."""

from __future__ import annotations

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from p2pavg.blocking import Averager
from p2pavg.optim import AveragedOptimizer, StepReport
from tests.integration.optim.company import Batches, config, loss_of, small_model, train_together, vector_of

PEERS = 3
BATCH = 4
UPDATES = 8
CLIP = 0.2


def made(model: torch.nn.Module) -> tuple[AdamW, StepLR]:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return optimizer, StepLR(optimizer, step_size=3, gamma=0.5)


def in_one_process() -> tuple[list[float], torch.Tensor]:
    """Train in one process on the combined batches; return the loss of every update and the final parameters."""
    model = small_model()
    optimizer, scheduler = made(model)
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


def test_peers_match_one_process_with_the_whole_batch() -> None:
    losses, expected = in_one_process()

    def work(peer: int, averager: Averager) -> tuple[list[StepReport], torch.Tensor]:
        model, batches, reports = small_model(), Batches(peer, BATCH), []
        inner, scheduler = made(model)
        optimizer = AveragedOptimizer(
            inner,
            averager,
            target_batch_size=PEERS * BATCH,
            max_samples_per_peer=BATCH,
            peers_to_start=PEERS,
            scheduler=scheduler,
            max_grad_norm=CLIP,
        )
        for _ in range(UPDATES):
            optimizer.zero_grad()
            loss = loss_of(model, batches.next())
            torch.autograd.backward(loss)
            reports.append(optimizer.step(samples=BATCH, metrics={"loss": loss.item()}))
        return reports, vector_of(model)

    # An update without one of the peers would be right, and another one than that of the whole batch. A machine that
    # stops a peer for ten seconds makes one, so there is a second try.
    for _ in range(2):
        found = train_together(work, PEERS, config(PEERS, match_timeout=120.0))
        if all(report.peers == PEERS and report.updated for reports, _ in found for report in reports):
            break
    for reports, parameters in found:
        assert all(report.updated for report in reports), "\n".join(str(r) for r in reports if not r.updated)
        assert [report.epoch for report in reports] == list(range(1, UPDATES + 1))
        assert torch.equal(parameters, found[0][1]), "peers with different parameters"
        assert [r.metrics["loss"] for r in reports] == [r.metrics["loss"] for r in found[0][0]]
    curve = torch.tensor([report.metrics["loss"] for report in found[0][0]])
    assert (curve - torch.tensor(losses)).abs().max() < 1e-4
    assert (found[0][1] - expected).abs().max() < 1e-4
    assert max(report.grad_norm or 0.0 for report in found[0][0]) > CLIP, "nothing was ever clipped"
