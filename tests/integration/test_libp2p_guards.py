"""Strangers that break the protocols of libp2p: each test fails without its guard.

The conformance suite covers the duties of any transport. These tests break the rules of libp2p's own layers.
"""

import logging
import random
from contextlib import suppress
from typing import Any, cast

import pytest
import trio
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import FLAG_RST, FLAG_SYN, TYPE_DATA, TYPE_WINDOW_UPDATE
from libp2p.utils.varint import encode_delim
from multiaddr import Multiaddr
from trio.testing import wait_all_tasks_blocked

from p2pavg.base.errors import StreamBrokenError, UnreachableError
from p2pavg.net.libp2p import guarded_yamux, speed
from p2pavg.net.libp2p import host as guards
from p2pavg.net.libp2p.patient_stream import PatientStream
from p2pavg.net.transport import Stream, receive_message
from p2pavg_dht import Ed25519Signer
from tests.integration.hosts import TIMEOUT, assert_serves, eventually, seeds, watched
from tests.integration.libp2p_hosts import (
    FLOOD,
    HELD,
    assert_serves_strangers,
    connection_of,
    hold,
    host_that_cannot_write,
    open_host,
)
from tests.integration.raw_peers import line, open_tcp, raw_peer
from tests.transport_conformance import ECHO

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
async def test_a_bug_of_a_handler_costs_its_stream_only_and_is_logged(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the peer's id and the traceback. Faults of the network are not logged as errors."""

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
    """The line comes before the peer has proved its identity."""
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
            for _ in range(4):
                async with await open_tcp(host) as tcp:
                    await tcp.send_all(opening + dice.randbytes(dice.randrange(1, 3000)))
        for _ in range(4):
            async with raw_peer(host) as stranger:
                await stranger.write_raw(dice.randbytes(dice.randrange(1, 3000)))
        for _ in range(4):
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
async def test_only_noise_and_our_protocols_are_offered() -> None:
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
async def test_a_host_sends_no_identify_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identify would write a stranger's claims into the host, in a system task that may end trio."""
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
async def test_a_host_dials_no_peer_on_its_own() -> None:
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
    monkeypatch.setattr(guarded_yamux, "MAX_STREAM_BYTES", 300_000)
    monkeypatch.setattr(guarded_yamux, "MAX_CONNECTION_BYTES", 1_000_000)
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
        assert len(buffers) <= 5, "refused streams must be forgotten"
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
async def test_a_peer_that_reads_no_replies_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.net.libp2p.stream.STALL_SECONDS", 1e9)  # it is not lost as a stalled one
    async with host_that_cannot_write() as (host, stranger):
        with suppress(IOException):  # the connection may be lost before all pings are sent
            for number in range(guarded_yamux.MAX_REPLIES + 10):
                await stranger.ping(number)
        await eventually(lambda: not host.is_connected(stranger.peer_id))
        await assert_serves_strangers(host)


@watched
async def test_a_window_does_not_grow_beyond_its_bound() -> None:
    class Unmeasured:
        """The part of a connection that a stream needs to grow its window, with a long round trip."""

        stream_buffers: dict[int, bytearray] = {}  # noqa: RUF012
        _nursery = None

        def rtt(self) -> float:
            return 100.0

    stream = PatientStream(1, cast(Any, Unmeasured()), True)
    for _ in range(200):
        stream.recv_window -= 200_000
        await stream._auto_tune_and_send_window_update(bytes_read=200_000)
    assert stream.target_recv_window == guarded_yamux.MAX_WINDOW_BYTES


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
    """The stream has unread bytes, and is then closed or reset by this side."""
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
        await stranger.send_data(1, bytes(40_000))  # more than the stream reads ahead
        await began.wait()
        muxed = connection_of(host, stranger.peer_id)
        await stranger.write(TYPE_WINDOW_UPDATE, FLAG_RST, 1, 0)
        await eventually(lambda: muxed.streams[1].reset_received)
        was_reset.set()
        await gone.wait()
        await eventually(lambda: not muxed.streams and not muxed.stream_buffers)


# -- what a stream costs


@watched
async def test_a_stream_is_answered_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """libp2p sends its greeting and its answer in two frames."""
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
