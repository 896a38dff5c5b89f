"""Messages are written without a task while the system takes them; nothing is lost, doubled or overtaken after that."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest
import trio
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_RST,
    FLAG_SYN,
    HEADER_SIZE,
    TYPE_DATA,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
)

from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.libp2p import guarded_yamux
from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.libp2p.speed import MAX_FRAME_BYTES, SMALL_FRAME_BYTES, EagerPackets, WriteStart
from p2pavg.net.libp2p.stream import LONG_PIECE_BYTES, WRITE_PIECE_BYTES
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.transport import Stream
from tests.integration.hosts import TIMEOUT, eventually, watched
from tests.integration.libp2p_hosts import HELD, assert_serves_strangers, connection_of, open_host
from tests.integration.raw_peers import raw_peer

SAYS = "/says/1"
MESSAGE_BYTES = 1000
"""Of a message that is small."""


class Spawns(trio.abc.Instrument):
    """Notes the names of the tasks that begin."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.names.append(task.name)


@asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    async with open_host() as here, open_host() as there:
        yield here, there


async def to(there: Libp2pTransport, here: Libp2pTransport, protocol: str) -> Stream:
    return await here.open_stream(there.peer_id, protocol, addresses=there.addresses, timeout=TIMEOUT)


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") * (MESSAGE_BYTES // 4) for number in range(count)]


async def read_on(stream: Stream, piece: int, found: bytearray) -> None:
    while data := await stream.receive_some(piece):
        found += data


@contextmanager
def frames_of(
    connection: GuardedYamux, then: Callable[[], object] = lambda: None
) -> Iterator[list[tuple[int, WriteStart]]]:
    """Note the length of each frame that a connection tries to write without waiting, and how far it came.

    Args:
        then: is called after each try.
    """
    frames: list[tuple[int, WriteStart]] = []
    start = connection.start_frame

    def note(frame: bytes) -> WriteStart:
        found = start(frame)
        frames.append((len(frame), found))
        then()
        return found

    connection.start_frame = note  # type: ignore[method-assign]
    try:
        yield frames
    finally:
        connection.start_frame = start  # type: ignore[method-assign]


