"""Direct lanes between real transports on loopback: what arrives, who gets in, and what is left of them."""

import fcntl
import functools
import logging
import os
import select
import socket
import ssl
import struct
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import psutil
import pytest
import trio
import trio.testing

from p2pavg.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.net import direct, doorway, lane_inbound, lane_limits, sniffing
from p2pavg.net.certificates import OwnCertificate
from p2pavg.net.direct import LaneKeeper
from p2pavg.net.framing import receive_message, send_message
from p2pavg.net.lane_messages import PROTOCOL, Ask, Back, Offer, Verdict
from p2pavg.net.libp2p import Libp2pTransport, open_libp2p_transport
from p2pavg.net.tls_lane import TlsLane
from p2pavg.net.transport import DirectLane, Stream, Transport
from p2pavg.net.wire import pack
from p2pavg.testing import MemoryNetwork
from p2pavg.testing.transport_conformance import ECHO, echo
from p2pavg_dht import Ed25519Signer

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TIMEOUT = 20.0

_seeds = iter(number.to_bytes(32, "big") for number in range(500_000, 600_000))


def watched(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """What is missing shows as waiting for ever."""

    @functools.wraps(test)
    async def bounded(*args: Any, **kwargs: Any) -> None:
        with trio.fail_after(30.0):
            await test(*args, **kwargs)

    return bounded


@asynccontextmanager
async def open_host(*listen: str) -> AsyncIterator[Libp2pTransport]:
    async with open_libp2p_transport(seed=next(_seeds), listen=listen) as host:
        host.serve(ECHO, echo)
        yield host


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        yield here, there


async def eventually(condition: Callable[[], bool]) -> None:
    """For what no event announces; the watchdog bounds it."""
    while not condition():
        await trio.sleep(0.005)


in_thread = trio.to_thread.run_sync


class Inbox:
    """Serves lanes: messages of a length and a body, each kept and acknowledged."""

    def __init__(self) -> None:
        self.lanes: list[TlsLane] = []
        self._send, self.messages = trio.open_memory_channel[bytes](1000)

    async def __call__(self, lane: DirectLane) -> None:
        assert isinstance(lane, TlsLane)
        self.lanes.append(lane)
        self._send.send_nowait(await in_thread(read_message, lane))
        with suppress(StreamBrokenError):  # the sender may have gone
            await in_thread(lane.acknowledge)


def read_message(lane: DirectLane) -> bytes:
    header = bytearray(8)
    lane.receive_into(memoryview(header))
    body = bytearray(int.from_bytes(header, "big"))
    lane.receive_into(memoryview(body))
    return bytes(body)


async def post(lane: DirectLane, body: bytes) -> None:
    def send() -> None:
        lane.send(len(body).to_bytes(8, "big"))
        lane.send(body)

    await in_thread(send)


async def lane_to(here: Transport, there: Transport) -> TlsLane:
    lane = await here.open_lane(there.peer_id, addresses=there.addresses, timeout=TIMEOUT)
    assert isinstance(lane, TlsLane)
    return lane


def keeper(host: Libp2pTransport) -> LaneKeeper:
    return host._lanes


def port_of(host: Transport) -> int:
    return int(host.addresses[0].split("/")[4])


async def assert_serves(here: Transport, there: Transport) -> None:
    stream = await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)
    await send_message(stream, b"are you there?")
    assert await receive_message(stream) == b"are you there?"
    await stream.aclose()


async def assert_goes_on(host: Libp2pTransport) -> None:
    """It still speaks libp2p, and still gives lanes, to somebody new."""
    inbox = Inbox()
    host.serve_lanes(inbox)
    async with open_host() as stranger:
        await assert_serves(stranger, host)
        await post(await lane_to(stranger, host), b"hello")
        assert await inbox.messages.receive() == b"hello"


# -- what arrives


@watched
async def test_bytes_arrive_whole_and_in_order() -> None:
    async with pair() as (here, there):
        inbox = Inbox()
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        bodies = [os.urandom(size) for size in (1, 0, 16_383, 16_385, 1_000_003, 5 * 1024 * 1024 + 7)]
        for body in bodies:
            await post(lane, body)
        assert [await inbox.messages.receive() for _ in bodies] == bodies
        await eventually(lambda: lane.unsent() == 0)
        assert lane.remote == there.peer_id
        assert {found.remote for found in inbox.lanes} == {here.peer_id}
        assert lane.bytes_sent == inbox.lanes[0].bytes_received == sum(map(len, bodies)) + 8 * len(bodies)


@watched
async def test_a_kept_lane_is_used_again() -> None:
    async with pair() as (here, there):
        inbox = Inbox()
        there.serve_lanes(inbox)
        first = await lane_to(here, there)
        for number in range(5):
            await post(first, bytes([number]))
            await first.acknowledged()
            here.keep_lane(first)
            assert await lane_to(here, there) is first
        assert [await inbox.messages.receive() for _ in range(5)] == [bytes([number]) for number in range(5)]
        assert len(set(map(id, inbox.lanes))) == 1
        other = await lane_to(here, there)
        assert other is not first
        assert len(keeper(here).lanes) == len(keeper(there).lanes) == 2


