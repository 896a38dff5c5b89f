"""Helpers: real peers on a simulated network, their configuration, tensors and results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import trio

import p2pavg
from p2pavg.peer.peer import Peer
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
        assert all(isinstance(result, p2pavg.Success) for result in self.results.values()), self.results
        return [result for result in self.results.values() if isinstance(result, p2pavg.Success)]


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


def check_one_result(results: Sequence[p2pavg.RoundResult], elements: int) -> None:
    """Check that all succeeded with the same peers and bits, which are the mean of those peers."""
    indices = {simulated_signer(index).peer_id: index for index in range(20)}
    first = results[0]
    assert isinstance(first, p2pavg.Success), first
    expected = mean([indices[peer_id] for peer_id in first.peers], elements)
    torch.testing.assert_close(tensors_of(first)[0], expected.float(), rtol=1e-5, atol=1e-6)
    for result in results:
        assert isinstance(result, p2pavg.Success), result
        assert result.peers == first.peers
        assert torch.equal(tensors_of(result)[0], tensors_of(first)[0])
