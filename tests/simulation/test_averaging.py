"""Results of rounds of real peers on a simulated network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import trio

import p2pavg
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_peer, simulated_peers
from p2pavg.testing.simulation import simulated_signer
from p2pavg_compression import Blockwise8
from tests.simulation.swarm import (
    ELEMENTS,
    LAN,
    Swarm,
    config,
    ids,
    mean,
    play_round,
    same_bits,
    step_each,
    successes,
    tensors_of,
    values,
)


@pytest.mark.parametrize(("count", "compression"), [(2, None), (8, None), (3, "blockwise8")])
async def test_a_group_ends_with_the_weighted_mean_and_one_result(
    count: int, compression: str | None
) -> None:
    weights = [1.0 + index if index else 1000.0 for index in range(count)]
    how = config(group_size=count, compression=compression)
    results = successes(await play_round([how] * count, weights=weights, apart=0.0))
    exact = mean(range(count), ELEMENTS, weights)
    [averaged] = tensors_of(results[0])
    assert same_bits(results)
    error = float((averaged.double() - exact).norm() / exact.norm())
    assert error < (1e-6 if compression is None else 0.015)
    for result in results:
        assert set(result.peers) == ids(*range(count))
        assert result.total_weight == sum(weights)
        assert result.weights == {simulated_signer(i).peer_id: weights[i] for i in range(count)}
        assert result.metrics == {}


async def together(tensors: Sequence[Sequence[torch.Tensor]], **changes: object) -> Swarm:
    """Let peers that have these tensors take one step at once."""
    how = config(**{"group_size": len(tensors), **changes})
    async with simulated_peers(MemoryNetwork(latency=LAN), len(tensors)) as peers:
        return await step_each(peers, how, tensors=tensors.__getitem__)


@pytest.mark.parametrize("elements", [0, 3, 65])
async def test_a_vector_smaller_than_the_group(elements: int) -> None:
    tensors = [[torch.full((elements,), float(index))] for index in range(5)]
    for result in (await together(tensors, compression="blockwise8")).successes():
        torch.testing.assert_close(tensors_of(result)[0], torch.full((elements,), 2.0), rtol=0.02, atol=0.0)


async def test_shapes_and_dtypes_of_tensors_are_kept() -> None:
    one, two = (
        [
            torch.full((3, 2), fill),
            torch.tensor(fill, dtype=torch.bfloat16),
            torch.empty(0, 7),
            torch.full((4, 3), fill, dtype=torch.float16).t(),
        ]
        for fill in (1.0, 2.0)
    )
    for result in (await together([one, two])).successes():
        for averaged, given in zip(tensors_of(result), one, strict=True):
            assert averaged.shape == given.shape
            assert averaged.dtype == given.dtype
            assert torch.equal(averaged, torch.full_like(given, 1.5))


async def test_a_lone_peer_gets_no_peers_at_its_match_timeout() -> None:
    swarm = Swarm()
    async with simulated_peer(MemoryNetwork(latency=LAN), 0) as peer:
        await swarm.step_once(peer, 0, config())
        assert isinstance(swarm.results[peer.id], p2pavg.NoPeers)
        assert 10.0 <= swarm.ended[peer.id] - swarm.began[peer.id] <= 10.5
        assert swarm.averagers[peer.id].weight == 1.0


async def test_three_of_four_start_at_the_match_timeout() -> None:
    swarm = await together([[values(index)] for index in range(3)], group_size=4)
    assert {len(result.peers) for result in swarm.successes()} == {3}
    assert max(swarm.ended.values()) - min(swarm.began.values()) < 11.0


async def test_three_that_need_four_wait_and_a_fourth_completes_them() -> None:
    how = config(min_group_size=4)
    final: list[p2pavg.RoundResult] = []

    async def two_steps(peer: Peer, index: int) -> None:
        async with peer.averager(how) as averager:
            averager.accumulate([values(index)])
            first = await averager.step(wait=None)
            assert isinstance(first, p2pavg.InProgress)
            assert (first.ready_peers, first.target_size) == (3, 4)
            final.append(await averager.step(wait=None))

    async with simulated_peers(MemoryNetwork(latency=LAN), 4) as peers, trio.open_nursery() as nursery:
        for index, peer in enumerate(peers[:3]):
            nursery.start_soon(two_steps, peer, index)
        await trio.sleep(13.0)
        swarm = Swarm()
        await swarm.step_once(peers[3], 3, how)
    results = [*final, *swarm.results.values()]
    assert [isinstance(result, p2pavg.Success) and len(result.peers) for result in results] == [4] * 4


async def test_ten_peers_in_groups_of_four() -> None:
    """Eight of them find groups of four; the other two start at the match timeout.

    ``scripts/bench scale`` has 100 peers.
    """
    swarm, how = Swarm(), config(match_timeout=20.0)
    network = MemoryNetwork(seed=7, latency=(0.005, 0.04))
    async with simulated_peers(network, 10) as peers, trio.open_nursery() as nursery:
        for index, peer in enumerate(peers):
            late = (index * 7 % 10) / 10
            nursery.start_soon(
                partial(swarm.step_once, peer, index, how, after=late, tensors=[values(index, 64)])
            )
    groups: dict[str, list[p2pavg.Success]] = {}
    for result in swarm.successes():
        groups.setdefault(result.group_id, []).append(result)
    for members in groups.values():
        assert len(members) == len(members[0].peers), "a member of a group is missing"
        assert same_bits(members)
    assert sorted(map(len, groups.values())) == [2, 4, 4]
    assert max(swarm.ended[p] - swarm.began[p] for p in swarm.ended) < 22.0


async def test_tensors_accumulated_during_a_round_belong_to_the_next() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as peers:

        async def twice(peer: Peer, found: list[float]) -> None:
            async with peer.averager(config(group_size=2)) as averager:
                averager.accumulate([torch.ones(4)])
                assert isinstance(await averager.step(wait=0), p2pavg.InProgress)
                averager.accumulate([torch.full((4,), 5.0)], weight=3.0)
                for _ in range(2):
                    result = await averager.step(wait=None)
                    found.append(float(tensors_of(result)[0][0]))

        found: list[list[float]] = [[], []]
        async with trio.open_nursery() as nursery:
            for peer, mine in zip(peers, found, strict=True):
                nursery.start_soon(twice, peer, mine)
        assert found == [[1.0, 5.0], [1.0, 5.0]]


async def test_a_round_that_cannot_end_in_time_says_so_before_it_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The warning has the seconds that it would need, and is repeated after the failure."""
    network = MemoryNetwork(latency=LAN, bandwidth=25_000.0)
    how = config(group_size=2, bandwidth=0.2, exchange_timeout=4.0)
    found = await play_round([how] * 2, network, elements=50_000)  # 1.6 Mbit each way
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("needs at least 8 s" in text and "exchange_timeout is 4 s" in text for text in warnings)
    for result in found.values():
        assert isinstance(result, p2pavg.Failed)
        assert "needs at least 8 s" in result.reason


async def test_a_codec_that_lacks_a_package_for_the_device_is_told_before_a_round_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU without bitsandbytes, an error in the midst of the exchange would cost the whole group the round."""

    def refuse(self: Blockwise8, device: torch.device) -> None:
        raise ImportError(f"a package is missing on {device}")

    monkeypatch.setattr(Blockwise8, "check_device", refuse)
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 1) as (peer,),
        peer.averager(config(compression="blockwise8")) as averager,
    ):
        averager.accumulate([values(0)])
        with pytest.raises(ImportError, match="missing on cpu"):
            await averager.step(wait=None)
        assert averager.weight == 1.0
        assert averager.round_state is None