@watched
async def test_lanes_wait_until_somebody_serves_them() -> None:
    async with pair() as (here, there):
        await post(await lane_to(here, there), b"early")
        inbox = Inbox()
        there.serve_lanes(inbox)
        assert await inbox.messages.receive() == b"early"


@watched
async def test_bytes_that_are_decrypted_already_wake_the_handler() -> None:
    """Two messages in one TLS record: the socket has nothing more to say after the first."""
    async with pair() as (here, there):
        inbox = Inbox()
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        await in_thread(lane.send, 2 * ((1).to_bytes(8, "big") + b"x"))
        assert [await inbox.messages.receive() for _ in range(2)] == [b"x", b"x"]


@watched
async def test_an_idle_lane_whose_receiver_has_closed_is_dropped() -> None:
    async with pair() as (here, there):
        inbox = Inbox()
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        here.keep_lane(lane)
        await eventually(lambda: len(keeper(there).lanes) == 1)
        keeper(there).lanes[0].abort()
        await eventually(lambda: not keeper(here).lanes)
        assert lane.aborted
        again = await lane_to(here, there)
        assert again is not lane
        await post(again, b"new")
        assert await inbox.messages.receive() == b"new"


@watched
async def test_a_lane_that_closed_this_moment_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher may not have run yet."""

    async def see_nothing(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(LaneKeeper, "_watch", see_nothing)
    async with pair() as (here, there):
        lane = await lane_to(here, there)
        here.keep_lane(lane)
        keeper(there).lanes[0].abort()
        await eventually(lane.is_readable)
        assert await lane_to(here, there) is not lane
        assert lane.aborted


@watched
async def test_an_idle_lane_whose_sender_has_closed_is_dropped() -> None:
    async with pair() as (here, there):
        inbox = Inbox()
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        await eventually(lambda: len(keeper(there).lanes) == 1)
        lane.abort()
        await eventually(lambda: not keeper(there).lanes)
        await eventually(lambda: not keeper(here).lanes)
        assert not inbox.lanes, "there was nothing to read"


@pytest.mark.parametrize("side", ["sender", "receiver"])
@watched
async def test_lanes_that_stay_idle_are_dropped(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if side == "sender":
        monkeypatch.setattr(direct, "IDLE_SECONDS", 0.0)
    else:
        monkeypatch.setattr(lane_inbound, "_INBOUND_IDLE_SECONDS", 0.0)
    async with pair() as (here, there):
        lane = await lane_to(here, there)
        here.keep_lane(lane)
        await eventually(lambda: lane.aborted)
        await eventually(lambda: not keeper(there).lanes)


@watched
async def test_two_open_lanes_to_each_other_at_once() -> None:
    async with pair() as (here, there):
        inboxes = {}
        for host in (here, there):
            inboxes[host.peer_id] = Inbox()
            host.serve_lanes(inboxes[host.peer_id])

        async def talk(one: Libp2pTransport, other: Libp2pTransport) -> None:
            body = one.peer_id.encode() * 20_000
            await post(await lane_to(one, other), body)
            assert await inboxes[other.peer_id].messages.receive() == body

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(talk, here, there)
                nursery.start_soon(talk, there, here)
        assert len(keeper(here).lanes) == len(keeper(there).lanes) == 6


# -- acknowledgements


class Receives:
    """Serves lanes: reads a message, and acknowledges it when it is let to."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.lanes: list[TlsLane] = []
        self.read = trio.Semaphore(0)
        """Released with each message that was read."""
        self.acknowledge = trio.Semaphore(1000 if at_once else 0)
        self.word = b"\x06"

    async def __call__(self, lane: DirectLane) -> None:
        assert isinstance(lane, TlsLane)
        self.lanes.append(lane)
        await in_thread(read_message, lane)
        self.read.release()
        await self.acknowledge.acquire()
        if self.word == b"\x06":
            await in_thread(lane.acknowledge)
        else:
            await in_thread(lane.send, self.word)


