"""Helpers: real peers on a simulated network, their configuration, tensors and results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import trio

import p2pavg
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.peer import Peer
from p2pavg.testing import Fault, FaultPlan, MemoryNetwork, run_peers, simulated_peers
from p2pavg.testing.simulation import simulated_signer

LAN = (0.0005, 0.002)
ELEMENTS = 3_000


def config(**changes: object) -> p2pavg.AveragingConfig:
    chosen = {
        "run_id": "sim",
        "compression": None,
        "match_timeout": 10.0,
        "exchange_timeout": 20.0,
        **changes,
    }
    return p2pavg.AveragingConfig(**chosen)  # type: ignore[arg-type]


def values(index: int, elements: int = ELEMENTS) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(index))


class Swarm:
    """Real peers on a simulated network, and the results of their steps."""

    def __init__(self) -> None:
        self.results: dict[str, p2pavg.RoundResult] = {}
        self.averagers: dict[str, p2pavg.DecentralizedAverager] = {}
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}

    async def step_once(
        self,
        peer: Peer,
        index: int,
        how: p2pavg.AveragingConfig,
        *,
        weight: float = 1.0,
        after: float = 0.0,
        tensors: Sequence[torch.Tensor] | None = None,
        done: trio.Event | None = None,
    ) -> None:
        await trio.sleep(after)
        async with peer.averager(how) as averager:
            self.averagers[peer.id] = averager
            averager.accumulate(tensors if tensors is not None else [values(index)], weight=weight)
            self.began[peer.id] = trio.current_time()
            self.results[peer.id] = await averager.step(wait=None)
            self.ended[peer.id] = trio.current_time()
            if done is not None:
                await done.wait()

    def successes(self) -> list[p2pavg.Success]:
        return successes(self.results)


async def step_each(
    peers: Sequence[Peer],
    how: p2pavg.AveragingConfig | Sequence[p2pavg.AveragingConfig],
    after: Sequence[float] = (),
    *,
    tensors: Callable[[int], Sequence[torch.Tensor]] = lambda index: [values(index)],
) -> Swarm:
    """Run one step of each peer. No peer leaves before the steps of all have ended.

    Args:
        how: the configuration of all, or of each.
        after: seconds after which each one announces itself; at once if empty.
        tensors: returns a peer's contribution.
    """
    swarm, done = Swarm(), trio.Event()
    hows = [how] * len(peers) if isinstance(how, p2pavg.AveragingConfig) else how
    async with trio.open_nursery() as nursery:
        for index, (peer, own) in enumerate(zip(peers, hows, strict=True)):
            step = partial(swarm.step_once, peer, index, own, tensors=tensors(index), done=done)
            nursery.start_soon(partial(step, after=after[index] if after else 0.0))
        while len(swarm.results) < len(peers):
            await trio.sleep(0.1)
        done.set()
    return swarm


async def play_rounds(
    hows: Sequence[p2pavg.AveragingConfig],
    network: MemoryNetwork | None = None,
    faults: Sequence[Fault] = (),
    *,
    rounds: int = 1,
    elements: int = ELEMENTS,
    weights: Sequence[float] = (),
    observers: Collection[int] = (),
    apart: float = 0.1,
    pause: float = 0.0,
) -> dict[int, list[p2pavg.RoundResult]]:
    """Return the results of rounds of peers with these configurations, without those of peers that crash.

    Each peer is checked: it keeps its first contribution, unless that was used, or may have been.

    Args:
        weights: of the peers' contributions, 1 each if empty. A peer of weight 0 has only declared its vector.
        observers: positions of the peers that only observe.
        apart: seconds from one peer's announcement to that of the next one.
        pause: seconds after each round.
    """

    async def average(peer: Peer, index: int) -> list[p2pavg.RoundResult]:
        weight = weights[index] if weights else 1.0
        results: list[p2pavg.RoundResult] = []
        async with peer.averager(hows[index]) as averager:
            averager.declare([torch.empty(elements)])
            for _ in range(rounds):
                await trio.sleep(apart * index)
                averager.clear()
                if weight:
                    averager.accumulate([values(index, elements)], weight=weight)
                result = await averager.step(wait=None, observe=index in observers)
                contributed = isinstance(result, p2pavg.Success) and index not in observers
                used = contributed or getattr(result, "contribution_used", False)
                # What is withheld until the peer knows may be back in a later round.
                if used is not None and not results:
                    kept = averager.accumulated
                    assert averager.weight == (0.0 if used else weight)
                    assert (kept is None) == (used or not weight)
                    assert kept is None or torch.equal(kept[0], values(index, elements))  # type: ignore[index]
                results.append(result)
                await trio.sleep(pause)
        return results

    network = network or MemoryNetwork(latency=LAN)
    return await run_peers(network, len(hows), average, plan=FaultPlan(faults))


async def play_round(
    hows: Sequence[p2pavg.AveragingConfig],
    network: MemoryNetwork | None = None,
    faults: Sequence[Fault] = (),
    **changes: Any,
) -> dict[int, p2pavg.RoundResult]:
    """Return the result of one round of each peer; see :func:`play_rounds`."""
    found = await play_rounds(hows, network, faults, **changes)
    return {index: results[0] for index, results in found.items()}


def successes(found: Mapping[Any, p2pavg.RoundResult]) -> list[p2pavg.Success]:
    """Check that all peers succeeded; return their results."""
    assert all(isinstance(result, p2pavg.Success) for result in found.values()), found
    return [result for result in found.values() if isinstance(result, p2pavg.Success)]


def ids(*indices: int) -> set[str]:
    """Return the ids of peers."""
    return {simulated_signer(index).peer_id for index in indices}


async def step_all(
    count: int,
    how: p2pavg.AveragingConfig,
    tensor: Callable[[int], torch.Tensor] = values,
    *,
    network: MemoryNetwork | None = None,
    helpers: int = 0,
) -> Swarm:
    """Run one step of some peers, which announce themselves in the order of their indices.

    Args:
        tensor: returns a peer's contribution.
        helpers: auxiliaries beside them.
    """
    swarm, network = Swarm(), network or MemoryNetwork(latency=LAN)
    async with simulated_peers(network, count + helpers) as peers, trio.open_nursery() as beside:
        for helper in peers[count:]:
            beside.start_soon(assist, helper, how.run_id)
        async with trio.open_nursery() as nursery:
            for index, peer in enumerate(peers[:count]):
                # With a helper, the first come early: it can read their entries when the last is ready.
                after = 0.1 * index + (8.0 if helpers and index == count - 1 else 0.0)
                step = partial(swarm.step_once, peer, index, how, after=after, tensors=[tensor(index)])
                nursery.start_soon(step)
        beside.cancel_scope.cancel()
    return swarm


def tensors_of(result: p2pavg.RoundResult) -> list[torch.Tensor]:
    assert isinstance(result, p2pavg.Success), result
    assert isinstance(result.averaged, list)
    return result.averaged


def same_bits(results: Sequence[p2pavg.Success]) -> bool:
    return all(
        torch.equal(one, other)
        for result in results
        for one, other in zip(tensors_of(results[0]), tensors_of(result), strict=True)
    )


def mean(indices: Iterable[int], elements: int, weights: Sequence[float] | None = None) -> torch.Tensor:
    """Return the exact weighted mean in float64."""
    drawn = torch.stack([values(index, elements).double() for index in indices])
    factors = torch.tensor(weights or [1.0] * len(drawn), dtype=torch.float64)
    return (factors[:, None] * drawn).sum(0) / factors.sum()


def check_one_result(found: Iterable[p2pavg.RoundResult], elements: int) -> list[p2pavg.Success]:
    """Return the results; check that all have the same peers, and the same bits, which are the mean of those peers."""
    results = successes(dict(enumerate(found)))
    indices = {simulated_signer(index).peer_id: index for index in range(20)}
    first = results[0]
    expected = mean([indices[peer_id] for peer_id in first.peers], elements)
    torch.testing.assert_close(tensors_of(first)[0], expected.float(), rtol=1e-5, atol=1e-6)
    assert same_bits(results)
    assert all(result.peers == first.peers for result in results)
    return results
