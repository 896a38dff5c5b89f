"""The peers of a run see each other in ``members()``, and lose those that have left or died."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio

import p2pavg
from p2pavg.base.limits import CALM_LOOK_SECONDS
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.peer import Peer
from p2pavg.peer.statuses import FEW_PEERS, SECONDS_PER_PEER
from p2pavg.runs.records.board import SAID_TTL_SECONDS
from p2pavg.telemetry.events import AnyEvent, PeerGone, PeerSeen, RoundEnded, RoundKind, UpdateTaken
from p2pavg.telemetry.status import key_of
from p2pavg.testing import MemoryNetwork, simulated_peers
from tests.simulation.swarm import LAN, config, values

SOON = SECONDS_PER_PEER * FEW_PEERS + CALM_LOOK_SECONDS + 1.0


def ids(averager: p2pavg.DecentralizedAverager) -> set[str]:
    return {member.peer_id for member in averager.members()}


@asynccontextmanager
async def opened(
    count: int, network: MemoryNetwork | None = None, *, averagers: int | None = None, **changes: object
) -> AsyncIterator[tuple[list[Peer], list[p2pavg.DecentralizedAverager]]]:
    """Open peers, with an averager of each, or of the first ones only."""
    network = network or MemoryNetwork(latency=LAN)
    async with simulated_peers(network, count) as peers, AsyncExitStack() as stack:
        how = [config(name=f"peer {index}", **changes) for index in range(count)]
        pairs = list(zip(peers, how, strict=True))[:averagers]
        yield peers, [await stack.enter_async_context(peer.averager(each)) for peer, each in pairs]


async def test_all_peers_are_seen_and_a_dead_one_is_lost() -> None:
    network = MemoryNetwork(latency=LAN)
    async with opened(4, network) as (peers, averagers):
        events: list[AnyEvent] = []
        averagers[0].subscribe(events.append)
        await trio.sleep(SOON)
        everyone = {peer.id for peer in peers}
        for averager, peer in zip(averagers, peers, strict=True):
            assert ids(averager) == everyone
            me, *others = averager.members()
            assert me.is_self
            assert me.peer_id == peer.id
            assert not any(member.is_self for member in others)
        names = {member.peer_id: member.name for member in averagers[0].members()}
        assert names == {peer.id: f"peer {index}" for index, peer in enumerate(peers)}
        assert {member.version for member in averagers[0].members()} == {p2pavg.__version__}
        network.crash(peers[3].id)
        await trio.sleep(SAID_TTL_SECONDS + SOON)
        for averager in averagers[:3]:
            assert ids(averager) == everyone - {peers[3].id}
        assert {event.peer_id for event in events if isinstance(event, PeerSeen)} == everyone - {peers[0].id}
        assert [event.peer_id for event in events if isinstance(event, PeerGone)] == [peers[3].id]


async def test_peer_that_closes_its_averager_is_gone() -> None:
    async with opened(3, averagers=2) as (peers, averagers):
        async with peers[2].averager(config()):
            await trio.sleep(SOON)
            assert len(ids(averagers[0])) == 3
        await trio.sleep(0.1)
        assert ids(averagers[0]) == {peers[0].id, peers[1].id}


async def test_status_stays_while_one_of_two_averagers_of_a_peer_is_open() -> None:
    """Both would publish under one key, and the one that closes would withdraw what the other has published."""
    async with opened(2, averagers=1) as (peers, [watching]), AsyncExitStack() as stack:
        first = await stack.enter_async_context(peers[1].averager(config(name="first")))
        async with peers[1].averager(config(name="second")) as second:
            await trio.sleep(SOON)
            assert ids(watching) == ids(second) == {peer.id for peer in peers}
        for _ in range(5):
            await trio.sleep(1.0)
            assert [member.name for member in watching.members()] == ["peer 0", "first"]
        second = await stack.enter_async_context(peers[1].averager(config(name="second")))
        await first.aclose()
        await trio.sleep(2 * SOON)
        assert [member.name for member in watching.members()] == ["peer 0", "second"]
        assert ids(second) == {peer.id for peer in peers}


async def test_auxiliary_has_a_status_while_it_helps() -> None:
    async with opened(2, averagers=1) as (peers, [averager]):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(assist, peers[1], "sim")
            await trio.sleep(SOON)
            assert [member.role for member in averager.members()] == ["contributor", "auxiliary"]
            nursery.cancel_scope.cancel()
        await trio.sleep(0.1)
        assert ids(averager) == {peers[0].id}


async def test_malformed_status_hides_its_publisher_only() -> None:
    async with opened(3) as (peers, averagers):
        board = await averagers[2].board("status")
        await trio.sleep(SOON)
        board.publish(b"\x00 not a status", now=True)
        await trio.sleep(0.1)
        assert ids(averagers[0]) == {peers[0].id, peers[1].id}


async def test_round_is_an_event_and_a_part_of_the_status() -> None:
    async with opened(3, group_size=3) as (peers, averagers):
        events: list[AnyEvent] = []
        averagers[0].subscribe(events.append)
        peers[0].subscribe(events.append)
        results: dict[int, p2pavg.RoundResult] = {}

        async def step(index: int) -> None:
            averagers[index].accumulate([values(index)], weight=2.0, metrics={"loss": 3.0})
            results[index] = await averagers[index].step(wait=None)

        async with trio.open_nursery() as nursery:
            for index in range(3):
                nursery.start_soon(step, index)
        ended = [event for event in events if isinstance(event, RoundEnded)]
        success = results[0]
        assert isinstance(success, p2pavg.Success)
        assert len(ended) == 2  # one of the averager, the same of the peer
        assert ended[0] is ended[1]
        assert ended[0].result is RoundKind.SUCCESS
        assert ended[0].group_id == success.group_id
        assert set(ended[0].members) == {peer.id for peer in peers}
        assert sum(ended[0].sent.values()) == success.bytes_sent > 0
        assert sum(ended[0].received.values()) == success.bytes_received > 0
        assert set(ended[0].ways) == {peers[1].id, peers[2].id}
        assert (ended[0].samples, ended[0].own_samples) == (6.0, 2.0)
        await trio.sleep(SOON)
        seen = averagers[1].statuses.others()[peers[0].id].status
        assert seen.rounds[0].group.hex() == success.group_id[:16]
        assert seen.metrics == (("loss", 3.0),)
        assert set(seen.lanes) | set(seen.streams) == {key_of(peers[1].id), key_of(peers[2].id)}


async def test_lonely_round_and_a_subscriber_that_raises() -> None:
    async with opened(1, match_timeout=5.0) as (_, [averager]):
        events: list[AnyEvent] = []

        def raises(event: AnyEvent) -> None:
            raise RuntimeError("a mistake of the subscriber")

        averager.subscribe(raises)
        averager.subscribe(events.append)
        averager.accumulate([values(0)])
        assert isinstance(await averager.step(wait=None), p2pavg.NoPeers)
        (ended,) = [event for event in events if isinstance(event, RoundEnded)]
        assert ended.result is RoundKind.NO_PEERS
        assert ended.group_id == ""
        assert ended.duration >= 5.0
        assert ended.reason


async def test_optimizers_events_reach_the_others() -> None:
    async with opened(2) as (_, averagers):
        how: dict[str, Any] = {"time": 1.0, "run_id": "sim", "epoch": 5, "samples": 1.0}
        averagers[0].events.emit(UpdateTaken(lineage=bytes(32), group_id="", peers=(), metrics={}, **how))
        await trio.sleep(SOON)
        assert {member.epoch for member in averagers[1].members()} == {0, 5}