async def cancelled_before_the_answer(lane: TlsLane) -> None:
    """As when an attempt ends while its lane waits for the receiver's word."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.acknowledged)
        await eventually(lambda: lane.owed)
        await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()


@watched
async def test_one_use_after_another_is_acknowledged() -> None:
    async with pair() as (here, there):
        inbox = Receives()
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        for number in range(20):
            await post(lane, bytes(number * 200_000))
            await lane.acknowledged()
            assert not lane.owed
            here.keep_lane(lane)
            assert await lane_to(here, there) is lane
        assert set(inbox.lanes) == {inbox.lanes[0]}


@watched
async def test_a_lane_that_was_dialled_back_is_acknowledged_too() -> None:
    async with open_host(LOOPBACK) as here, open_host() as there:
        there.serve_lanes(Receives())
        await there.dial(here.addresses[0], timeout=TIMEOUT)
        lane = await lane_to(here, there)
        for _ in range(3):
            await post(lane, b"hello")
            await lane.acknowledged()


@watched
async def test_nothing_is_acknowledged_before_the_receiver_says_so() -> None:
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        done: list[bool] = []

        async def wait() -> None:
            await lane.acknowledged()
            done.append(True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await inbox.read.acquire()
            await eventually(lambda: lane.unsent() == 0)
            assert done == []
            inbox.acknowledge.release()
        assert done == [True]


@watched
async def test_an_acknowledgement_that_comes_before_the_sender_waits_for_it_counts() -> None:
    """The last write may return later than the receiver has answered it."""
    async with pair() as (here, there):
        inbox = Receives()
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        for _ in range(3):
            await post(lane, b"hello")
            await eventually(lane.is_readable)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await lane.acknowledged()


@pytest.mark.parametrize("waited", [True, False])
@watched
async def test_a_lane_is_not_handed_out_before_its_acknowledgement_has_come(waited: bool) -> None:
    """The next use would take it for its own; also when whoever sent last did not live to wait for it."""
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        await post(lane, b"first")
        if waited:
            await cancelled_before_the_answer(lane)
        here.keep_lane(lane)
        other = await lane_to(here, there)
        assert other is not lane
        assert not lane.aborted
        await inbox.read.acquire()
        inbox.acknowledge.release()
        await eventually(lambda: not lane.owed)
        assert await lane_to(here, there) is lane


@watched
async def test_a_lane_that_was_kept_unacknowledged_is_as_good_after_it() -> None:
    """Of the next use nothing is acknowledged by the word for the last one."""
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        await post(lane, b"first")
        await cancelled_before_the_answer(lane)
        here.keep_lane(lane)
        inbox.acknowledge.release()
        await eventually(lambda: not lane.owed)
        assert await lane_to(here, there) is lane
        await post(lane, b"second")
        await inbox.read.acquire()
        await inbox.read.acquire()
        await cancelled_before_the_answer(lane)
        assert lane.owed, "the first word was for the first use"
        inbox.acknowledge.release()
        await eventually(lambda: not lane.owed)
        assert not lane.aborted


@pytest.mark.parametrize("when", ["while it is waited for", "before"])
@watched
async def test_a_receiver_that_drops_the_lane_after_all_was_sent_has_not_acknowledged(when: str) -> None:
    """What the system took is lost with the connection."""
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        await inbox.read.acquire()
        async with trio.open_nursery() as nursery:
            if when == "before":
                inbox.lanes[0].abort()
                await eventually(lambda: lane.aborted)
            else:

                async def drop() -> None:
                    await eventually(lambda: lane.owed)
                    await trio.testing.wait_all_tasks_blocked(0.01)
                    inbox.lanes[0].abort()

                nursery.start_soon(drop)
            with pytest.raises(StreamBrokenError, match="unacknowledged") as found:
                await lane.acknowledged()
            assert there.peer_id in str(found.value)
        await eventually(lambda: lane not in keeper(here).lanes)
        assert lane.aborted


@watched
async def test_a_lane_that_this_process_drops_is_not_acknowledged() -> None:
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        async with trio.open_nursery() as nursery:

            async def drop() -> None:
                await eventually(lambda: lane.owed)
                await in_thread(lane.abort)

            nursery.start_soon(drop)
            with pytest.raises(StreamBrokenError):
                await lane.acknowledged()
        assert await lane_to(here, there) is not lane


@pytest.mark.parametrize("word", [b"\x15", b"\x00", b"a long story" * 1000])
@watched
async def test_another_word_than_the_acknowledgement_ends_the_lane(word: bytes) -> None:
    async with pair() as (here, there):
        inbox = Receives()
        inbox.word = word
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        with pytest.raises(StreamBrokenError):
            await lane.acknowledged()
        await eventually(lambda: lane.aborted)
        here.keep_lane(lane)
        await eventually(lambda: not keeper(here).lanes)
        inbox.word = b"\x06"
        again = await lane_to(here, there)
        assert again is not lane
        await post(again, b"hello")
        await again.acknowledged()


@watched
async def test_a_lane_on_which_more_is_said_than_was_asked_for_is_not_handed_out() -> None:
    """A second word would be the acknowledgement of what has not been sent yet."""
    async with pair() as (here, there):
        inbox = Receives()
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        await lane.acknowledged()
        here.keep_lane(lane)
        await in_thread(inbox.lanes[0].acknowledge)
        await eventually(lane.is_readable)
        assert await lane_to(here, there) is not lane
        assert lane.aborted


@watched
async def test_a_lane_whose_receiver_drops_it_unasked_is_not_handed_out() -> None:
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(inbox)
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        await inbox.read.acquire()
        await cancelled_before_the_answer(lane)
        here.keep_lane(lane)
        inbox.lanes[0].abort()
        await eventually(lambda: lane.aborted)
        await eventually(lambda: lane not in keeper(here).lanes)
        assert await lane_to(here, there) is not lane


# -- which way a lane comes about


@watched
async def test_a_receiver_that_cannot_be_dialled_dials_back() -> None:
    async with open_host(LOOPBACK) as here, open_host() as there:
        inbox = Inbox()
        there.serve_lanes(inbox)
        await there.dial(here.addresses[0], timeout=TIMEOUT)
        lane = await lane_to(here, there)
        await post(lane, b"by another way" * 100_000)
        assert await inbox.messages.receive() == b"by another way" * 100_000
        assert inbox.lanes[0].remote == here.peer_id
        assert lane.remote == there.peer_id
        await lane.acknowledged()
        here.keep_lane(lane)
        assert await lane_to(here, there) is lane


@watched
async def test_a_lane_needs_no_address_where_a_connection_is_open() -> None:
    async with pair() as (here, there):
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        there._addresses = ()  # nor does the other side name any
        here._addresses = ()
        await here.open_lane(there.peer_id, timeout=TIMEOUT)


def closed_door(host: Libp2pTransport) -> None:
    """As behind a router: libp2p is connected, and nobody can dial."""

    async def drop(plain: socket.socket) -> None:
        plain.close()

    host._tcp.on_tls = drop


@watched
async def test_no_way_at_all_is_said_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (here, there):
        closed_door(here)
        closed_door(there)
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1.*dialled back: .*127\.0\.0\.1"):
            await lane_to(here, there)
        for host in (here, there):
            host._tcp.on_tls = keeper(host)._doorway.accept
        with pytest.raises(UnreachableError, match=r"a moment ago: .*dialled back"):
            await lane_to(here, there)
        keeper(here)._nowhere._found[there.peer_id] = (trio.current_time(), "")
        await lane_to(here, there)


@watched
async def test_neither_listens() -> None:
    async with open_host(LOOPBACK) as here, open_host() as there:
        await there.dial(here.addresses[0], timeout=TIMEOUT)
        here._addresses = ()
        with pytest.raises(UnreachableError, match="no address is known; and this peer listens nowhere"):
            await lane_to(here, there)


@watched
async def test_a_peer_without_lanes_is_remembered_too() -> None:
    async with pair() as (here, there):
        there._host.remove_stream_handler(cast(Any, PROTOCOL))
        with pytest.raises(UnreachableError, match="not supported"):
            await lane_to(here, there)
        with pytest.raises(UnreachableError, match="a moment ago"):
            await lane_to(here, there)


@watched
async def test_a_silent_answer_ends_with_the_timeout_and_says_so() -> None:
    async def say_nothing(stream: Stream) -> None:
        await trio.sleep_forever()

    async with pair() as (here, there):
        there.serve(PROTOCOL, say_nothing)
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        with pytest.raises(UnreachableError, match=r"within 0\.2 s"):
            await here.open_lane(there.peer_id, timeout=0.2)
        assert there.peer_id not in keeper(here)._nowhere._found, "nobody knows whether there is a way"


@watched
async def test_whoever_asks_and_then_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "ANSWER_SECONDS", 0.1)
    async with pair() as (here, there):
        for first in (b"", Ask(OwnCertificate("me").der).encode()):
            stream = await here.open_stream(
                there.peer_id, PROTOCOL, addresses=there.addresses, timeout=TIMEOUT
            )
            if first:
                await send_message(stream, first)
                assert Offer.decode(await receive_message(stream) or b"").ticket
            with pytest.raises(StreamBrokenError):
                await stream.receive_some(1)
        assert not keeper(there)._doorway._expected
        assert not keeper(there)._inbound.slots._taken


# -- strangers


async def ask(here: Transport, there: Transport, own: OwnCertificate) -> tuple[Stream, Offer]:
    stream = await here.open_stream(there.peer_id, PROTOCOL, addresses=there.addresses, timeout=TIMEOUT)
    await send_message(stream, Ask(own.der).encode())
    return stream, Offer.decode(await receive_message(stream) or b"")


def call(port: int, context: ssl.SSLContext, name: str | None) -> bytes:
    """What a client reads that sends a message with its handshake."""
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        connection.sendall((5).to_bytes(8, "big") + b"hello")
        return connection.recv(1)


def anybody() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def assert_refused(host: Libp2pTransport, context: ssl.SSLContext, name: str | None) -> None:
    delivered = Inbox()
    host.serve_lanes(delivered)
    with pytest.raises(OSError, match=r"(?i)alert|reset|unrecognized|certificate|pipe|unknown|EOF"):
        await in_thread(call, port_of(host), context, name)
    await eventually(lambda: not host._tcp.undecided)
    assert not keeper(host).lanes
    assert not delivered.lanes


@watched
async def test_who_has_no_ticket_is_refused() -> None:
    async with pair() as (here, there):
        own = OwnCertificate("me")
        stream, offer = await ask(here, there, own)
        for name in (None, "ab" * 16, offer.ticket.hex()[:-1], "x" * 60):
            for context in (own.client_context(offer.certificate), anybody()):
                await assert_refused(there, context, name)
        await assert_goes_on(there)
        await stream.reset()


@pytest.mark.parametrize("who", ["another", "nobody"])
@watched
async def test_a_ticket_is_worth_nothing_without_its_certificate(who: str) -> None:
    async with pair() as (here, there):
        stream, offer = await ask(here, there, OwnCertificate("me"))
        mallory = OwnCertificate("mallory").client_context(offer.certificate)
        await assert_refused(there, mallory if who == "another" else anybody(), offer.ticket.hex())
        verdict = Verdict.decode(await receive_message(stream) or b"")
        assert "the handshake failed" in verdict.reason
        await assert_goes_on(there)
        await stream.reset()


@watched
async def test_what_openssl_lets_through_is_looked_at_again() -> None:
    async with pair() as (here, there):
        own = OwnCertificate("me")
        stream, offer = await ask(here, there, own)
        keeper(there)._doorway._expected[offer.ticket.hex()].certificate = b"another"
        with suppress(ConnectionError):
            await in_thread(call, port_of(there), own.client_context(offer.certificate), offer.ticket.hex())
        assert "another certificate" in Verdict.decode(await receive_message(stream) or b"").reason
        assert not keeper(there).lanes
        await stream.reset()


@watched
async def test_a_ticket_is_good_for_one_lane() -> None:
    async with pair() as (here, there):
        own = OwnCertificate("me")
        stream, offer = await ask(here, there, own)
        context = own.client_context(offer.certificate)
        inbox = Inbox()
        there.serve_lanes(inbox)
        plain = socket.create_connection(("127.0.0.1", port_of(there)))
        connection = await in_thread(lambda: context.wrap_socket(plain, server_hostname=offer.ticket.hex()))
        with connection:
            assert not Verdict.decode(await receive_message(stream) or b"").reason
            with pytest.raises(OSError, match=r"(?i)unrecognized"):
                await in_thread(call, port_of(there), context, offer.ticket.hex())
            await in_thread(connection.sendall, (1).to_bytes(8, "big") + b"x")
            assert await inbox.messages.receive() == b"x"
        await stream.reset()


@pytest.mark.parametrize("how", ["expired", "asker gone"])
@watched
async def test_an_old_ticket_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "expired":
        monkeypatch.setattr(doorway, "TICKET_SECONDS", 0.0)
    async with pair() as (here, there):
        own = OwnCertificate("me")
        stream, offer = await ask(here, there, own)
        if how == "asker gone":
            await stream.reset()
            await eventually(lambda: not keeper(there)._doorway._expected)
        await assert_refused(there, own.client_context(offer.certificate), offer.ticket.hex())
        await stream.reset()


@watched
async def test_a_receiver_with_another_certificate_is_not_believed() -> None:
    """Somebody else answers at the address: nothing may be sent to them."""
    async with pair() as (here, there):
        mallory = OwnCertificate("mallory")
        door = keeper(there)._doorway
        real = door.own.server_context
        door.own.server_context = mallory.server_context  # type: ignore[method-assign]
        here._addresses = ()
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            await lane_to(here, there)
        assert not keeper(here).lanes
        assert not keeper(there).lanes
        door.own.server_context = real  # type: ignore[method-assign]
        await assert_goes_on(there)


BAD_ASKS = [b"", b"x", pack(b""), pack(b"\x30\x00"), pack("text"), pack(b"a", b"b"), pack(bytes(5000))]


@pytest.mark.parametrize("message", BAD_ASKS)
@watched
async def test_a_bad_ask_costs_its_stream(message: bytes) -> None:
    async with pair() as (here, there):
        stream = await here.open_stream(there.peer_id, PROTOCOL, addresses=there.addresses, timeout=TIMEOUT)
        await send_message(stream, message)
        with pytest.raises(StreamBrokenError):
            await stream.receive_some(1)
        assert not keeper(there)._inbound.slots._taken
        await assert_goes_on(there)


DER = OwnCertificate("me").der
BAD_OFFERS = [
    pack("", b"no certificate", bytes(16), ()),
    pack("", DER, bytes(15), ()),
    pack("", DER, bytes(16), (1,)),
    pack("", DER, bytes(16), ("/ip4/127.0.0.1/tcp/1",) * 7),
    pack("", DER, bytes(16), ("x" * 1000,)),
    pack("x" * 1000, b"", b"", ()),
    pack(0, DER, bytes(16), ()),
    b"x" * 8000,
]


@pytest.mark.parametrize("message", BAD_OFFERS)
@watched
async def test_a_bad_offer_is_no_lane(message: bytes) -> None:
    async def offer(stream: Stream) -> None:
        await receive_message(stream)
        await send_message(stream, message)
        await stream.receive_some(1)

    async with pair() as (here, there):
        there.serve(PROTOCOL, offer)
        with pytest.raises(UnreachableError, match="gave no direct lane"):
            await lane_to(here, there)


@pytest.mark.parametrize(
    "message", [b"x", pack(bytes(3), ()), pack(bytes(16), ("x",) * 7), pack(bytes(16), (b"",))]
)
@watched
async def test_a_bad_back_costs_its_stream(message: bytes) -> None:
    async with pair() as (here, there):
        stream, _ = await ask(here, there, OwnCertificate("me"))
        await send_message(stream, message)
        assert Verdict.decode(await receive_message(stream) or b"").attempt == 1
        with pytest.raises(StreamBrokenError):
            await receive_message(stream)
        await eventually(lambda: not keeper(there)._inbound.slots._taken)


def test_a_certificate_is_looked_at_before_openssl_gets_it() -> None:
    with pytest.raises(RemoteProtocolError, match="not a certificate"):
        Offer.decode(BAD_OFFERS[0])
    with pytest.raises(RemoteProtocolError, match="not a certificate"):
        Ask.decode(pack(b"\x30\x00"))


@watched
async def test_a_refused_dial_says_so_and_leaves_no_socket() -> None:
    async with pair() as (here, there):
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        stream, _ = await ask(here, there, OwnCertificate("me"))
        before = descriptors()
        await send_message(stream, Back(bytes(16), (f"/ip4/127.0.0.1/tcp/1/p2p/{here.peer_id}",)).encode())
        verdicts = [Verdict.decode(await receive_message(stream) or b"") for _ in range(2)]
        assert "refused" in verdicts[1].reason
        assert descriptors() <= before
        await stream.reset()


@watched
async def test_addresses_of_others_are_not_dialled() -> None:
    async with pair() as (here, there), open_host(LOOPBACK) as third:
        stream, _ = await ask(here, there, OwnCertificate("me"))
        await send_message(stream, Back(bytes(16), third.addresses).encode())
        verdicts = [Verdict.decode(await receive_message(stream) or b"") for _ in range(2)]
        assert [verdict.attempt for verdict in verdicts] == [1, 2]
        assert "is not an address of" in verdicts[1].reason
        await stream.reset()


SAID = [b"", b"\x16", b"\x16\x03\x01\x00\x05hello", b"\x16" + bytes(3000), b"GET / HTTP/1.1\r\n\r\n"]


@pytest.mark.parametrize("said", SAID)
@watched
async def test_garbage_and_silence_on_the_port_are_harmless(said: bytes) -> None:
    async with open_host(LOOPBACK) as host, AsyncExitStack() as stack:
        for _ in range(5):
            tcp = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port_of(host)))
            if said:
                await tcp.send_all(said)
        await assert_goes_on(host)
        await stack.aclose()
        await eventually(lambda: not host._tcp.undecided)


@watched
async def test_the_silent_give_way_to_those_who_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sniffing, "MAX_UNDECIDED", 3)
    async with open_host(LOOPBACK) as host, AsyncExitStack() as stack:
        tcps = []
        for said in (b"", b"\x16", b"", b"\x16", b""):
            tcps.append(
                await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port_of(host)))
            )
            if said:
                await tcps[-1].send_all(said)
            await trio.testing.wait_all_tasks_blocked(0.02)
        for tcp in tcps[:2]:
            assert await receive_end(tcp) == b""
        assert len(host._tcp.undecided) == 3
        await assert_goes_on(host)


async def receive_end(tcp: trio.SocketStream) -> bytes:
    try:
        return bytes(await tcp.receive_some(1))
    except trio.BrokenResourceError:
        return b""


@watched
async def test_the_silent_are_left_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sniffing, "UNDECIDED_SECONDS", 0.1)
    async with open_host(LOOPBACK) as host:
        for said in (b"", b"\x16"):
            async with await trio.open_tcp_stream("127.0.0.1", port_of(host)) as tcp:
                if said:
                    await tcp.send_all(said)
                assert await receive_end(tcp) == b""


# -- ending


@watched
async def test_abort_wakes_who_is_blocked() -> None:
    """Both a sender whose receiver does not read, and a receiver whose sender does not send."""
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
        there.serve_lanes(never_read)
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


async def until_still(value: Callable[[], int]) -> None:
    """Until a thread makes no progress any more, as far as can be seen."""
    before = -1
    while before != (before := value()):
        await trio.sleep(0.1)


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
        there.serve_lanes(read)
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"half")
        await reading.wait()
        await eventually(lambda: found[0].bytes_received == 4)
        threading.Thread(target=found[0].abort).start()
        await ended.wait()
        await eventually(lambda: not keeper(here).lanes)


@watched
async def test_a_descriptor_is_not_closed_under_its_reader() -> None:
    """It might be another connection's at once, and the reader would read that."""
    async with pair() as (here, there):
        lane = await lane_to(here, there)
        with lane._user():
            lane.abort()
            await eventually(lambda: lane._users == 1)  # the watcher has left
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
        there.serve_lanes(read)
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"half")
        lane.abort()
        await ended.wait()
        assert "996 bytes early" in errors[0]
        assert here.peer_id in errors[0]


