"""Each strategy trains simulated peers, and peers with different ones never meet and hear why."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import trio

from p2pavg import AveragingConfig, NoPeers
from p2pavg.base.result import NoPeersCode, RoundResult
from p2pavg.optim import AveragedOptimizer, CellOptimizer, Cells, LocalUpdates
from p2pavg.peer.peer import Peer
from p2pavg.population import LogUniform, Population
from p2pavg.strategies import (
    Custom,
    DataParallel,
    Federated,
    Local,
    PopulationBased,
    Strategy,
    read_json,
    read_toml,
)
from p2pavg.testing import MemoryNetwork, SimulatedLoop, run_loops, simulated_peers
from tests.simulation.swarm import LAN
from tests.unit.strategies.samples import FUNCTION

PEERS = 2
UPDATES = 4
STRATEGIES: list[Strategy] = [
    Local(),
    DataParallel(target_batch_size=16, topology="star"),
    DataParallel(target_batch_size=16, aggregation="median", max_grad_norm=10.0),
    DataParallel(target_batch_size=16, cells=Cells(count=2, every=3, shares=2)),
    Federated(rule="diloco", sync_every=2, rounds=UPDATES),
    Federated(rule="fedprox", sync_every=2, rounds=UPDATES, options={"mu": 0.01}, selection=0.5),
    PopulationBased(space={"lr": LogUniform(1e-3, 1e-1)}, interval=3),
    Custom(FUNCTION, {"sync_every": 2}),
]


def peers_of(strategy: Strategy) -> int:
    """Return the number of peers that train: two, or two for each cell."""
    cells = getattr(strategy, "cells", None)
    return PEERS * cells.count if isinstance(cells, Cells) else PEERS


def name_of(strategy: Strategy) -> str:
    if peers_of(strategy) > PEERS:
        return "cells"
    return getattr(strategy, "rule", getattr(strategy, "aggregation", strategy.kind))


def train(loop: SimulatedLoop, strategy: Strategy) -> tuple[float, float, torch.Tensor]:
    """Train with what a strategy makes; return the first and the last distance, and the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    generator = torch.Generator().manual_seed(loop.index)
    inner = torch.optim.SGD(model.parameters(), lr=0.02)
    optimizer = strategy.optimizer(model, loop.averager, inner, **_options(strategy))
    wanted = torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    first, steps = float((model.weight.detach() - wanted).square().mean()), 0
    while not _is_over(optimizer, steps):
        inputs = torch.randn(8, 4, generator=generator)
        loss = (model(inputs) - inputs @ wanted.T).square().mean()
        inner.zero_grad()
        torch.autograd.backward(loss)
        steps += 1
        loop.sleep(0.5)
        if isinstance(optimizer, Population):
            inner.step()
            optimizer.step(lambda: float((model.weight.detach() - wanted).square().mean()))
        elif isinstance(optimizer, AveragedOptimizer | LocalUpdates | CellOptimizer):
            optimizer.step(samples=8)
        else:
            optimizer.step()
    if isinstance(strategy, Federated):
        assert strategy.is_over(optimizer)
    shared = optimizer.anchor[0] if isinstance(optimizer, LocalUpdates) else model.weight
    return first, float((shared.detach() - wanted).square().mean()), shared.detach().clone()


def _options(strategy: Strategy) -> dict[str, Any]:
    if isinstance(strategy, PopulationBased):
        return {"wait": 10.0, "members": PEERS, "start": {"lr": 0.02}}
    return {} if isinstance(strategy, Local) else {"peers_to_start": peers_of(strategy)}


def _is_over(optimizer: Any, steps: int) -> bool:
    if isinstance(optimizer, Population):
        return optimizer.generation >= UPDATES
    if isinstance(optimizer, AveragedOptimizer | LocalUpdates | CellOptimizer):
        return optimizer.epoch >= UPDATES
    return steps >= UPDATES


@pytest.mark.parametrize("strategy", STRATEGIES, ids=name_of)
async def test_a_strategy_from_json_and_toml_trains(strategy: Strategy) -> None:
    assert read_toml(strategy.toml) == strategy
    found = strategy if isinstance(strategy, Custom) else read_json(strategy.json)
    config = found.config(AveragingConfig(run_id="lab", compression=None))
    work = partial(train, strategy=found)
    results = await run_loops(MemoryNetwork(latency=LAN), peers_of(found), work, config=config)
    assert len(results) == peers_of(found)
    for first, last, _ in results.values():
        assert last < first
    if peers_of(found) > PEERS:  # the last update was the mix of all cells
        for _, _, weight in results.values():
            assert torch.allclose(weight, results[0][2], rtol=1e-5, atol=1e-6)
    elif strategy.kind in ("data_parallel", "federated", "custom"):
        assert torch.equal(results[0][2], results[1][2]), "the same bits on both peers"


@pytest.mark.parametrize("other", [Federated(rule="fedavg", sync_every=4), None], ids=["another", "none"])
async def test_peers_with_different_strategies_never_meet_and_hear_why(other: Strategy | None) -> None:
    mine = DataParallel(target_batch_size=16)

    base = AveragingConfig(run_id="lab", match_timeout=5.0)
    results: dict[int, RoundResult] = {}

    async def look(index: int, peer: Peer) -> None:
        strategy = other if index else mine
        config = base if strategy is None else strategy.config(base)
        async with peer.averager(config) as averager:
            averager.accumulate([torch.ones(4)])
            results[index] = await averager.step(wait=None)
            await trio.sleep(10.0)

    async with simulated_peers(MemoryNetwork(latency=LAN), PEERS) as peers, trio.open_nursery() as nursery:
        for index, peer in enumerate(peers):
            nursery.start_soon(look, index, peer)
    for index, result in results.items():
        assert isinstance(result, NoPeers)
        assert result.code is NoPeersCode.OTHER_SETTINGS
        expected = "another strategy than yours"
        if other is None:
            expected = "with a strategy, and you have none" if index else "without your strategy"
        assert expected in result.reason
