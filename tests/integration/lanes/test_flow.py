"""Flow control of lanes: senders that wait for room, and short reads in trio."""

import fcntl
import select
import struct
import sys
import threading

import pytest
import trio
import trio.testing

from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.lanes.tls_lane import TlsLane
from p2pavg.net.transport import DirectLane
from tests.integration.hosts import eventually, watched
from tests.integration.lanes.company import Serving, in_thread, lane_to, pair, until_still


class Flood:
    """A thread that sends a piece whenever there is room, until it is stopped."""

    PIECE = bytes(12 * 1024)
    UNSENT = 64 * 1024

    def __init__(self, lane: TlsLane) -> None:
        self.enough = threading.Event()
        self.waits = False
        self.error: StreamBrokenError | None = None
        self._lane = lane

    async def run(self) -> None:
        """Run a function in a thread. If the thread is never woken, the watchdog abandons it."""
        await trio.to_thread.run_sync(self._send, abandon_on_cancel=True)  # type: ignore[call-arg]  # trio-typing's stubs

    def _send(self) -> None:
        try:
            self._lane.keep_unsent_below(self.UNSENT)
            while not self.enough.is_set():
                self.waits = True
                self._lane.wait_for_room()
                self.waits = False
                self._lane.send(self.PIECE)
        except StreamBrokenError as error:
            self.error = error

    async def stuck(self) -> None:
        """Wait until the sender seems to be blocked because the buffers of both sides are full."""
        await eventually(lambda: self._lane.bytes_sent > 0)
        for _ in range(10):  # the system may make more room when one of its timers expires
            await until_still(lambda: self._lane.bytes_sent)
        await eventually(self._is_stuck)

    def _is_stuck(self) -> bool:
        """Return whether the sender waits, or is about to, because the system takes no more bytes."""
        poll = select.poll()
        poll.register(self._lane._connection.fileno(), select.POLLOUT)
        return self.waits and not poll.poll(0)

    def held_back(self) -> int:
        """Return the bytes that the system holds and has not sent, if it can tell."""
        if sys.platform != "linux":
            return 0
        siocoutqnsd = 0x894B
        answer = fcntl.ioctl(self._lane._connection.fileno(), siocoutqnsd, bytes(4))
        return int(struct.unpack("i", answer)[0])


class Drain:
    """A handler of lanes that reads without end once the test permits."""

    def __init__(self) -> None:
        self.let = trio.Event()
        self.read = 0

    async def __call__(self, lane: DirectLane) -> None:
        await self.let.wait()
        await in_thread(self._read, lane)

    def _read(self, lane: DirectLane) -> None:
        buffer = memoryview(bytearray(len(Flood.PIECE)))
        while True:
            lane.receive_into(buffer)
            self.read += len(buffer)


@watched
async def test_a_sender_goes_on_when_the_other_side_reads() -> None:
    async with pair() as (here, there):
        drain = Drain()
        there.serve_lanes(Serving(drain))
        lane = await lane_to(here, there)
        flood = Flood(lane)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood.run)
            await flood.stuck()
            assert flood.held_back() <= Flood.UNSENT
            assert lane.bytes_sent > 0
            flood.enough.set()
            drain.let.set()
        assert flood.error is None
        await eventually(lambda: drain.read == lane.bytes_sent)
        lane.wait_for_room()


@watched
async def test_abort_wakes_a_sender_that_waits_for_room() -> None:
    async with pair() as (here, there):
        drain = Drain()
        there.serve_lanes(Serving(drain))
        lane = await lane_to(here, there)
        flood = Flood(lane)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood.run)
            await flood.stuck()
            threading.Thread(target=lane.abort).start()
        assert flood.error is not None
        for use in (lane.wait_for_room, lambda: lane.keep_unsent_below(1), lambda: lane.send(b"x")):
            with pytest.raises(StreamBrokenError, match="dropped by this process"):
                use()