class Taking:
    """A handler that reads when it may, and keeps what it has read."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.begin, self.found = trio.Event(), bytearray()
        if at_once:
            self.begin.set()

    async def __call__(self, stream: Stream) -> None:
        await self.begin.wait()
        while piece := await stream.receive_some(65536):
            self.found += piece


@asynccontextmanager
async def taken_at_once() -> AsyncIterator[tuple[Stream, GuardedYamux, Taking]]:
    """Yield a stream, its connection, and the handler that reads it at the other end."""
    async with two_hosts() as (here, there):
        taking = Taking(at_once=True)
        there.serve(HELD, taking)
        stream = await to(there, here, HELD)
        yield stream, connection_of(here, there.peer_id), taking


@watched
async def test_a_small_message_needs_no_task() -> None:
    async with taken_at_once() as (stream, connection, taking):
        secured: Any = connection.secured_conn
        assert isinstance(secured.conn.read_writer, EagerPackets)
        spawns = Spawns()
        trio.lowlevel.add_instrument(spawns)
        for message in numbered(20):
            await stream.send_all(message)
        trio.lowlevel.remove_instrument(spawns)
        assert spawns.names == []
        await eventually(lambda: taking.found == b"".join(numbered(20)))


@watched
async def test_messages_to_a_full_socket_arrive_in_order() -> None:
    """The system takes a part of a frame, and the rest of it goes before all others, of this stream and of another."""
    async with two_hosts() as (here, there):
        first, second = Taking(), Taking()
        there.serve(HELD, first)
        there.serve(SAYS, second)
        streams = [await to(there, here, protocol) for protocol in (HELD, SAYS)]
        connection = connection_of(here, there.peer_id)
        socket = connection.socket
        assert socket is not None
        socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 4096)
        messages = numbered(2000)

        async def send(stream: Stream) -> None:
            for message in messages:
                await stream.send_all(message)
            await stream.aclose()

        # The other side's window is larger than its socket's buffer, and so the socket is full first.
        with frames_of(connection) as frames:
            async with trio.open_nursery() as nursery:
                for stream in streams:
                    nursery.start_soon(send, stream)
                first.begin.set()
                second.begin.set()
        await eventually(lambda: len(first.found) == len(second.found) == MESSAGE_BYTES * len(messages))
        assert first.found == second.found == b"".join(messages)
        assert {started for _, started in frames} >= {WriteStart.PART, WriteStart.WHOLE}, (
            "the socket was full, and it was not"
        )


@watched
async def test_a_frame_goes_before_no_other_that_waits() -> None:
    """A close would otherwise arrive before a cancelled write, which is still finished."""
    async with two_hosts() as (here, there):
        there.serve(HELD, Taking())
        await to(there, here, HELD)
        connection = connection_of(here, there.peer_id)
        async with connection._write_lock:
            assert connection.start_frame(pings(1)) is WriteStart.NOTHING
        assert connection.start_frame(pings(1)) is WriteStart.WHOLE


@watched
async def test_a_message_arrives_though_its_sender_resets_the_stream_after_it() -> None:
    """A handler that answers and returns resets its stream: its answer is read first, and then the reset."""
    async with two_hosts() as (here, there):

        async def answer(stream: Stream) -> None:
            await stream.receive_some(1)
            await stream.send_all(b"that is all")

        there.serve(SAYS, answer)
        for piece in (100, 4):
            stream = await to(there, here, SAYS)
            await stream.send_all(b"?")
            stream_id = stream._stream_id  # type: ignore[attr-defined]
            connection = connection_of(here, there.peer_id)
            await eventually(partial(connection.is_reset, stream_id))
            found = bytearray()
            with pytest.raises(StreamBrokenError):
                await read_on(stream, piece, found)
            assert found == b"that is all"
            assert stream_id not in connection.streams, "its place is free"


@watched
async def test_a_message_to_a_lost_connection_breaks_its_stream() -> None:
    async with two_hosts() as (here, there):
        there.serve(HELD, Taking())
        stream = await to(there, here, HELD)
        socket = connection_of(here, there.peer_id).socket
        assert socket is not None
        socket.shutdown(trio.socket.SHUT_WR)
        with pytest.raises(StreamBrokenError):
            await stream.send_all(b"x")
        with pytest.raises(StreamBrokenError):
            await stream.send_all(b"x")


@watched
async def test_a_cancelled_caller_sends_nothing() -> None:
    async with taken_at_once() as (stream, _, taking):
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.send_all(b"not this")
        await stream.send_all(b"but this")
        await eventually(lambda: bool(taking.found))
        assert taking.found == b"but this"


@watched
async def test_a_long_message_needs_no_task_and_few_frames_while_the_system_takes_it() -> None:
    """Each piece but the first fills a message of Noise, and other tasks run after each.

    Now and then the system takes a part of a frame only, also with a large buffer. Such a message is sent once more.
    """
    async with two_hosts() as (here, there):
        taking = Taking(at_once=True)
        there.serve(HELD, taking)
        message = random.Random(1).randbytes(WRITE_PIECE_BYTES + 2 * LONG_PIECE_BYTES + 5000)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async def send_once() -> tuple[list[str], list[int]]:
            stream = await to(there, here, HELD)
            spawns, before = Spawns(), turns
            with frames_of(connection_of(here, there.peer_id)) as frames:
                trio.lowlevel.add_instrument(spawns)
                await stream.send_all(message)
                trio.lowlevel.remove_instrument(spawns)
            # A turn after each of the four pieces. trio runs tasks in a random order, so one may be counted later.
            assert turns - before >= 3
            return spawns.names, [count for count, _ in frames]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count_turns)
            await trio.lowlevel.checkpoint()
            for tries in range(1, 21):
                names, frames = await send_once()
                await eventually(lambda sent=tries * message: taking.found == sent)  # type: ignore[misc]
                if not any("_finish_write" in name for name in names):
                    break
            nursery.cancel_scope.cancel()
        assert not any("_finish_write" in name for name in names)
        assert [each for each in frames if each > HEADER_SIZE] == [
            WRITE_PIECE_BYTES + HEADER_SIZE,
            MAX_FRAME_BYTES,
            MAX_FRAME_BYTES,
            5000 + HEADER_SIZE,
        ]


@watched
async def test_pieces_are_short_again_after_a_wait() -> None:
    """Behind a long piece, other streams of a slow link would wait longer for their turn."""
    async with two_hosts() as (here, there):
        there.serve(HELD, Taking())
        stream = await to(there, here, HELD)
        connection = connection_of(here, there.peer_id)
        socket = connection.socket
        assert socket is not None
        socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 4096)
        # The handler reads nothing, and the window of 256 KiB closes.
        with frames_of(connection) as frames, trio.move_on_after(1.0):
            await stream.send_all(bytes(1_000_000))
        after_waits = [
            count for (_, before), (count, _) in itertools.pairwise(frames) if before is not WriteStart.WHOLE
        ]
        assert after_waits, "the socket was full"
        assert max(after_waits) <= WRITE_PIECE_BYTES + HEADER_SIZE


@watched
async def test_a_long_message_ends_between_two_pieces_when_its_sender_is_cancelled() -> None:
    async with two_hosts() as (here, there):
        first, second = Taking(at_once=True), Taking(at_once=True)
        there.serve(HELD, first)
        there.serve(SAYS, second)
        stream, other = await to(there, here, HELD), await to(there, here, SAYS)
        connection = connection_of(here, there.peer_id)
        with trio.CancelScope() as scope, frames_of(connection, scope.cancel):
            await stream.send_all(bytes(200_000))
        assert scope.cancelled_caught
        with pytest.raises(StreamBrokenError, match="cancelled half-way"):
            await stream.send_all(b"x")
        await other.send_all(b"the connection is whole")
        await eventually(lambda: second.found == b"the connection is whole")
        assert len(first.found) <= WRITE_PIECE_BYTES


@watched
async def test_a_message_that_was_sent_whole_is_not_broken_by_a_cancelled_sender() -> None:
    async with taken_at_once() as (stream, connection, taking):
        with trio.CancelScope() as scope, frames_of(connection, scope.cancel):
            await stream.send_all(bytes(SMALL_FRAME_BYTES + 1))  # an empty socket takes it at once
        await stream.send_all(b"more")
        await eventually(lambda: taking.found == bytes(SMALL_FRAME_BYTES + 1) + b"more")


@watched
async def test_a_piece_that_has_to_wait_is_short() -> None:
    """The other streams' writers wait behind it."""
    async with taken_at_once() as (stream, connection, taking):
        stream._piece_bytes = LONG_PIECE_BYTES  # type: ignore[attr-defined]
        message, short = random.Random(2).randbytes(LONG_PIECE_BYTES), WRITE_PIECE_BYTES + HEADER_SIZE
        with frames_of(connection) as frames:
            async with trio.open_nursery() as nursery, connection._write_lock:
                nursery.start_soon(stream.send_all, message)
                await eventually(lambda: len(frames) == 3)
        # The long piece is refused, then a short one, which a task writes when it is its turn.
        assert frames[:3] == [(MAX_FRAME_BYTES, WriteStart.NOTHING)] + [(short, WriteStart.NOTHING)] * 2
        assert max(count for count, _ in frames[3:]) <= short
        await eventually(lambda: taking.found == message)


