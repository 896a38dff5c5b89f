"""One test for each guard around py-libp2p; each fails when its guard is taken away.

What any transport must do is in the conformance suite. Here are strangers that speak libp2p's own layers, and speak
them badly, and what becomes of tasks, sockets and memory.
"""

import logging
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import psutil
import pytest
import trio
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_RST,
    FLAG_SYN,
    TYPE_DATA,
    TYPE_WINDOW_UPDATE,
)
from libp2p.utils.varint import encode_delim
from multiaddr import Multiaddr
from trio.testing import wait_all_tasks_blocked

from p2pavg.errors import ListenError, StreamBrokenError, UnreachableError
from p2pavg.net.framing import receive_message, send_message
from p2pavg.net.libp2p import guards as guards
from p2pavg.net.libp2p import speed
from p2pavg.net.libp2p import transport as transport_module
from p2pavg.net.libp2p.guards import GuardedYamux
from p2pavg.net.libp2p.transport import Libp2pTransport, open_libp2p_transport
from p2pavg.net.limits.admission import ConnectionLimits
from p2pavg.net.transport import Stream, Transport
from p2pavg.testing.transport_conformance import ECHO, echo
from p2pavg_dht import Ed25519Signer
from tests.integration import hosts
from tests.integration.hosts import LOOPBACK, TIMEOUT, assert_serves, eventually, seeds, watched
from tests.integration.raw_peers import RawPeer, line, open_tcp, raw_peer

HELD = "/held/1"
FLOOD = "/flood/1"
HUGE_WINDOW = 1 << 30


def open_host(*listen: str) -> AbstractAsyncContextManager[Libp2pTransport]:
    """Everybody here can be dialled."""
    return hosts.open_host(*(listen or (LOOPBACK,)))


async def assert_serves_strangers(host: Transport) -> None:
    async with open_host() as stranger:
        await assert_serves(stranger, host)


def connection_of(host: Libp2pTransport, peer_id: str) -> GuardedYamux:
    (connection,) = host._swarm.get_connections(ID.from_base58(peer_id))
    return cast(GuardedYamux, connection.muxed_conn)


async def hold(_: Stream) -> None:
    await trio.sleep_forever()


async def flood(stream: Stream) -> None:
    await stream.send_all(bytes(256 * 1024 * 1024))


async def until_it_cannot_write(host: Libp2pTransport, stranger: RawPeer) -> None:
    await eventually(lambda: host.is_connected(stranger.peer_id))
    lock = connection_of(host, stranger.peer_id)._write_lock
    await eventually(lock.locked)
    await wait_all_tasks_blocked(0.05)
    assert lock.locked()


@asynccontextmanager
async def host_that_cannot_write() -> AsyncIterator[tuple[Libp2pTransport, RawPeer]]:
    """A host whose socket to a stranger is full: it floods a huge window, and the stranger reads nothing."""
    async with open_host() as host:
        host.serve(FLOOD, flood)
        async with raw_peer(host) as stranger:
            await stranger.open(1, FLOOD, window=HUGE_WINDOW)
            await until_it_cannot_write(host, stranger)
            yield host, stranger


# -- strangers that break the protocols


@watched
async def test_a_protocol_name_that_is_no_text_costs_its_stream_only() -> None:
    async with open_host() as host, raw_peer(host) as stranger:
        await stranger.write(TYPE_WINDOW_UPDATE, FLAG_SYN, 1, 0)
        await stranger.send_data(1, line(b"/multistream/1.0.0") + line(b"\xff\xfe\xfd"))
        await stranger.until_reset(1)
        await stranger.open(3, ECHO)
        await stranger.ping(7)
        await stranger.until_pong(7)
        await assert_serves_strangers(host)


