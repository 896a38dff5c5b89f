"""Streaming DiLoCo of several peers, compared with a plain implementation in one process; on virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD

import p2pavg
from p2pavg.optim import LocalUpdates, RunState, diloco
from p2pavg.optim.local.local_options import Fragment, fragments_of
from p2pavg.testing import SimulatedLoop
from tests.integration.optim.company import Batches, config, loss_of, small_model, until, vector_of
from tests.simulation.test_recipes import Nesterov, load
from tests.simulation.training import one_step, train_together, wait_until

PEERS = 3
SIZES = (2, 4, 6)  # of the peers' batches
LR = 0.05


def wait_for_the_round(loop: SimulatedLoop) -> None:
    """Wait until the round that runs has a result, so that the average comes after exactly ``delay`` steps."""
    running = loop.averager._averager._round
    wait_until(loop, lambda: running is None or running.result is not None)


def places_of(model: torch.nn.Module, fragments: int) -> list[torch.Tensor]:
    """Return the places of each fragment's elements in the vector of all parameters."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    shapes = [tuple(parameter.shape) for parameter in parameters]
    starts = torch.tensor([0, *(parameter.numel() for parameter in parameters)]).cumsum(0)
    found: tuple[Fragment, ...] = fragments_of(names, shapes, fragments)
    return [
        torch.cat([torch.arange(piece.start, piece.stop) + starts[piece.position] for piece in fragment])
        for fragment in found
    ]


def reference(rounds: int, every: int, fragments: int, delay: int, alpha: float | None) -> torch.Tensor:
    """Run the algorithm in one process, in float64 between the inner steps; return the final anchor."""
    models = [small_model() for _ in range(PEERS)]
    inners = [SGD(model.parameters(), lr=LR) for model in models]
    batches = [Batches(peer, SIZES[peer]) for peer in range(PEERS)]
    places = places_of(models[0], fragments)
    outers = [Nesterov(0.7, 0.9) for _ in range(fragments)]
    anchor = vector_of(models[0]).double()
    now = [anchor.clone() for _ in range(PEERS)]
    sent: list[torch.Tensor] = []
    began, taken, step = -1, 0, 0
    while taken < rounds:
        step += 1
        for peer, (model, inner, mine) in enumerate(zip(models, inners, batches, strict=True)):
            load(model, now[peer].float())
            inner.zero_grad()
            torch.autograd.backward(loss_of(model, mine.next()))
            inner.step()
            now[peer] = vector_of(model).double()
        if began >= 0 and step == began + delay:
            place = places[taken % fragments]
            pseudo = sum((anchor - old)[place] * size for old, size in zip(sent, SIZES, strict=True))
            assert isinstance(pseudo, torch.Tensor)
            anchor = anchor.clone()
            anchor[place] = outers[taken % fragments](anchor[place], pseudo / sum(SIZES))
            for present, old in zip(now, sent, strict=True):
                if alpha is None:
                    present[place] += anchor[place] - old[place]
                else:
                    present[place] = alpha * present[place] + (1 - alpha) * anchor[place]
            taken, began = taken + 1, -1
        if step % (every // fragments) == 0:
            sent, began = [vector.clone() for vector in now], step
    return anchor


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "alpha"),
    [(4, 1, 2, None), (6, 3, 1, None), (6, 2, 2, 0.5), (4, 1, 4, 0.0)],
    ids=["overlap", "fragments", "mixed", "replaced at the boundary"],
)
def test_streaming_matches_one_process(every: int, fragments: int, delay: int, alpha: float | None) -> None:
    """All weights are equal within a round, since all peers have taken as many steps: batch sizes decide."""
    rounds = 5

    def work(loop: SimulatedLoop) -> tuple[torch.Tensor, dict[str, Any]]:
        model, batches = small_model(), Batches(loop.index, SIZES[loop.index])
        optimizer = diloco(
            SGD(model.parameters(), lr=LR),
            loop.averager,
            lr=0.7,
            sync_every=every,
            fragments=fragments,
            delay=delay,
            alpha=alpha,
            peers_to_start=PEERS,
            model=model,
        )
        for _ in until(optimizer, rounds):
            wait_for_the_round(loop)
            assert one_step(loop, model, batches, optimizer).behind is None
        return torch.cat([tensor.reshape(-1) for tensor in optimizer.anchor]), optimizer.outer.state_dict()

    expected = reference(rounds, every, fragments, delay, alpha)
    found = train_together(work, PEERS)
    assert all(torch.equal(anchor, found[0][0]) for anchor, _ in found), "peers with different anchors"
    for _, state in found:
        for number, kept in state["state"].items():
            assert torch.equal(kept["momentum_buffer"], found[0][1]["state"][number]["momentum_buffer"])
    assert (found[0][0].double() - expected).abs().max() < 1e-5
    assert (expected - vector_of(small_model()).double()).abs().max() > 1e-2, "nothing was learned"


@pytest.mark.parametrize(
    "options", [{"sync_every": 6, "fragments": 3, "delay": 1}, {"sync_every": 6, "grace": 3.0}]
)
def test_a_slow_peer_takes_part_and_a_late_one_joins(options: dict[str, Any]) -> None:
    """One of three peers needs much longer for a batch, and one begins when the others have taken some updates.

    All anchors are the same after each outer step, whoever took part in it.
    """
    enough, reached, mine = 6, [0] * PEERS, [0.0] * PEERS
    anchors: dict[int, torch.Tensor] = {}

    def check(epoch: int, optimizer: LocalUpdates) -> None:
        anchor = torch.cat([tensor.reshape(-1) for tensor in optimizer.anchor])
        assert torch.equal(anchors.setdefault(epoch, anchor), anchor), f"anchors differ at {epoch}"

    def work(loop: SimulatedLoop) -> int:
        if loop.index == 2:
            wait_until(loop, lambda: max(reached) >= 3)
        model, batches = small_model(), Batches(loop.index, SIZES[loop.index])
        optimizer = diloco(
            SGD(model.parameters(), lr=LR), loop.averager, peers_to_start=2, state=RunState(model), **options
        )
        # A peer that ends earlier takes the states with it that others lack.
        while min(reached) < enough or not all(mine):
            assert optimizer.epoch < 200, "a peer takes no part"
            report = one_step(loop, model, batches, optimizer, seconds=2.0 if loop.index == 1 else 0.2)
            reached[loop.index] = optimizer.epoch
            if report.updated:
                check(report.epoch, optimizer)
                assert isinstance(report.result, p2pavg.Success)
                mine[loop.index] += report.result.weights.get(loop.averager.peer_id, 0.0)
        loop.sleep(10.0)
        return optimizer.epoch

    assert min(train_together(work, PEERS, config(PEERS, match_timeout=3.0))) >= enough
