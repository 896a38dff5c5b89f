"""Whole rounds of averaging over relays, by peers that listen nowhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch
import trio

from p2pavg import AveragingConfig, RoundResult, Success, open_peer
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.peer.peer import Peer
from tests.integration.hosts import LOOPBACK, eventually
from tests.integration.relay.meeting import change_bytes, service_of

WATCHDOG_SECONDS = 180.0
ELEMENTS = 30_000


def transport_of(peer: Peer) -> Libp2pTransport:
    found = peer._transport
    assert isinstance(found, Libp2pTransport)
    return found


def config_of(count: int) -> AveragingConfig:
    return AveragingConfig(
        run_id="relayed",
        open_run=True,  # a peer behind a relay is not one of this machine only
        group_size=count,
        min_group_size=count,
        compression="fp32",
        exchange_timeout=20.0,
    )


async def average(averagers: Sequence[DecentralizedAverager]) -> list[RoundResult]:
    """Let each averager contribute its number, and return the results."""
    results: list[RoundResult] = []

    async def step(number: int, averager: DecentralizedAverager) -> None:
        averager.accumulate([torch.full((ELEMENTS,), float(number))])
        results.append(await averager.step(wait=None))

    async with trio.open_nursery() as nursery:
        for number, averager in enumerate(averagers):
            nursery.start_soon(step, number, averager)
    return results


@asynccontextmanager
async def relay_and_two_peers() -> AsyncIterator[tuple[Peer, Peer, Peer]]:
    async with (
        open_peer(listen=[LOOPBACK], relay_mbps=100.0) as relay,
        open_peer(listen=[], bootstrap=relay.addresses) as one,
        open_peer(listen=[], bootstrap=relay.addresses) as other,
    ):
        await eventually(lambda: bool(one.addresses and other.addresses))
        yield relay, one, other


def assert_average(result: RoundResult, peers: Sequence[Peer]) -> None:
    assert isinstance(result, Success), result
    assert set(result.peers) == {peer.id for peer in peers}
    assert isinstance(result.averaged, list)
    expected = torch.full((ELEMENTS,), sum(range(len(peers))) / len(peers))
    torch.testing.assert_close(result.averaged[0], expected)


async def test_two_peers_that_listen_nowhere_average_through_a_third() -> None:
    with trio.fail_after(WATCHDOG_SECONDS):
        async with relay_and_two_peers() as (relay, one, other):
            config = config_of(2)
            async with one.averager(config) as first, other.averager(config) as second:
                for _ in range(2):
                    for result in await average([first, second]):
                        assert_average(result, [one, other])
            assert transport_of(one).path_to(other.id) == "relayed"
            assert service_of(transport_of(relay)).budget.carried > 4 * ELEMENTS


async def test_a_relay_that_lies_within_a_round_causes_no_false_average() -> None:
    """It changes a byte of the tensors that it carries. The round ends as after a lost connection."""
    with trio.fail_after(WATCHDOG_SECONDS):
        async with relay_and_two_peers() as (relay, one, other):
            lied = 0

            def lie(piece: bytes) -> bytes:
                nonlocal lied
                if lied or len(piece) < 2000:  # how much comes at once depends on the load
                    return piece
                lied += 1
                return piece[:1000] + bytes([piece[1000] ^ 1]) + piece[1001:]

            change_bytes(transport_of(relay), lambda: lie, lambda: lie)
            # A circuit that is open already, as on a busy machine, would carry all as it is.
            await transport_of(one).disconnect(other.id)
            await transport_of(other).disconnect(one.id)
            config = config_of(2)
            async with one.averager(config) as first, other.averager(config) as second:
                results = await average([first, second])
                assert lied == 1
                for result in results:
                    if isinstance(result, Success):
                        assert_average(result, [one, other])