@pytest.mark.parametrize("error", [KeyError("part"), AssertionError("never"), OSError("disk")])
@watched
async def test_a_mistake_of_ours_costs_its_stream_only_and_is_loud(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """With the peer's name and the traceback; what the network does is no error in the log."""

    async def fail(_: Stream) -> None:
        raise error

    async def end(_: Stream) -> None:
        raise StreamBrokenError("the other side went away")

    async with open_host() as host, open_host() as stranger:
        host.serve("/fails/1", fail)
        host.serve("/ends/1", end)
        for protocol, loud in (("/ends/1", False), ("/fails/1", True)):
            caplog.clear()
            stream = await stranger.open_stream(
                host.peer_id, protocol, addresses=host.addresses, timeout=TIMEOUT
            )
            with pytest.raises(StreamBrokenError):
                await stream.receive_some(1)
            errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
            assert bool(errors) == loud
            if loud:
                assert all(stranger.peer_id in record.getMessage() for record in errors)
                assert any(record.exc_info and record.exc_info[1] is error for record in errors)
        await assert_serves(stranger, host)


@pytest.mark.parametrize("announced", [5_000, 1 << 62])
@watched
async def test_a_long_line_of_negotiation_is_refused_unread(announced: int) -> None:
    """Before anybody has proved who it is."""
    prefix = bytearray()
    rest = announced
    while rest >= 0x80:
        prefix.append(rest & 0x7F | 0x80)
        rest >>= 7
    prefix.append(rest)
    async with open_host() as host:
        async with await open_tcp(host) as tcp:
            await tcp.send_all(line(b"/multistream/1.0.0") + bytes(prefix))
            while await tcp.receive_some(100):
                pass
        async with raw_peer(host) as stranger:
            await stranger.write(TYPE_WINDOW_UPDATE, FLAG_SYN, 1, 0)
            await stranger.send_data(1, line(b"/multistream/1.0.0") + bytes(prefix))
            await stranger.until_reset(1)
        await assert_serves_strangers(host)


@watched
async def test_garbage_on_the_socket_costs_its_connection_only() -> None:
    dice = random.Random(1)
    hello = line(b"/multistream/1.0.0")
    openings = (b"", hello, hello + line(b"/noise"), hello + line(b"/tls/1.0.0") + line(b"ls"))
    async with open_host() as host:
        await assert_serves_strangers(host)
        for opening in openings:
            for _ in range(10):
                async with await open_tcp(host) as tcp:
                    await tcp.send_all(opening + dice.randbytes(dice.randrange(1, 3000)))
        for _ in range(10):
            async with raw_peer(host) as stranger:
                await stranger.write_raw(dice.randbytes(dice.randrange(1, 3000)))
        for _ in range(10):
            async with raw_peer(host) as stranger:
                await stranger.tcp.send_all(dice.randbytes(dice.randrange(1, 3000)))
        await assert_serves_strangers(host)


@watched
async def test_a_server_that_answers_garbage_is_unreachable() -> None:
    async def answer(tcp: trio.SocketStream) -> None:
        await tcp.send_all(line(b"\xff\xfe"))
        await tcp.receive_some(1000)

    async with open_host() as host, trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, answer, 0)
        port = listeners[0].socket.getsockname()[1]
        stranger = Ed25519Signer(next(seeds)).peer_id
        with pytest.raises(UnreachableError, match="codec"):
            await host.dial(f"/ip4/127.0.0.1/tcp/{port}/p2p/{stranger}", timeout=TIMEOUT)
        nursery.cancel_scope.cancel()


@watched
async def test_no_protocol_is_offered_but_noise_and_ours() -> None:
    async with open_host() as host:
        for protocol in (b"/plaintext/2.0.0", b"/tls/1.0.0", b"/insecure/1.0.0"):
            async with await open_tcp(host) as tcp:
                await tcp.send_all(line(b"/multistream/1.0.0") + line(protocol))
                answer = b""
                while not answer.endswith(line(b"na")):
                    answer += await tcp.receive_some(100)
        async with open_host() as stranger:
            for name in ("/ipfs/id/1.0.0", "/ipfs/id/push/1.0.0", "/ipfs/ping/1.0.0"):
                with pytest.raises(UnreachableError, match="not supported"):
                    await stranger.open_stream(host.peer_id, name, addresses=host.addresses, timeout=TIMEOUT)