ERRORS = [StreamBrokenError("gone"), RemoteProtocolError("lies"), ClosedError("shut"), RuntimeError("a bug")]


@pytest.mark.parametrize("error", ERRORS)
@watched
async def test_what_a_handler_raises_costs_its_lane(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(lane: DirectLane) -> None:
        raise error

    caplog.set_level(logging.INFO, "p2pavg.net.lane_inbound")
    async with pair() as (here, there):
        there.serve_lanes(fail)
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"x")
        await eventually(lambda: lane.aborted)
        assert not keeper(there).lanes
        (record,) = [found for found in caplog.records if found.name == "p2pavg.net.lane_inbound"]
        assert record.levelno == (logging.ERROR if type(error) is RuntimeError else logging.INFO)
        assert here.peer_id in record.getMessage()
        await assert_goes_on(there)


@watched
async def test_a_handler_that_reads_nothing_is_not_called_for_ever() -> None:
    calls = []

    async def read_nothing(lane: DirectLane) -> None:
        calls.append(lane)

    async with pair() as (here, there):
        there.serve_lanes(read_nothing)
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"x")
        await eventually(lambda: lane.aborted)
        assert len(calls) == 1


# -- room


class Flood:
    """Sends a piece whenever there is room, in a thread, until it is told that it is enough."""

    PIECE = bytes(12 * 1024)
    UNSENT = 64 * 1024

    def __init__(self, lane: TlsLane) -> None:
        self.enough = threading.Event()
        self.waits = False
        self.error: StreamBrokenError | None = None
        self._lane = lane

    async def run(self) -> None:
        """A thread that is not woken is left behind when the watchdog barks."""
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
        """Until it waits, and the buffers of both sides are full, as far as can be seen."""
        await eventually(lambda: self._lane.bytes_sent > 0)
        for _ in range(10):  # the system may find more room when one of its timers runs out
            await until_still(lambda: self._lane.bytes_sent)
        await eventually(self._is_stuck)

    def _is_stuck(self) -> bool:
        """Whether it waits, or is about to, while the system takes no more."""
        poll = select.poll()
        poll.register(self._lane._connection.fileno(), select.POLLOUT)
        return self.waits and not poll.poll(0)

    def held_back(self) -> int:
        """Bytes that the system holds and has not sent, where it tells."""
        if sys.platform != "linux":
            return 0
        siocoutqnsd = 0x894B
        answer = fcntl.ioctl(self._lane._connection.fileno(), siocoutqnsd, bytes(4))
        return int(struct.unpack("i", answer)[0])


