"""The guarantees of a round of two sites that exchange sums: kills, stops, slow members, lies, and the bytes between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.peer import Peer
from p2pavg.result import RoundResult, Success
from p2pavg.testing import (
    After,
    Crash,
    Fault,
    FaultPlan,
    MemoryNetwork,
    Milestone,
    Stop,
    run_peers,
)
from tests.simulation.liars import name
from tests.simulation.swarm import check_one_result, config, mean, tensors_of, values

SIZE = 6
ELEMENTS = 30_000
SITES = ("lab-a", "lab-b", "lab-a", "lab-b", "lab-b", "lab-a")
"""In the order of the roster."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 700)


def sited(site: str, **changes: Any) -> p2pavg.AveragingConfig:
    """Return the configuration of one peer."""
    how = {"group_size": SIZE, "topology": p2pavg.Hierarchical(site), "audit": "off", **changes}
    return config(**how)


async def play(
    network: MemoryNetwork,
    plan: FaultPlan | None = None,
    *,
    sites: tuple[str, ...] = SITES,
    elements: int = ELEMENTS,
    **changes: Any,
) -> dict[int, RoundResult]:
    """Return the results of one round of all peers that do not crash. Peers announce themselves in their order."""

    async def average(peer: Peer, index: int) -> RoundResult:
        async with peer.averager(sited(sites[index], **{"group_size": len(sites), **changes})) as averager:
            await trio.sleep(0.1 * index)
            averager.accumulate([values(index, elements)])
            return await averager.step(wait=None)

    return await run_peers(network, len(sites), average, plan=plan)


def network() -> MemoryNetwork:
    """Links on which contributions take a third of a second, and the averages about as long."""
    return MemoryNetwork(latency=(0.002, 0.006), bandwidth=5e5)


@pytest.mark.parametrize(
    "sites",
    [
        SITES,
        ("a", "a", "b"),
        ("", "a", "a", ""),
        ("a", "b", "a", "b", "c", "c", "c", ""),
        ("a", "b", "c"),
        ("a", "a", "a"),
    ],
    ids=["two of three", "two and one", "two and two alone", "many", "all alone", "one"],
)
async def test_the_result_is_the_mean_of_all_members(
    autojump_clock: MockClock, sites: tuple[str, ...]
) -> None:
    found = await play(network(), sites=sites)
    check_one_result(list(found.values()), ELEMENTS)
    for result in found.values():
        assert isinstance(result, Success)
        assert len(result.peers) == len(sites)
        proof = p2pavg.verify_certificate(result.certificate)
        assert proof.weights == result.weights
        assert result.compression_ratio == pytest.approx(1.0, rel=0.05)