class Few:
    """A handler of lanes that reads six bytes in trio, and then four in a thread."""

    def __init__(self) -> None:
        self.lanes: list[TlsLane] = []
        self._send, self.found = trio.open_memory_channel[bytes](100)
        self.ended = trio.Event()

    async def __call__(self, lane: DirectLane) -> None:
        assert isinstance(lane, TlsLane)
        self.lanes.append(lane)
        try:
            self._send.send_nowait(await lane.receive_exactly(6))
        except StreamBrokenError:
            self.ended.set()
            raise
        rest = bytearray(4)
        await in_thread(lane.receive_into, memoryview(rest))
        self._send.send_nowait(bytes(rest))

    def has_read(self, count: int) -> bool:
        return bool(self.lanes) and self.lanes[0].bytes_received == count


@watched
async def test_a_short_read_in_trio_leaves_later_bytes_unread() -> None:
    async with pair() as (here, there):
        few = Few()
        there.serve_lanes(Serving(few))
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"abc")
        await eventually(lambda: few.has_read(3))
        await in_thread(lane.send, b"defghij")
        assert [await few.found.receive() for _ in range(2)] == [b"abcdef", b"ghij"]
        assert few.has_read(10)
        await in_thread(lane.send, b"ABCDEFGHIJ")
        assert [await few.found.receive() for _ in range(2)] == [b"ABCDEF", b"GHIJ"]


@watched
async def test_a_short_read_in_trio_that_ends_early_raises() -> None:
    async with pair() as (here, there):
        few = Few()
        there.serve_lanes(Serving(few))
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"abc")
        await eventually(lambda: few.has_read(3))
        lane.abort()
        await few.ended.wait()
        await eventually(lambda: few.lanes[0].aborted)


FULL = 32 * 1024 * 1024  # more than the buffers of both sides hold


class Swallow:
    """A handler of lanes that reads so many bytes once the test permits, many of them in a thread, and acknowledges."""

    def __init__(self, count: int) -> None:
        self.let, self.found = trio.Event(), b""
        self._count = count

    async def __call__(self, lane: DirectLane) -> None:
        await self.let.wait()
        if self._count < FULL:
            self.found = await lane.receive_exactly(self._count)
        else:
            room = bytearray(self._count)
            await in_thread(lane.receive_into, memoryview(room))
            self.found = bytes(room)
        await lane.acknowledge_from_loop()


@watched
async def test_bytes_that_were_sent_from_the_loop_arrive_and_are_acknowledged() -> None:
    async with pair() as (here, there):
        data = bytes(range(256)) * 16
        swallow = Swallow(len(data))
        swallow.let.set()
        there.serve_lanes(Serving(swallow))
        lane = await lane_to(here, there)
        for _ in range(3):
            await lane.send_from_loop(data)
            await lane.acknowledged()
            assert swallow.found == data
        assert lane.bytes_sent == 3 * len(data)


@watched
async def test_a_full_lane_holds_up_the_task_that_sends_and_not_the_loop() -> None:
    async with pair() as (here, there):
        swallow = Swallow(FULL)
        there.serve_lanes(Serving(swallow))
        lane, done = await lane_to(here, there), trio.Event()

        async def send() -> None:
            await lane.send_from_loop(bytes(FULL))
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await until_still(lane.unsent)
            assert not done.is_set()
            swallow.let.set()
            await done.wait()
        await lane.acknowledged()
        assert swallow.found == bytes(FULL)


@watched
async def test_a_lane_is_dropped_if_it_is_sent_to_half_way() -> None:
    async with pair() as (here, there):
        there.serve_lanes(Serving(Swallow(FULL)))
        lane = await lane_to(here, there)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lane.send_from_loop, bytes(FULL))
            await until_still(lane.unsent)
            nursery.cancel_scope.cancel()
        assert lane.aborted


@watched
async def test_abort_wakes_a_task_that_sends() -> None:
    async with pair() as (here, there):
        there.serve_lanes(Serving(Swallow(FULL)))
        lane, broken = await lane_to(here, there), trio.Event()

        async def send() -> None:
            with pytest.raises(StreamBrokenError, match="this process dropped it"):
                await lane.send_from_loop(bytes(FULL))
            broken.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await until_still(lane.unsent)
            threading.Thread(target=lane.abort).start()
            await broken.wait()
