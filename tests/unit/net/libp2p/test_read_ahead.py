"""The stream that reads ahead returns the same bytes as libp2p's, with fewer reads of the socket."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IncompleteReadError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from trio.testing import memory_stream_pair, wait_all_tasks_blocked

from p2pavg.net.libp2p.speed import EagerPackets, ReadAheadStream

WATCHDOG_SECONDS = 120.0
# Once the replacements are installed, libp2p's module has the eager class under the name of the original one.
Original = cast(type[EagerPackets], EagerPackets.__bases__[0])


class Counting(trio.abc.HalfCloseableStream):
    """One end of a stream in memory that counts its reads."""

    def __init__(self, stream: trio.StapledStream) -> None:
        self._stream = stream
        self.reads = 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self.reads += 1
        return bytes(await self._stream.receive_some(max_bytes))

    async def aclose(self) -> None:
        await self._stream.aclose()


def ahead(stream: trio.StapledStream) -> tuple[ReadAheadStream, Counting]:
    counting = Counting(stream)
    plain = TrioTCPStream(cast(trio.SocketStream, counting))
    found = ReadAheadStream.of(plain)
    assert cast(object, found) is plain
    return found, counting


async def read_all(stream: ReadWriteCloser, sizes: Sequence[int | None]) -> bytes:
    """Read pieces of these sizes in turn until the end, and check that none is larger than requested."""
    found = bytearray()
    for turn in range(100_000):
        size = sizes[turn % len(sizes)]
        piece = await stream.read(size)
        assert size is None or len(piece) <= size
        if not piece and size != 0:
            break
        found += piece
    assert await stream.read(5) == b"", "bytes were read after the end"
    return bytes(found)


@given(
    written=st.lists(st.binary(max_size=40), max_size=20),
    sizes=st.lists(st.one_of(st.none(), st.integers(0, 50)), min_size=1, max_size=6).filter(
        lambda sizes: any(size != 0 for size in sizes)
    ),
)
@settings(max_examples=60)
async def test_reads_of_any_size_return_the_same_bytes(written: list[bytes], sizes: list[int | None]) -> None:
    results = []
    for kind in (ReadAheadStream.of, lambda stream: stream):
        near, far = memory_stream_pair()
        stream = kind(TrioTCPStream(cast(trio.SocketStream, near)))

        async def write(far: trio.StapledStream = far) -> None:
            for piece in written:
                await far.send_all(piece)
                await trio.lowlevel.checkpoint()
            await far.send_eof()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            results.append(await read_all(stream, sizes))
    assert results == [b"".join(written)] * 2


@given(
    messages=st.lists(st.binary(max_size=300), max_size=8),
    cuts=st.lists(st.integers(0, 700), max_size=8),
    left=st.binary(max_size=1),
)
@settings(max_examples=60)
async def test_messages_of_noise_are_the_same_however_they_are_cut(
    messages: list[bytes], cuts: list[int], left: bytes
) -> None:
    """Also the end of the stream within a message is an error of the same kind."""
    sent = b"".join(len(message).to_bytes(2, "big") + message for message in messages) + left
    places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    results: list[list[bytes]] = []
    for kind in (EagerPackets, Original):
        near, far = memory_stream_pair()
        stream, _ = ahead(near)
        reader, found = kind(RawConnection(stream, True)), list[bytes]()

        async def write(far: trio.StapledStream = far) -> None:
            for begin, end in itertools.pairwise(places):
                await far.send_all(sent[begin:end])
                await trio.lowlevel.checkpoint()
            await far.send_eof()

        async def read(reader: EagerPackets = reader, found: list[bytes] = found) -> None:
            while True:
                found.append(await reader.read_msg())

        with pytest.RaisesGroup(IncompleteReadError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                nursery.start_soon(read)
        results.append(found)
    assert results == [messages, messages]


async def test_a_message_of_noise_is_one_read_of_the_socket() -> None:
    near, far = memory_stream_pair()
    stream, counting = ahead(near)
    await far.send_all(b"\x00\x05hello\x00\x02yo\x00\x03on")
    reader = EagerPackets(RawConnection(stream, True))
    assert [await reader.read_msg(), await reader.read_msg()] == [b"hello", b"yo"]
    assert counting.reads == 1
    assert await stream.read_packet() is None, "a part of a message is left to the original"
    await far.send_all(b"e")
    assert await reader.read_msg() == b"one"


async def test_a_read_of_zero_bytes_reads_nothing() -> None:
    near, _far = memory_stream_pair()
    stream, counting = ahead(near)
    with trio.fail_after(WATCHDOG_SECONDS):
        assert await stream.read(0) == b""
    assert counting.reads == 0


async def test_a_read_that_is_cancelled_loses_nothing() -> None:
    near, far = memory_stream_pair()
    stream, _ = ahead(near)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.read, 3)
            await wait_all_tasks_blocked()
            scope.cancel()
    await far.send_all(b"hello")
    assert await stream.read(3) == b"hel"
    with trio.CancelScope() as scope:
        scope.cancel()
        assert await stream.read(1) == b"l", "the read neither waits nor ends"
    assert await stream.read(3) == b"o"


async def test_two_concurrent_reads_lose_nothing() -> None:
    near, far = memory_stream_pair()
    stream, _ = ahead(near)
    found: list[bytes] = []

    async def read() -> None:
        found.append(await stream.read(2))

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
        await far.send_all(b"abcd")
        await wait_all_tasks_blocked()
        await far.send_all(b"efgh")
    found.append(await stream.read(100))
    rest = b"" if b"".join(found).endswith(b"h") else await stream.read(100)
    assert b"".join([*found, rest]) == b"abcdefgh"


async def test_a_write_that_is_cancelled_half_way_closes_the_connection() -> None:
    """Half a frame was sent, perhaps of another stream, whose writer would not hear of it."""
    near, far = trio.socket.socketpair()
    with far:
        stream = ReadAheadStream.of(TrioTCPStream(trio.SocketStream(near)))
        with trio.move_on_after(0.0) as before:
            await stream.write(b"nothing of this")
        assert before.cancelled_caught
        assert near.fileno() >= 0, "nothing was sent, and nothing is lost"
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write, bytes(2**24))
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert near.fileno() == -1
        assert await far.recv(1) == b"\0"