class Drain:
    """Serves lanes: reads when it is let to, and then for ever."""

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
async def test_who_waits_for_room_goes_on_once_the_other_side_reads() -> None:
    async with pair() as (here, there):
        drain = Drain()
        there.serve_lanes(drain)
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
async def test_abort_wakes_who_waits_for_room() -> None:
    async with pair() as (here, there):
        drain = Drain()
        there.serve_lanes(drain)
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


# -- a few bytes, from trio


class Few:
    """Serves lanes: reads six bytes in trio, and then four in a thread."""

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
async def test_a_few_bytes_come_whole_and_what_follows_is_left() -> None:
    async with pair() as (here, there):
        few = Few()
        there.serve_lanes(few)
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"abc")
        await eventually(lambda: few.has_read(3))
        await in_thread(lane.send, b"defghij")
        assert [await few.found.receive() for _ in range(2)] == [b"abcdef", b"ghij"]
        assert few.has_read(10)
        await in_thread(lane.send, b"ABCDEFGHIJ")
        assert [await few.found.receive() for _ in range(2)] == [b"ABCDEF", b"GHIJ"]


@watched
async def test_a_few_bytes_that_end_early_are_broken() -> None:
    async with pair() as (here, there):
        few = Few()
        there.serve_lanes(few)
        lane = await lane_to(here, there)
        await in_thread(lane.send, b"abc")
        await eventually(lambda: few.has_read(3))
        lane.abort()
        await few.ended.wait()
        await eventually(lambda: few.lanes[0].aborted)


