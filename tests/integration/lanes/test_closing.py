"""Cancelled searches and closed transports leave no lane behind."""

import socket
import threading

import pytest
import trio
import trio.testing

from p2pavg.base.errors import ClosedError, StreamBrokenError, UnreachableError
from p2pavg.net.lanes import pool
from p2pavg.net.lanes.halfway import PROTOCOL
from p2pavg.net.transport import DirectLane, Stream
from tests.integration.hosts import LOOPBACK, assert_serves, eventually, open_host, watched
from tests.integration.lanes.company import Serving, descriptors, in_thread, keeper, lane_to, pair


@watched
async def test_a_cancelled_search_leaves_nothing_behind() -> None:
    """The search is cancelled in each of its waits: for the offer, the handshake and the verdict."""
    stuck = trio.Event()

    async def hold(plain: socket.socket) -> None:
        with plain:
            stuck.set()
            await trio.sleep_forever()

    async def silent(stream: Stream) -> None:
        stuck.set()
        await trio.sleep_forever()

    async with pair() as (here, there):
        await assert_serves(here, there)
        await lane_to(here, there)
        before, threads = descriptors(), threading.active_count()
        accept = there._tcp.on_tls
        for host, place in ((there, "handshake"), (there, "offer")):
            stuck = trio.Event()
            if place == "handshake":
                host._tcp.on_tls = hold
            else:
                host.serve(PROTOCOL, silent)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lane_to, here, there)
                await stuck.wait()
                nursery.cancel_scope.cancel()
            if place == "handshake":  # the receiver of this test would never end it
                host._tcp.on_tls = accept
                for scope in list(host._tcp._undecided.values()):
                    scope.cancel()
            await eventually(lambda: descriptors() <= before)
            assert threading.active_count() <= threads
            assert len(keeper(here).lanes) == 1
        with pytest.raises(UnreachableError, match="within"):  # the failure was not remembered
            await here.open_lane(there.peer_id, timeout=0.05)


@watched
async def test_closing_ends_idle_and_busy_lanes() -> None:
    begun: list[DirectLane] = []
    blocked: list[str] = []

    async def read(lane: DirectLane) -> None:
        begun.append(lane)
        try:
            await in_thread(lane.receive_into, memoryview(bytearray(1 << 30)))
        finally:
            blocked.append("reader")

    def flood(lane: DirectLane) -> None:
        with pytest.raises(StreamBrokenError):
            lane.send(bytes(1 << 28))
        blocked.append("writer")

    async with pair():  # objects that are made once in a process
        pass
    before = descriptors()
    async with trio.open_nursery() as nursery, pair() as (here, there):
        there.serve_lanes(Serving(read))
        idle, busy, waiting = [await lane_to(here, there) for _ in range(3)]
        here.keep_lane(idle)
        await in_thread(waiting.send, b"x")
        busy_there = keeper(there).lanes
        assert len(busy_there) == 3
        nursery.start_soon(in_thread, flood, busy)
        await eventually(lambda: busy.bytes_sent > 0 and len(begun) == 2)
    assert sorted(blocked) == ["reader", "reader", "writer"]
    assert idle.aborted
    assert busy.aborted
    assert waiting.aborted
    await eventually(lambda: descriptors() <= before)
    with pytest.raises(ClosedError):
        await lane_to(here, there)


@watched
async def test_closing_ends_a_search_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LANE_DIAL_SECONDS", 1e6)

    async def hold(plain: socket.socket) -> None:
        with plain:
            await trio.sleep_forever()

    async with open_host(LOOPBACK) as there:
        there._tcp.on_tls = hold
        async with trio.open_nursery() as nursery, open_host(LOOPBACK) as here:
            errors: list[Exception] = []

            async def search() -> None:
                try:
                    await lane_to(here, there)
                except (UnreachableError, ClosedError) as error:
                    errors.append(error)

            nursery.start_soon(search)
            await eventually(lambda: any(found.fileno() < 0 for found in there._tcp.undecided))
        assert [type(error) for error in errors] == [ClosedError]
