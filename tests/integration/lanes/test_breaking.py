"""The end of a lane in use: by abort, by an early end, or by a handler that fails."""

import logging
import threading

import pytest
import trio
import trio.testing

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError
from p2pavg.net.lanes.tls_lane import TlsLane
from p2pavg.net.transport import DirectLane
from tests.integration.hosts import eventually, watched
from tests.integration.lanes.company import (
    Serving,
    assert_goes_on,
    in_thread,
    keeper,
    lane_to,
    pair,
    until_still,
)


@watched
async def test_abort_wakes_blocked_threads() -> None:
    """A sender is blocked because its receiver does not read, and a receiver because its sender does not send."""
    blocked = trio.Event()
    woken: list[str] = []

    async def never_read(lane: DirectLane) -> None:
        await blocked.wait()
        first = bytearray(1)
        lane.receive_into(memoryview(first))
        await trio.sleep_forever()

    def flood(lane: DirectLane) -> None:
        with pytest.raises(StreamBrokenError, match="this process dropped it") as caught:
            lane.send(bytes(1 << 28))
        woken.append(str(caught.value))

    async with pair() as (here, there):
        there.serve_lanes(Serving(never_read))
        lane = await lane_to(here, there)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, flood, lane)
            await eventually(lambda: lane.bytes_sent > 0)
            await until_still(lambda: lane.bytes_sent)
            assert lane.unsent() > 0
            threading.Thread(target=lane.abort).start()
        assert there.peer_id in woken[0]
        with pytest.raises(StreamBrokenError):
            lane.send(b"x")
        lane.abort()
        blocked.set()


@watched
async def test_abort_wakes_a_receiver() -> None:
    reading = trio.Event()
    ended = trio.Event()
    found: list[TlsLane] = []

    async def read(lane: DirectLane) -> None:
        assert isinstance(lane, TlsLane)
        found.append(lane)
        reading.set()
        try:
            await in_thread(lane.receive_into, memoryview(bytearray(1000)))
        except StreamBrokenError:
            ended.set()
            raise

    async with pair() as (here, there):
        there.serve_lanes(Serving(read))
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"half")
        await reading.wait()
        await eventually(lambda: found[0].bytes_received == 4)
        threading.Thread(target=found[0].abort).start()
        await ended.wait()
        await eventually(lambda: not keeper(here).lanes)


@watched
async def test_a_descriptor_is_not_closed_under_its_reader() -> None:
    """The system could give the descriptor to another connection, from which the reader would then read."""
    async with pair() as (here, there):
        lane = await lane_to(here, there)
        with lane._user():
            lane.abort()
            await eventually(lambda: lane._users == 1)  # the watching task has ended
            assert lane._connection.fileno() >= 0
        assert lane._connection.fileno() == -1


@watched
async def test_a_stream_that_ends_early_is_broken() -> None:
    errors: list[str] = []
    ended = trio.Event()

    async def read(lane: DirectLane) -> None:
        try:
            await in_thread(lane.receive_into, memoryview(bytearray(1000)))
        except StreamBrokenError as error:
            errors.append(str(error))
            ended.set()
            raise

    async with pair() as (here, there):
        there.serve_lanes(Serving(read))
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"half")
        lane.abort()
        await ended.wait()
        assert "996 bytes early" in errors[0]
        assert here.peer_id in errors[0]


ERRORS = [StreamBrokenError("gone"), RemoteProtocolError("lies"), ClosedError("shut"), RuntimeError("a bug")]


@pytest.mark.parametrize("error", ERRORS)
@watched
async def test_an_exception_of_a_handler_ends_its_lane(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(lane: DirectLane) -> None:
        raise error

    caplog.set_level(logging.DEBUG, "p2pavg.net.lanes.inbound")
    async with pair() as (here, there):
        there.serve_lanes(Serving(fail))
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"x")
        await eventually(lambda: lane.aborted)
        assert not keeper(there).lanes
        (record,) = [found for found in caplog.records if found.name == "p2pavg.net.lanes.inbound"]
        assert record.levelno == (logging.ERROR if type(error) is RuntimeError else logging.DEBUG)
        assert here.peer_id in record.getMessage()
        await assert_goes_on(there)


@watched
async def test_a_handler_that_reads_nothing_ends_its_lane() -> None:
    calls = []

    async def read_nothing(lane: DirectLane) -> None:
        calls.append(lane)

    async with pair() as (here, there):
        there.serve_lanes(Serving(read_nothing))
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"x")
        await eventually(lambda: lane.aborted)
        assert len(calls) == 1
