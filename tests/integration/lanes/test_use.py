"""Data over direct lanes, and the reuse of lanes."""

import os
import socket

import pytest
import trio
import trio.testing

from p2pavg.net.lanes import inbound, pool
from p2pavg.net.lanes.pool import LaneKeeper
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.transport import DirectLane
from tests.integration.hosts import assert_checked_while_idle, eventually, watched
from tests.integration.lanes.company import Inbox, Serving, in_thread, keeper, lane_to, pair, post


@watched
async def test_bytes_arrive_whole_and_in_order() -> None:
    async with pair() as (here, there):
        inbox = Inbox()
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        bodies = [os.urandom(size) for size in (1, 0, 16_383, 16_385, 1_000_003, 5 * 1024 * 1024 + 7)]
        for body in bodies:
            await post(lane, body)
        assert [await inbox.messages.receive() for _ in bodies] == bodies
        await eventually(lambda: lane.unsent() == 0)
        assert lane.remote == there.peer_id
        assert {found.remote for found in inbox.lanes} == {here.peer_id}
        assert lane.bytes_sent == inbox.lanes[0].bytes_received == sum(map(len, bodies)) + 8 * len(bodies)


@watched
async def test_the_system_checks_both_ends_of_an_idle_lane() -> None:
    """A lane whose mapping a router has forgotten would make the next round fail."""
    async with pair() as (here, there):
        there.serve_lanes(Serving(inbox := Inbox()))
        await post(await lane_to(here, there), b"hello")
        await inbox.messages.receive()
        for host in (here, there):
            (lane,) = keeper(host).lanes
            with socket.socket(fileno=os.dup(lane._connection.fileno())) as opened:
                assert_checked_while_idle(opened)


@watched
async def test_the_event_loop_moves_bytes_whole_and_in_order() -> None:
    """As processes on one machine do, also more bytes than the system takes at once."""
    sizes = (1, 16_385, 300_000, 5_000_003)
    bodies = [os.urandom(size) for size in sizes]
    found: list[bytes] = []

    async def take(lane: DirectLane) -> None:
        received = b""
        while len(received) < sum(sizes):
            some = await lane.receive_some(100_000)
            assert 0 < len(some) <= 100_000
            received += some
        found.append(received)
        await lane.acknowledge_from_loop()

    async with pair() as (here, there):
        there.serve_lanes(Serving(take))
        lane = await lane_to(here, there)
        assert lane.is_local
        for body in bodies:
            await lane.send_from_loop(body)
        await lane.acknowledged()
    assert found == [b"".join(bodies)]
    assert lane.bytes_sent == sum(sizes)


@watched
async def test_a_kept_lane_is_reused() -> None:
    async with pair() as (here, there):
        inbox = Inbox()
        there.serve_lanes(Serving(inbox))
        first = await lane_to(here, there)
        for number in range(5):
            await post(first, bytes([number]))
            await first.acknowledged()
            here.keep_lane(first)
            assert await lane_to(here, there) is first
        assert [await inbox.messages.receive() for _ in range(5)] == [bytes([number]) for number in range(5)]
        assert len(set(map(id, inbox.lanes))) == 1
        other = await lane_to(here, there)
        assert other is not first
        assert len(keeper(here).lanes) == len(keeper(there).lanes) == 2


@watched
async def test_lanes_wait_until_a_handler_is_set() -> None:
    async with pair() as (here, there):
        await post(await lane_to(here, there), b"early")
        inbox = Inbox()
        there.serve_lanes(Serving(inbox))
        assert await inbox.messages.receive() == b"early"


@watched
async def test_already_decrypted_bytes_wake_the_handler() -> None:
    """Two messages are in one TLS record, so the socket is not readable again after the first."""
    async with pair() as (here, there):
        inbox = Inbox()
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        await in_thread(lane.send, 2 * ((1).to_bytes(8, "big") + b"x"))
        assert [await inbox.messages.receive() for _ in range(2)] == [b"x", b"x"]


@watched
async def test_an_idle_lane_whose_receiver_has_closed_is_dropped() -> None:
    async with pair() as (here, there):
        inbox = Inbox()
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        here.keep_lane(lane)
        await eventually(lambda: len(keeper(there).lanes) == 1)
        keeper(there).lanes[0].abort()
        await eventually(lambda: not keeper(here).lanes)
        assert lane.aborted
        again = await lane_to(here, there)
        assert again is not lane
        await post(again, b"new")
        assert await inbox.messages.receive() == b"new"


@watched
async def test_a_lane_that_has_just_closed_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that watches the lane may not have run yet."""

    async def see_nothing(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(LaneKeeper, "_watch", see_nothing)
    async with pair() as (here, there):
        lane = await lane_to(here, there)
        here.keep_lane(lane)
        keeper(there).lanes[0].abort()
        await eventually(lane.is_readable)
        assert await lane_to(here, there) is not lane
        assert lane.aborted


@watched
async def test_an_idle_lane_whose_sender_has_closed_is_dropped() -> None:
    async with pair() as (here, there):
        inbox = Inbox()
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        await eventually(lambda: len(keeper(there).lanes) == 1)
        lane.abort()
        await eventually(lambda: not keeper(there).lanes)
        await eventually(lambda: not keeper(here).lanes)
        assert not inbox.lanes, "the handler was called without bytes to read"


@pytest.mark.parametrize("side", ["sender", "receiver"])
@watched
async def test_lanes_that_stay_idle_are_dropped(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if side == "sender":
        monkeypatch.setattr(pool, "IDLE_LANE_SECONDS", 0.0)
    else:
        monkeypatch.setattr(inbound, "IDLE_LANE_SECONDS", 0.0)
    async with pair() as (here, there):
        lane = await lane_to(here, there)
        here.keep_lane(lane)
        await eventually(lambda: lane.aborted)
        await eventually(lambda: not keeper(there).lanes)


@watched
async def test_two_peers_open_lanes_to_each_other_at_once() -> None:
    async with pair() as (here, there):
        inboxes = {}
        for host in (here, there):
            inboxes[host.peer_id] = Inbox()
            host.serve_lanes(Serving(inboxes[host.peer_id]))

        async def talk(one: Libp2pTransport, other: Libp2pTransport) -> None:
            body = one.peer_id.encode() * 20_000
            await post(await lane_to(one, other), body)
            assert await inboxes[other.peer_id].messages.receive() == body

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(talk, here, there)
                nursery.start_soon(talk, there, here)
        assert len(keeper(here).lanes) == len(keeper(there).lanes) == 6