@watched
async def test_a_host_asks_nobody_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identify writes into the host what a stranger says of itself, in a system task that may end trio."""
    asked: list[object] = []

    async def ask(_: guards.GuardedHost, peer_id: object, *_rest: object) -> None:
        asked.append(peer_id)

    async with open_host() as here, open_host() as there:
        monkeypatch.setattr(guards.GuardedHost, "new_stream", ask)
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        await eventually(lambda: there.is_connected(here.peer_id))
        await wait_all_tasks_blocked()
        assert not asked


@watched
async def test_a_host_dials_nobody_on_its_own() -> None:
    async with open_host() as here, open_host() as there:
        here._swarm.peerstore.add_addrs(ID.from_base58(there.peer_id), [Multiaddr(there.addresses[0])], 600)
        await here._swarm.auto_connector.maybe_connect()
        assert not here.is_connected(there.peer_id)


# -- memory


@pytest.mark.parametrize("with_syn", [False, True])
@watched
async def test_a_sender_that_ignores_its_window_loses_the_stream(
    with_syn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "MAX_STREAM_BYTES", 300_000)
    monkeypatch.setattr(guards, "MAX_CONNECTION_BYTES", 1_000_000)
    async with open_host() as host, raw_peer(host) as stranger:
        host.serve(HELD, hold)
        await stranger.open(1, HELD)
        for _ in range(20):
            await stranger.send_data(1, bytes(60_000))
        await stranger.until_reset(1)
        buffers = connection_of(host, stranger.peer_id).stream_buffers
        for number in range(3, 43, 2):
            if with_syn:
                await stranger.write(TYPE_DATA, FLAG_SYN, number, 200_000, bytes(200_000))
            else:
                await stranger.open(number, HELD)
                await stranger.send_data(number, bytes(200_000))
        await stranger.until_reset(41)
        assert sum(map(len, buffers.values())) <= 1_000_000
        assert len(buffers) <= 5, "streams that were refused are remembered"
        await stranger.ping(1)
        await stranger.until_pong(1)
        await assert_serves_strangers(host)


@watched
async def test_more_inbound_streams_than_allowed_are_reset() -> None:
    async with open_host() as host, raw_peer(host) as stranger:
        host.serve(HELD, hold)
        for number in range(guards.MAX_INBOUND_STREAMS):
            await stranger.open(2 * number + 1, HELD)
        one_more = 2 * guards.MAX_INBOUND_STREAMS + 1
        await stranger.open(one_more, HELD)
        await stranger.until_reset(one_more)
        await stranger.write(TYPE_WINDOW_UPDATE, FLAG_RST, 1, 0)
        await assert_serves_strangers(host)


@watched
async def test_who_reads_no_replies_loses_the_connection() -> None:
    async with host_that_cannot_write() as (host, stranger):
        with suppress(IOException):  # it has lost the connection before it had asked for so many
            for number in range(guards.MAX_REPLIES + 10):
                await stranger.ping(number)
        await eventually(lambda: not host.is_connected(stranger.peer_id))
        await assert_serves_strangers(host)


@watched
async def test_a_window_does_not_grow_beyond_its_bound() -> None:
    class Unmeasured:
        """As much of a connection as a stream needs to grow its window: one with a long way."""

        stream_buffers: dict[int, bytearray] = {}  # noqa: RUF012
        _nursery = None

        def rtt(self) -> float:
            return 100.0

    stream = guards.PatientStream(1, cast(Any, Unmeasured()), True)
    for _ in range(200):
        stream.recv_window -= 200_000
        await stream._auto_tune_and_send_window_update(bytes_read=200_000)
    assert stream.target_recv_window == guards.MAX_WINDOW_BYTES


@watched
async def test_a_reset_stream_leaves_nothing_unread_behind() -> None:
    async with open_host() as here, open_host() as there:

        async def say_much(stream: Stream) -> None:
            await stream.send_all(bytes(200_000))
            await receive_message(stream)

        there.serve(FLOOD, say_much)
        for ends in ("reset", "aclose"):
            stream = await here.open_stream(there.peer_id, FLOOD, addresses=there.addresses, timeout=TIMEOUT)
            await stream.receive_some(1)
            near, far = connection_of(here, there.peer_id), connection_of(there, here.peer_id)
            await eventually(lambda near=near: any(near.stream_buffers.values()))  # type: ignore[misc]
            await getattr(stream, ends)()
            await eventually(lambda near=near, far=far: not near.streams and not far.streams)  # type: ignore[misc]
            assert not near.stream_buffers
            assert not near.stream_events


@pytest.mark.parametrize("end", ["aclose", "reset"])
@watched
async def test_a_stream_that_the_other_side_resets_is_forgotten(end: str) -> None:
    """With bytes unread, and whether it is then closed or reset here."""
    async with open_host() as host, raw_peer(host) as stranger:
        began, was_reset, gone = trio.Event(), trio.Event(), trio.Event()

        async def close(stream: Stream) -> None:
            await stream.receive_some(1)
            began.set()
            await was_reset.wait()
            await getattr(stream, end)()
            gone.set()

        host.serve(HELD, close)
        await stranger.open(1, HELD)
        await stranger.send_data(1, bytes(40_000))  # more than is read ahead
        await began.wait()
        muxed = connection_of(host, stranger.peer_id)
        await stranger.write(TYPE_WINDOW_UPDATE, FLAG_RST, 1, 0)
        await eventually(lambda: muxed.streams[1].reset_received)
        was_reset.set()
        await gone.wait()
        await eventually(lambda: not muxed.streams and not muxed.stream_buffers)


# -- one side that does not read


@watched
async def test_a_host_that_cannot_write_still_reads() -> None:
    """With both directions busy, two readers that write would wait for each other."""
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
        # Nothing of the host's goes out, so the stream is unanswered; it has been read to here all the same.
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
async def test_a_cancelled_write_tears_no_frame() -> None:
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
async def test_who_takes_nothing_for_long_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "STALL_SECONDS", 0.2)
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
async def test_who_answers_no_negotiation_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_NEGOTIATE_SECONDS", 0.2)
    async with host_that_cannot_write() as (host, stranger):
        with pytest.raises(UnreachableError):
            await host.open_stream(stranger.peer_id, ECHO, timeout=TIMEOUT)
        await eventually(lambda: not host.is_connected(stranger.peer_id))


@watched
async def test_a_stream_that_nobody_waits_for_any_more_is_reset() -> None:
    async with open_host() as host, raw_peer(host) as stranger:
        await eventually(lambda: host.is_connected(stranger.peer_id))
        with pytest.raises(UnreachableError, match="within"):
            await host.open_stream(stranger.peer_id, ECHO, timeout=0.1)
        await stranger.send_data(2, line(b"/multistream/1.0.0") + line(ECHO.encode()))
        await stranger.until_reset(2)
        await eventually(lambda: not connection_of(host, stranger.peer_id).streams)


# -- connections, tasks and sockets


def open_sockets() -> int:
    return psutil.Process().num_fds()


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def until_no_more_than(before: Sequence[int], held: Callable[[], Sequence[int]]) -> None:
    """What still closed when ``before`` was counted may be gone as well."""
    await eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


@watched
async def test_inbound_connections_give_back_what_they_took() -> None:
    """Slots, tasks and sockets, after many more than the host may have at once."""
    limits = ConnectionLimits(connections=60, inbound=60, per_host=60, per_prefix=60)
    async with open_libp2p_transport(seed=next(seeds), listen=[LOOPBACK], limits=limits) as host:
        host.serve(ECHO, echo)
        await assert_serves_strangers(host)
        await eventually(lambda: not host._swarm.get_connections())
        before = tasks(), open_sockets()
        for _ in range(300):
            async with raw_peer(host) as stranger:
                await stranger.open(1, ECHO)
            await eventually(lambda: len(host._swarm.get_connections()) < 50)
        await until_no_more_than(before, lambda: (tasks(), open_sockets()))
        assert host._swarm._inbound_limiter.borrowed_tokens == 0
        await assert_serves_strangers(host)


@watched
async def test_calls_over_one_connection_leave_nothing_behind() -> None:
    async with open_host() as here, open_host() as there:
        await assert_serves(here, there)
        near, far = connection_of(here, there.peer_id), connection_of(there, here.peer_id)

        def held() -> Sequence[int]:
            return (
                tasks(),
                open_sockets(),
                *(
                    len(kept)
                    for conn in (near, far)
                    for kept in (conn.streams, conn.stream_buffers, conn.stream_events)
                ),
                -near.stream_backlog_semaphore.value,
                far.inbound_streams,
            )

        await eventually(lambda: not near.streams and not far.streams)
        before = held()
        for number in range(200):
            stream = await here.open_stream(there.peer_id, ECHO, timeout=TIMEOUT)
            await send_message(stream, b"x" * (number + 1))
            assert await receive_message(stream) == b"x" * (number + 1)
            await (stream.aclose() if number % 2 else stream.reset())
        await until_no_more_than(before, held)


@pytest.mark.parametrize("count", [1, 5])
@watched
async def test_closing_leaves_no_socket_open(count: int) -> None:
    async with AsyncExitStack() as others:
        peers = [await others.enter_async_context(open_host()) for _ in range(count)]
        before = open_sockets()
        with trio.CancelScope() as closing:
            async with open_host() as host:
                for peer in peers:
                    await assert_serves(host, peer)
                closing.deadline = trio.current_time() + 3.0
        assert not closing.cancel_called, "closing takes long"
        await eventually(lambda: not any(peer._swarm.get_connections() for peer in peers))
        assert open_sockets() <= before


@watched
async def test_closing_does_not_wait_for_one_that_reads_nothing() -> None:
    async with AsyncExitStack() as strangers:
        with trio.CancelScope() as closing:
            async with open_host() as host:
                host.serve(FLOOD, flood)
                stranger = await strangers.enter_async_context(raw_peer(host))
                await stranger.open(1, FLOOD, window=HUGE_WINDOW)
                await until_it_cannot_write(host, stranger)
                before = open_sockets()
                closing.deadline = trio.current_time() + 5.0
        assert not closing.cancel_called, "closing takes long"
        assert open_sockets() <= before - 2  # its listener and its connection


@watched
async def test_a_dial_that_is_given_up_leaves_no_socket_open() -> None:
    """A server that accepts and says nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        stranger = Ed25519Signer(next(seeds)).peer_id
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{stranger}"
        async with open_host() as host:
            before = tasks(), open_sockets()
            with pytest.raises(UnreachableError, match="within"):
                await host.dial(address, timeout=0.1)
            await until_no_more_than(before, lambda: (tasks(), open_sockets()))


