"""A connection to the monitor ends when its client neither sends nor reads. The clock jumps."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, memory_stream_one_way_pair

from p2pavg.base.limits import REPLY_SECONDS, STALL_SECONDS
from p2pavg.tools.monitor.serving import PIECE_BYTES, Connection


class Socket:
    """Notes whether it was closed."""

    is_closed = False

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.is_closed = True


class Stream:
    """A client that takes each piece after a while, and sends what the test gives it."""

    def __init__(self, seconds_a_piece: float = 0.0) -> None:
        self.socket = Socket()
        self.pieces: list[int] = []
        self.client, self._received = memory_stream_one_way_pair()
        self._seconds = seconds_a_piece

    async def send_all(self, data: bytes) -> None:
        await trio.sleep(self._seconds)
        self.pieces.append(len(data))

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._received.receive_some(max_bytes)


def connection_of(stream: Stream) -> Connection:
    return Connection(cast(Any, stream))


async def test_client_that_takes_nothing_is_cut_off_also_under_a_shield(autojump_clock: MockClock) -> None:
    stream = Stream(seconds_a_piece=1e6)
    begun = trio.current_time()
    with (
        trio.CancelScope(shield=True),
        pytest.raises(trio.BrokenResourceError, match="read nothing for 10 s"),
    ):
        await connection_of(stream).send_all(b"x")
    assert trio.current_time() - begun == pytest.approx(REPLY_SECONDS)
    assert stream.socket.is_closed


async def test_slow_client_that_takes_each_piece_in_time_gets_all(autojump_clock: MockClock) -> None:
    stream = Stream(seconds_a_piece=0.9 * REPLY_SECONDS)
    await connection_of(stream).send_all(bytes(2 * PIECE_BYTES + 1))
    assert stream.pieces == [PIECE_BYTES, PIECE_BYTES, 1]


async def test_silent_connection_is_closed(autojump_clock: MockClock) -> None:
    stream = Stream()
    begun = trio.current_time()
    with pytest.raises(trio.BrokenResourceError, match="nothing has moved for 30 s"):
        await connection_of(stream).receive_some()
    assert trio.current_time() - begun == pytest.approx(STALL_SECONDS)
    assert stream.socket.is_closed


async def test_connection_on_which_something_is_sent_stays_open(autojump_clock: MockClock) -> None:
    stream = Stream()
    connection = connection_of(stream)
    received: list[bytes] = []

    async def receive() -> None:
        received.append(bytes(await connection.receive_some()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        for _ in range(5):
            await trio.sleep(0.9 * STALL_SECONDS)
            await connection.send_all(b"still here")
        await stream.client.send_all(b"hello")
    assert received == [b"hello"]
    assert not stream.socket.is_closed
