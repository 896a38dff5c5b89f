"""Connections to the monitor: the end of those that neither send nor read, and the budget of their hosts."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, memory_stream_one_way_pair

from p2pavg.base.limits import REPLY_SECONDS, STALL_SECONDS
from p2pavg.net.limits.call_budget import CallBudget, CallRates
from p2pavg.tools.monitor import serving
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


async def test_slow_client_gets_all_and_a_deaf_one_is_cut_off(autojump_clock: MockClock) -> None:
    stream = Stream(seconds_a_piece=0.9 * REPLY_SECONDS)
    await connection_of(stream).send_all(bytes(2 * PIECE_BYTES + 1))
    assert stream.pieces == [PIECE_BYTES, PIECE_BYTES, 1]
    deaf = Stream(seconds_a_piece=1e6)
    begun = trio.current_time()
    # The server of HTTP sends under a shield.
    with trio.CancelScope(shield=True), pytest.raises(trio.BrokenResourceError, match="nothing for 10 s"):
        await connection_of(deaf).send_all(b"x")
    assert trio.current_time() - begun == pytest.approx(REPLY_SECONDS)
    assert deaf.socket.is_closed


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


async def test_connections_beyond_the_budget_of_their_host_are_closed_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = CallRates(peer_seconds=1e-6, peer_burst_seconds=1e-6)
    monkeypatch.setattr(serving, "CallBudget", lambda: CallBudget(rates))
    answered = 0

    async def count(connection: Connection) -> None:
        nonlocal answered
        answered += 1
        await connection.send_all(b"hello")

    listener = socket.create_server(("127.0.0.1", 0))
    with trio.fail_after(60.0):
        async with serving.serving(listener, count):
            for _ in range(3):
                async with await trio.open_tcp_stream(*listener.getsockname()) as stream:
                    with suppress(trio.BrokenResourceError):
                        assert await stream.receive_some(100) in (b"", b"hello")
    assert answered == 1