@watched
async def test_an_inbound_connection_ends_the_waiting_for_a_dial() -> None:
    """A router that drops what it does not know: our dial is never answered, the other's is."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with open_host() as here, open_host() as there:
            address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{there.peer_id}"
            streams: list[Stream] = []

            async def open_it() -> None:
                streams.append(
                    await here.open_stream(
                        there.peer_id, ECHO, addresses=[address], timeout=25.0, wait_inbound=True
                    )
                )

            with trio.fail_after(10.0):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(open_it)
                    await wait_all_tasks_blocked()
                    await there.dial(here.addresses[0], timeout=TIMEOUT)
            await send_message(streams[0], b"over the other's connection")
            assert await receive_message(streams[0]) == b"over the other's connection"


@watched
async def test_a_failed_dial_is_not_held_against_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a dial does not go through what blacklists for a minute and waits for a quarter of a second."""

    async def refuse(*_: object) -> None:
        raise AssertionError("dial_peer was called")

    monkeypatch.setattr(guards.GuardedSwarm, "dial_peer", refuse)
    seed = next(seeds)
    async with open_host() as here:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            listen = f"/ip4/127.0.0.1/tcp/{bound.getsockname()[1]}"
            address = f"{listen}/p2p/{Ed25519Signer(seed).peer_id}"
            with pytest.raises(UnreachableError, match="Connection refused"):
                await here.dial(address, timeout=TIMEOUT)
        async with open_libp2p_transport(seed=seed, listen=[listen]) as there:
            there.serve(ECHO, echo)
            assert await here.dial(address, timeout=TIMEOUT) == there.peer_id
            await assert_serves(here, there)