def descriptors() -> int:
    return int(psutil.Process().num_fds())


@watched
async def test_a_cancelled_search_leaves_nothing() -> None:
    """In each of its waits: for the offer, for the handshake, for the verdict."""
    stuck = trio.Event()

    async def hold(plain: socket.socket) -> None:
        with plain:
            stuck.set()
            await trio.sleep_forever()

    async def silent(stream: Stream) -> None:
        stuck.set()
        await trio.sleep_forever()

    async with pair() as (here, there):
        await assert_serves(here, there)
        await lane_to(here, there)
        before, threads = descriptors(), threading.active_count()
        accept = there._tcp.on_tls
        for host, place in ((there, "handshake"), (there, "offer")):
            stuck = trio.Event()
            if place == "handshake":
                host._tcp.on_tls = hold
            else:
                host.serve(PROTOCOL, silent)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lane_to, here, there)
                await stuck.wait()
                nursery.cancel_scope.cancel()
            if place == "handshake":  # which the receiver of this test would never end
                host._tcp.on_tls = accept
                for scope in list(host._tcp._undecided.values()):
                    scope.cancel()
            await eventually(lambda: descriptors() <= before)
            assert threading.active_count() <= threads
            assert len(keeper(here).lanes) == 1
        with pytest.raises(UnreachableError, match="within"):  # and nothing was remembered
            await here.open_lane(there.peer_id, timeout=0.05)