def pings(count: int) -> bytes:
    """Frames that want a reply each, 12 bytes long."""
    return b"".join(
        struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_PING, FLAG_SYN, 0, number) for number in range(count)
    )


def openings(count: int) -> bytes:
    return b"".join(
        struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_WINDOW_UPDATE, FLAG_SYN, 2 * number + 1, 0)
        for number in range(count)
    )


@pytest.mark.parametrize("frames", [pings(60), openings(60)], ids=["pings", "openings"])
@watched
async def test_the_reader_ends_with_the_first_reply_to_a_lost_connection(frames: bytes) -> None:
    """libp2p would go on with all frames that have come, and wait 10 ms for each."""
    async with open_host() as host, raw_peer(host) as stranger:
        await eventually(partial(host.is_connected, stranger.peer_id))
        connection = connection_of(host, stranger.peer_id)
        socket = connection.socket
        assert socket is not None
        socket.shutdown(trio.socket.SHUT_WR)
        with frames_of(connection) as replies:
            await stranger.write_raw(frames)
            await eventually(connection.event_closed.is_set)
        assert len(replies) <= 2, "the reader's first reply, and at most a ping of this side"


@watched
async def test_a_message_full_of_pings_ends_the_connection_of_its_sender() -> None:
    """The reader answers a few at once, tasks a few more; no message keeps the event loop for thousands."""
    async with open_host() as host, raw_peer(host) as stranger:
        await eventually(partial(host.is_connected, stranger.peer_id))
        few = guarded_yamux.MAX_REPLIES_AT_ONCE
        await stranger.write_raw(pings(few))
        await stranger.until_pong(few - 1)
        connection = connection_of(host, stranger.peer_id)
        await stranger.write_raw(pings(few + guarded_yamux.MAX_REPLIES))
        await stranger.until_pong(few + guarded_yamux.MAX_REPLIES - 1)
        await stranger.write_raw(pings(few + guarded_yamux.MAX_REPLIES + 1))
        await eventually(connection.event_closed.is_set)
        await assert_serves_strangers(host)