# -- listening


@watched
async def test_a_wildcard_announces_the_interfaces_there_are() -> None:
    async with open_host("/ip4/0.0.0.0/tcp/0") as host, open_host() as stranger:
        hosts = [address.split("/")[2] for address in host.addresses]
        own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
        assert "127.0.0.1" in hosts
        assert set(hosts) <= own
        assert hosts[-1].startswith("127."), "loopback is the last to try"
        await stranger.dial(host.addresses[-1], timeout=TIMEOUT)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
@watched
async def test_listening_on_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    async with open_host("/ip6/::1/tcp/0") as host:
        assert host.addresses[0].startswith("/ip6/::1/tcp/")
        await assert_serves_strangers(host)


@watched
async def test_a_busy_port_is_named() -> None:
    async with open_host() as host:
        listen = host.addresses[0].partition("/p2p/")[0]
        with pytest.raises(ListenError, match=f"{listen}.*in use"):
            async with open_host(listen):
                pass


@watched
async def test_an_address_of_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = "/ip4/203.0.113.7/tcp/0"
    for check_free in (transport_module._check_free, lambda _: None):
        monkeypatch.setattr(transport_module, "_check_free", check_free)
        with pytest.raises(ListenError, match=listen):
            async with open_host(listen):
                pass


# -- the process around it