@watched
async def test_closing_ends_lanes_that_are_idle_and_in_use() -> None:
    blocked: list[str] = []

    async def read(lane: DirectLane) -> None:
        try:
            await in_thread(lane.receive_into, memoryview(bytearray(1 << 30)))
        finally:
            blocked.append("reader")

    def flood(lane: DirectLane) -> None:
        with pytest.raises(StreamBrokenError):
            lane.send(bytes(1 << 28))
        blocked.append("writer")

    async with pair():  # what is made once a process
        pass
    before = descriptors()
    async with trio.open_nursery() as nursery, pair() as (here, there):
        there.serve_lanes(read)
        idle, busy, waiting = [await lane_to(here, there) for _ in range(3)]
        here.keep_lane(idle)
        await in_thread(waiting.send, b"x")
        busy_there = keeper(there).lanes
        assert len(busy_there) == 3
        nursery.start_soon(in_thread, flood, busy)
        await eventually(lambda: busy.bytes_sent > 0)
    assert sorted(blocked) == ["reader", "reader", "writer"]
    assert idle.aborted
    assert busy.aborted
    assert waiting.aborted
    await eventually(lambda: descriptors() <= before)
    with pytest.raises(ClosedError):
        await lane_to(here, there)


@watched
async def test_closing_aborts_before_it_waits_for_anybody() -> None:
    async with pair() as (here, there):
        lanes = [await lane_to(here, there) for _ in range(2)]
        here.keep_lane(lanes[0])
        keeper(here).close()
        assert [lane.aborted for lane in lanes] == [True, True]