@asynccontextmanager
async def reset_with_unread_bytes(
    host: Libp2pTransport, handler: Callable[[Stream], Awaitable[None]]
) -> AsyncIterator[GuardedYamux]:
    """Let a stranger send 100 kB on stream 1, and reset it."""
    host.serve(HELD, handler)
    async with raw_peer(host) as stranger:
        await stranger.open(1, HELD)
        await stranger.read_until(lambda kind, _flags, found, _length: (kind, found) == (TYPE_DATA, 1))
        for _ in range(2):
            await stranger.send_data(1, bytes(50_000))
        await stranger.write(TYPE_WINDOW_UPDATE, FLAG_RST, 1, 0)
        connection = connection_of(host, stranger.peer_id)
        await eventually(partial(connection.is_reset, 1))
        yield connection


@watched
async def test_unread_bytes_of_a_reset_stream_can_be_shed() -> None:
    """Otherwise the bytes of others would be shed in their place."""
    async with open_host() as host:
        begin, broken = trio.Event(), trio.Event()

        async def read_late(stream: Stream) -> None:
            await begin.wait()
            with pytest.raises(StreamBrokenError):
                await stream.receive_some(1)
            broken.set()

        async with reset_with_unread_bytes(host, read_late) as connection:
            assert connection.held() == 100_000
            assert connection.shed() == 100_000
            assert connection.held() == 0
            begin.set()
            await broken.wait()


@watched
async def test_a_message_that_is_assembled_from_a_reset_stream_is_counted() -> None:
    async with open_host() as host:
        begin, held = trio.Event(), list[int]()

        async def assemble(stream: Stream) -> None:
            await begin.wait()
            await stream.receive_some(40_000)
            stream.hold(40_000)
            held.append(connection.held())
            stream.hold(0)
            held.append(connection.held())

        async with reset_with_unread_bytes(host, assemble) as connection:
            begin.set()
            await eventually(lambda: held == [100_000, 60_000])


@watched
async def test_a_circuit_ends_with_a_reset() -> None:
    """Bytes that a relay still holds for it are not carried any more."""
    async with open_host() as host:
        begin, broken = trio.Event(), trio.Event()

        async def carry(stream: Stream) -> None:
            stream.carry_circuit()
            await begin.wait()
            with pytest.raises(StreamBrokenError):
                await stream.receive_some(1)
            broken.set()

        async with reset_with_unread_bytes(host, carry):
            begin.set()
            await broken.wait()
