"""Small messages are written without a task or a wait, and nothing is lost, doubled or overtaken where that ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

from p2pavg.errors import StreamBrokenError
from p2pavg.net.libp2p.speed import EagerPackets, ReadAheadStream, Started
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.transport import Stream
from tests.integration.hosts import TIMEOUT, eventually, watched
from tests.integration.libp2p_hosts import HELD, connection_of, open_host

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


def carrier(host: Libp2pTransport, peer_id: str) -> ReadAheadStream:
    found = connection_of(host, peer_id).carrier
    assert isinstance(found, ReadAheadStream)
    return found


def numbered(count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") * (MESSAGE_BYTES // 4) for number in range(count)]


async def read_on(stream: Stream, piece: int, found: bytearray) -> None:
    while data := await stream.receive_some(piece):
        found += data


class Taking:
    """A handler that reads when it may, and keeps what it has read."""

    def __init__(self) -> None:
        self.begin, self.found = trio.Event(), bytearray()

    async def __call__(self, stream: Stream) -> None:
        await self.begin.wait()
        while piece := await stream.receive_some(65536):
            self.found += piece


@watched
async def test_a_small_message_needs_no_task() -> None:
    async with two_hosts() as (here, there):
        taking = Taking()
        taking.begin.set()
        there.serve(HELD, taking)
        stream = await to(there, here, HELD)
        secured: Any = connection_of(here, there.peer_id).secured_conn
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
        started: set[Started] = set()
        start = connection.start_frame

        def note(frame: bytes) -> Started:
            started.add(found := start(frame))
            return found

        connection.start_frame = note  # type: ignore[method-assign]
        socket = connection.socket
        assert socket is not None
        socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 4096)
        messages = numbered(2000)

        async def send(stream: Stream) -> None:
            for message in messages:
                await stream.send_all(message)
            await stream.aclose()

        # The other side's window is larger than its socket's buffer, and so the socket is full first.
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(send, stream)
            first.begin.set()
            second.begin.set()
        await eventually(lambda: len(first.found) == len(second.found) == MESSAGE_BYTES * len(messages))
        assert first.found == second.found == b"".join(messages)
        assert started >= {Started.PART, Started.WHOLE}, "the socket was full, and it was not"


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
    async with two_hosts() as (here, there):
        taking = Taking()
        taking.begin.set()
        there.serve(HELD, taking)
        stream = await to(there, here, HELD)
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.send_all(b"not this")
        await stream.send_all(b"but this")
        await eventually(lambda: bool(taking.found))
        assert taking.found == b"but this"