@watched
async def test_closing_ends_a_search_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "DIAL_SECONDS", 1e6)

    async def hold(plain: socket.socket) -> None:
        with plain:
            await trio.sleep_forever()

    async with open_host(LOOPBACK) as there:
        there._tcp.on_tls = hold
        async with trio.open_nursery() as nursery, open_host(LOOPBACK) as here:
            errors: list[Exception] = []

            async def search() -> None:
                try:
                    await lane_to(here, there)
                except (UnreachableError, ClosedError) as error:
                    errors.append(error)

            nursery.start_soon(search)
            await eventually(lambda: any(found.fileno() < 0 for found in there._tcp.undecided))
        assert [type(error) for error in errors] == [ClosedError]


# -- limits


@watched
async def test_few_idle_lanes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_limits, "MAX_IDLE", 5)
    async with pair() as (here, there), open_host(LOOPBACK) as third:
        lanes = [await lane_to(here, there) for _ in range(6)]
        for lane in lanes:
            here.keep_lane(lane)
        assert [lane.aborted for lane in lanes] == [True, True, False, False, False, False]
        more = [await lane_to(here, third) for _ in range(2)]
        for lane in more:
            here.keep_lane(lane)
        assert [lane.aborted for lane in lanes + more] == [True] * 3 + [False] * 5
        assert await lane_to(here, there) is lanes[-1]
        await eventually(lambda: len(keeper(there).lanes) == 3)


@watched
async def test_a_peer_holds_so_many_lanes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_limits, "MAX_INBOUND_PER_PEER", 2)
    monkeypatch.setattr(lane_limits, "MAX_INBOUND", 3)
    async with pair() as (here, there), open_host() as third:
        mine = [await lane_to(here, there) for _ in range(2)]
        with pytest.raises(UnreachableError, match="holds 2 lanes already"):
            await lane_to(here, there)
        await lane_to(third, there)
        with pytest.raises(UnreachableError, match="there are 3 lanes already"):
            await lane_to(third, there)
        mine[0].abort()
        await eventually(lambda: len(keeper(there).lanes) == 2)
        await lane_to(here, there)


@watched
async def test_a_lane_that_has_carried_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_MAX_LANE_BYTES", 10)
    async with pair() as (here, there):
        lane = await lane_to(here, there)
        await in_thread(lane.send, bytes(11))
        here.keep_lane(lane)
        assert lane.aborted


def test_whom_not_to_try_is_a_short_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio, "current_time", lambda: 100.0)
    monkeypatch.setattr(lane_limits, "MAX_NOWHERE", 2)
    nowhere = lane_limits.Nowhere()
    for peer in ("a", "b", "c"):
        nowhere.add(peer, "why")
    nowhere.check("a")
    for peer in ("b", "c"):
        with pytest.raises(UnreachableError, match="why"):
            nowhere.check(peer)


@watched
async def test_a_forked_child_lets_go_of_lanes() -> None:
    async with pair() as (here, there):
        await lane_to(here, there)
        numbers = [lane._connection.fileno() for lane in keeper(here).lanes + keeper(there).lanes]
        assert len(numbers) == 2
        child = os.fork()
        if child == 0:
            still = sum(is_socket(number) for number in numbers)
            os._exit(still)
        _, status = await in_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await assert_goes_on(there)


def is_socket(number: int) -> bool:
    try:
        return os.fstat(number).st_mode & 0o170000 == 0o140000
    except OSError:
        return False


async def test_a_network_may_have_no_lanes() -> None:
    async with MemoryNetwork().transport(Ed25519Signer(next(_seeds))) as here:
        here.serve_lanes(Inbox())
        with pytest.raises(UnreachableError, match="this network has no direct lanes"):
            await here.open_lane("somebody else", timeout=1.0)
