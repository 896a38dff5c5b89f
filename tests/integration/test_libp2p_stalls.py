"""Peers that stop reading or answering: other streams go on, and the connection is closed in time."""

import pytest
import trio
from libp2p.stream_muxer.yamux.yamux import TYPE_DATA

from p2pavg.base.errors import StreamBrokenError, UnreachableError
from p2pavg.net.libp2p import connections
from p2pavg.net.libp2p import stream as libp2p_stream
from p2pavg.net.transport import Stream
from tests.integration.hosts import TIMEOUT, eventually, watched
from tests.integration.libp2p_hosts import (
    FLOOD,
    HELD,
    HUGE_WINDOW,
    connection_of,
    flood,
    host_that_cannot_write,
    open_host,
    until_it_cannot_write,
)
from tests.integration.raw_peers import line, raw_peer
from tests.transport_conformance import ECHO


@watched
async def test_a_host_that_cannot_write_still_reads() -> None:
    """With both directions busy, two readers that write would deadlock."""
    async with host_that_cannot_write() as (host, stranger):
        arrived = trio.Event()

        async def note(stream: Stream) -> None:
            await stream.receive_some(1)
            arrived.set()
            await trio.sleep_forever()

        host.serve(HELD, note)
        for number in range(100):
            await stranger.ping(number)
        await stranger.open(3, HELD)
        await stranger.send_data(3, b"x")
        # The host cannot send, so the stream stays unanswered. But the host has read up to here.
        muxed = connection_of(host, stranger.peer_id)
        await eventually(lambda: len(muxed.stream_buffers.get(3, b"")) > 0)
        assert not arrived.is_set()
        await stranger.until_pong(99)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stranger.read_forever)
            await arrived.wait()
            nursery.cancel_scope.cancel()


@watched
async def test_reading_does_not_wait_for_a_full_socket() -> None:
    async with open_host() as host:
        received: list[int] = []
        begin, enough = trio.Event(), trio.Event()

        async def take(stream: Stream) -> None:
            await begin.wait()
            while not enough.is_set():
                received.append(len(await stream.receive_some(65536)))
                if sum(received) >= 200_000:
                    enough.set()

        host.serve(HELD, take)
        host.serve(FLOOD, flood)
        async with raw_peer(host) as stranger:
            await stranger.open(1, HELD)
            await stranger.read_until(lambda kind, _flags, found, _length: (kind, found) == (TYPE_DATA, 1))
            await stranger.open(3, FLOOD, window=HUGE_WINDOW)
            await until_it_cannot_write(host, stranger)
            for _ in range(4):
                await stranger.send_data(1, bytes(50_000))
            begin.set()
            await enough.wait()


@watched
async def test_a_cancelled_write_leaves_no_half_frame() -> None:
    async with open_host() as host:
        scope, ended = trio.CancelScope(), trio.Event()

        async def flood_until_cancelled(stream: Stream) -> None:
            with scope:
                await flood(stream)
            ended.set()
            await trio.sleep_forever()

        host.serve(FLOOD, flood_until_cancelled)
        async with raw_peer(host) as stranger:
            await stranger.open(1, FLOOD, window=HUGE_WINDOW)
            await until_it_cannot_write(host, stranger)
            scope.cancel()
            await ended.wait()
            await stranger.ping(5)
            await stranger.until_pong(5)


@watched
async def test_a_peer_that_reads_nothing_for_long_loses_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libp2p_stream, "STALL_SECONDS", 0.2)
    async with open_host() as host:
        errors: list[Exception] = []

        async def try_to_flood(stream: Stream) -> None:
            try:
                await flood(stream)
            except StreamBrokenError as error:
                errors.append(error)
            await trio.sleep_forever()

        host.serve(FLOOD, try_to_flood)
        async with raw_peer(host) as stranger:
            await stranger.open(1, FLOOD, window=HUGE_WINDOW)
            await eventually(lambda: host.is_connected(stranger.peer_id))
            await eventually(lambda: not host.is_connected(stranger.peer_id))
        await eventually(lambda: len(errors) == 1)
        assert "took no data" in str(errors[0])


@watched
async def test_a_peer_that_answers_no_negotiation_loses_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "REPLY_SECONDS", 0.2)
    async with host_that_cannot_write() as (host, stranger):
        with pytest.raises(UnreachableError):
            await host.open_stream(stranger.peer_id, ECHO, timeout=TIMEOUT)
        await eventually(lambda: not host.is_connected(stranger.peer_id))


@watched
async def test_a_stream_opened_after_the_timeout_is_reset() -> None:
    async with open_host() as host, raw_peer(host) as stranger:
        await eventually(lambda: host.is_connected(stranger.peer_id))
        with pytest.raises(UnreachableError, match="within"):
            await host.open_stream(stranger.peer_id, ECHO, timeout=0.1)
        await stranger.send_data(2, line(b"/multistream/1.0.0") + line(ECHO.encode()))
        await stranger.until_reset(2)
        await eventually(lambda: not connection_of(host, stranger.peer_id).streams)