PREAMBLE = """
import logging, os, sys, trio
from p2pavg.net.libp2p.transport import open_libp2p_transport
from p2pavg.testing.transport_conformance import ECHO, echo
from p2pavg.net.framing import receive_message, send_message
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
async def assert_serves(here, there):
    stream = await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=20)
    await send_message(stream, b"x")
    assert await receive_message(stream) == b"x"
    await stream.aclose()
"""

FORKS = """
async def main():
    async with (
        open_libp2p_transport(seed=bytes(31) + b"1", listen=LISTEN) as here,
        open_libp2p_transport(seed=bytes(31) + b"2", listen=LISTEN) as there,
    ):
        there.serve(ECHO, echo)
        await assert_serves(here, there)
        sockets = [found.fileno() for peer in (here, there) for found in peer.sockets()]
        assert len(sockets) == 4, sockets
        child = os.fork()
        if child == 0:
            still_open = []
            for descriptor in sockets:
                try:
                    os.fstat(descriptor)
                except OSError:
                    continue
                still_open.append(descriptor)
            here_too = [found.fileno() for peer in (here, there) for found in peer.sockets()]
            os._exit(0 if not still_open and here_too == [-1] * 4 else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "the child holds sockets"
        await assert_serves(here, there)
trio.run(main)
"""

LOGS = """
async def main():
    async with (
        open_libp2p_transport(seed=bytes(31) + b"1", listen=LISTEN) as here,
        open_libp2p_transport(seed=bytes(31) + b"2", listen=LISTEN) as there,
    ):
        there.serve(ECHO, echo)
        await assert_serves(here, there)
        try:
            await here.dial("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWCtP28TbfSAaThWi7cyVBp9TnvqxfcKbKoRgpDLMiTdPT", timeout=20)
        except Exception as error:
            assert type(error).__name__ == "UnreachableError", error
        await here.disconnect(there.peer_id)
trio.run(main)
assert logging.getLogger().handlers == [], logging.getLogger().handlers
"""


def run_script(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + text], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_holds_no_socket() -> None:
    finished = run_script(FORKS)
    assert finished.returncode == 0, finished.stderr


def test_nothing_is_written_and_no_handler_installed() -> None:
    """libp2p logs a refused dial as an error, and calls logging.warning() on the root logger."""
    finished = run_script(LOGS)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert logging.getLogger("libp2p").handlers


# -- what a stream costs


@watched
async def test_a_stream_is_answered_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """libp2p sends its greeting and its answer in one each."""
    answers: list[bytes] = []
    send = speed._GreetsLater._send

    async def note(communicator: speed._GreetsLater, line: bytes) -> None:
        answers.append(line)
        await send(communicator, line)

    monkeypatch.setattr(speed._GreetsLater, "_send", note)
    async with open_host() as here, open_host() as there:
        there.serve(HELD, Stream.reset)
        await here.open_stream(there.peer_id, HELD, addresses=there.addresses, timeout=TIMEOUT)
    assert answers == [encode_delim(HELD.encode())]
