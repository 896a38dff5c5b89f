"""Tensors on a GPU go through a whole round, and the average returns to the GPU."""

from __future__ import annotations

import pytest
import torch
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_peers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compression", [None, "bf16", "int8", "blockwise8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
async def test_a_round_of_a_gpu_and_a_cpu(
    autojump_clock: MockClock, compression: str | None, dtype: torch.dtype
) -> None:
    """One peer's tensors are on a GPU, the other's on the CPU. Both get the same average, each on its device."""
    config = p2pavg.AveragingConfig(run_id="gpu", group_size=2, match_timeout=5.0, compression=compression)
    results: dict[str, torch.Tensor] = {}

    async def average(peer: Peer, device: str) -> None:
        drawn = torch.randn(70_000, generator=torch.Generator().manual_seed(len(device)))
        async with peer.averager(config) as averager:
            averager.accumulate([drawn.to(dtype).to(device), torch.ones(3, dtype=dtype, device=device)])
            result = await averager.step(wait=None)
            assert isinstance(result, p2pavg.Success)
            assert isinstance(result.averaged, list)
            assert all(tensor.device.type == device for tensor in result.averaged)
            assert all(tensor.dtype == dtype for tensor in result.averaged)
            results[device] = torch.cat([tensor.cpu() for tensor in result.averaged])

    async with simulated_peers(MemoryNetwork(), 2) as peers, trio.open_nursery() as nursery:
        for peer, device in zip(peers, ("cuda", "cpu"), strict=True):
            nursery.start_soon(average, peer, device)
    assert torch.equal(results["cuda"], results["cpu"])
