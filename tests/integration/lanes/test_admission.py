"""The admission of direct lanes: tickets, certificates, and other connections to the port."""

import socket
import ssl
from contextlib import AsyncExitStack, suppress

import pytest
import trio
import trio.testing

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.messages import pack
from p2pavg.net.lanes import acceptor
from p2pavg.net.lanes.certificates import OwnCertificate
from p2pavg.net.lanes.halfway import PROTOCOL, Back, LaneOffer, LaneRequest, LaneVerdict
from p2pavg.net.libp2p import sniffing
from p2pavg.net.libp2p.transport import Libp2pTransport, open_libp2p_transport
from p2pavg.net.limits.admission import ConnectionLimits
from p2pavg.net.limits.call_budget import CallBudget, CallRates
from p2pavg.net.limits.first_messages import FirstMessages
from p2pavg.net.transport import Stream, receive_message, send_message
from tests.integration.hosts import (
    LOOPBACK,
    TIMEOUT,
    assert_serves,
    eventually,
    hide,
    open_host,
    port_of,
    seeds,
    watched,
)
from tests.integration.lanes.company import (
    Inbox,
    Serving,
    assert_goes_on,
    descriptors,
    in_thread,
    keeper,
    lane_to,
    offered,
    pair,
)
from tests.transport_conformance import ECHO, echo


def call(port: int, context: ssl.SSLContext, name: str | None) -> bytes:
    """Return the bytes that a client reads if it sends a message with its handshake."""
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        connection.sendall((5).to_bytes(8, "big") + b"hello")
        return connection.recv(1)


def without_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def assert_refused(host: Libp2pTransport, context: ssl.SSLContext, name: str | None) -> None:
    delivered = Inbox()
    host.serve_lanes(Serving(delivered))
    with pytest.raises(OSError, match=r"(?i)alert|reset|unrecognized|certificate|pipe|unknown|EOF"):
        await in_thread(call, port_of(host), context, name)
    await eventually(lambda: not host._tcp.undecided)
    assert not keeper(host).lanes
    assert not delivered.lanes


@watched
async def test_a_sender_that_has_used_up_its_budget_of_processor_time_gets_no_offer() -> None:
    """A question for a lane makes OpenSSL read a certificate and make a context: 2 ms."""
    rates = CallRates(peer_seconds=1e-6, peer_burst_seconds=1e-6, prefix_factor=1.0)
    async with pair() as (here, there):
        keeper(there)._messages = FirstMessages(CallBudget(rates))
        own = OwnCertificate("me")
        stream, offer = await offered(here, there, own)
        assert offer.ticket
        await stream.reset()
        with pytest.raises((StreamBrokenError, RemoteProtocolError)):
            await offered(here, there, own)
        await assert_serves(here, there)


@watched
async def test_a_client_without_a_ticket_is_refused() -> None:
    async with pair() as (here, there):
        own = OwnCertificate("me")
        stream, offer = await offered(here, there, own)
        for name in (None, "ab" * 16, offer.ticket.hex()[:-1], "x" * 60):
            for context in (own.client_context(offer.certificate), without_certificate()):
                await assert_refused(there, context, name)
        await assert_goes_on(there)
        await stream.reset()


@pytest.mark.parametrize("certificate", ["another", "none"])
@watched
async def test_a_ticket_with_another_certificate_or_none_is_refused(certificate: str) -> None:
    async with pair() as (here, there):
        stream, offer = await offered(here, there, OwnCertificate("me"))
        mallory = OwnCertificate("mallory").client_context(offer.certificate)
        await assert_refused(
            there, mallory if certificate == "another" else without_certificate(), offer.ticket.hex()
        )
        verdict = LaneVerdict.decode(await receive_message(stream) or b"")
        assert "the handshake failed" in verdict.reason
        await assert_goes_on(there)
        await stream.reset()


@watched
async def test_the_connection_is_checked_again_after_openssl() -> None:
    async with pair() as (here, there):
        own = OwnCertificate("me")
        stream, offer = await offered(here, there, own)
        keeper(there)._doorway._expected[offer.ticket.hex()].certificate = b"another"
        with suppress(ConnectionError):
            await in_thread(call, port_of(there), own.client_context(offer.certificate), offer.ticket.hex())
        assert "another certificate" in LaneVerdict.decode(await receive_message(stream) or b"").reason
        assert not keeper(there).lanes
        await stream.reset()


@watched
async def test_a_ticket_is_valid_for_one_lane() -> None:
    async with pair() as (here, there):
        own = OwnCertificate("me")
        stream, offer = await offered(here, there, own)
        context = own.client_context(offer.certificate)
        inbox = Inbox()
        there.serve_lanes(Serving(inbox))
        plain = socket.create_connection(("127.0.0.1", port_of(there)))
        connection = await in_thread(lambda: context.wrap_socket(plain, server_hostname=offer.ticket.hex()))
        with connection:
            assert not LaneVerdict.decode(await receive_message(stream) or b"").reason
            with pytest.raises(OSError, match=r"(?i)unrecognized"):
                await in_thread(call, port_of(there), context, offer.ticket.hex())
            await in_thread(connection.sendall, (1).to_bytes(8, "big") + b"x")
            assert await inbox.messages.receive() == b"x"
        await stream.reset()


@pytest.mark.parametrize("how", ["expired", "asker gone"])
@watched
async def test_an_old_ticket_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "expired":
        monkeypatch.setattr(acceptor, "REPLY_SECONDS", 0.0)
    async with pair() as (here, there):
        own = OwnCertificate("me")
        stream, offer = await offered(here, there, own)
        if how == "asker gone":
            await stream.reset()
            await eventually(lambda: not keeper(there)._doorway._expected)
        await assert_refused(there, own.client_context(offer.certificate), offer.ticket.hex())
        await stream.reset()


@watched
async def test_a_receiver_with_another_certificate_is_refused() -> None:
    """If another peer answers at the address, nothing may be sent to it."""
    async with pair() as (here, there):
        mallory = OwnCertificate("mallory")
        door = keeper(there)._doorway
        real = door.own.server_context
        door.own.server_context = mallory.server_context  # type: ignore[method-assign]
        hide(here)
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            await lane_to(here, there)
        assert not keeper(here).lanes
        assert not keeper(there).lanes
        door.own.server_context = real  # type: ignore[method-assign]
        await assert_goes_on(there)


BAD_ASKS = [
    b"",
    b"x",
    pack("text"),
    pack("lane"),
    pack("lane", "text"),
    pack("lane", b""),
    pack("lane", b"\x30\x00"),
    pack("lane", b"a", b"b"),
    pack("lane", bytes(5000)),
]


@watched
async def test_a_bad_ask_costs_its_stream() -> None:
    async with pair() as (here, there):
        for message in BAD_ASKS:
            stream = await here.open_stream(
                there.peer_id, PROTOCOL, addresses=there.addresses, timeout=TIMEOUT
            )
            await send_message(stream, message)
            with pytest.raises(StreamBrokenError):
                await stream.receive_some(1)
            assert not keeper(there)._inbound.slots._taken
        await assert_goes_on(there)


DER = OwnCertificate("me").der


BAD_OFFERS = [
    pack("offer", "", b"no certificate", bytes(16), (), False),
    pack("offer", "", DER, bytes(15), (), False),
    pack("offer", "", DER, bytes(16), (1,), False),
    pack("offer", "", DER, bytes(16), ("/ip4/127.0.0.1/tcp/1",) * 7, False),
    pack("offer", "", DER, bytes(16), ("x" * 1000,), False),
    pack("offer", "x" * 1000, b"", b"", (), False),
    pack("offer", 0, DER, bytes(16), (), False),
    pack("offer", "", DER, bytes(16), (), 0),
]


@pytest.mark.parametrize("message", BAD_OFFERS)
def test_a_bad_offer_is_refused(message: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        LaneOffer.decode(message)


@pytest.mark.parametrize("message", [BAD_OFFERS[0], b"x" * 8000])
@watched
async def test_a_bad_offer_makes_no_lane(message: bytes) -> None:
    async def offer(stream: Stream) -> None:
        await receive_message(stream)
        await send_message(stream, message)
        await stream.receive_some(1)

    async with pair() as (here, there):
        there.serve(PROTOCOL, offer)
        with pytest.raises(UnreachableError, match="gave no direct lane"):
            await lane_to(here, there)


BAD_BACKS = [
    b"x",
    pack("back", bytes(3), ()),
    pack("back", bytes(16), ("x",) * 7),
    pack("back", bytes(16), (b"",)),
    pack("ahead", bytes(16), ()),
    pack("meet", 1),
]


@watched
async def test_a_bad_back_costs_its_stream() -> None:
    async with pair() as (here, there):
        for message in BAD_BACKS:
            stream, _ = await offered(here, there, OwnCertificate("me"))
            await send_message(stream, message)
            assert LaneVerdict.decode(await receive_message(stream) or b"").attempt == 1
            with pytest.raises(StreamBrokenError):
                await receive_message(stream)
            await eventually(lambda: not keeper(there)._inbound.slots._taken)


def test_a_certificate_is_checked_before_openssl_reads_it() -> None:
    with pytest.raises(RemoteProtocolError, match="not a certificate"):
        LaneOffer.decode(BAD_OFFERS[0])
    with pytest.raises(RemoteProtocolError, match="not a certificate"):
        LaneRequest.decode(pack("lane", b"\x30\x00"))


@watched
async def test_a_refused_dial_raises_and_leaves_no_socket() -> None:
    async with pair() as (here, there):
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        stream, _ = await offered(here, there, OwnCertificate("me"))
        before = descriptors()
        await send_message(stream, Back(bytes(16), (f"/ip4/127.0.0.1/tcp/1/p2p/{here.peer_id}",)).encode())
        verdicts = [LaneVerdict.decode(await receive_message(stream) or b"") for _ in range(2)]
        assert verdicts[1].reason == "dialled back: no connection"
        assert descriptors() <= before
        await stream.reset()


@watched
async def test_addresses_of_other_peers_are_not_dialled() -> None:
    async with pair() as (here, there), open_host(LOOPBACK) as third:
        stream, _ = await offered(here, there, OwnCertificate("me"))
        await send_message(stream, Back(bytes(16), third.addresses).encode())
        verdicts = [LaneVerdict.decode(await receive_message(stream) or b"") for _ in range(2)]
        assert [verdict.attempt for verdict in verdicts] == [1, 2]
        assert verdicts[1].reason == "dialled back: no connection"
        await stream.reset()


SAID = [b"", b"\x16", b"\x16\x03\x01\x00\x05hello", b"\x16" + bytes(3000), b"GET / HTTP/1.1\r\n\r\n"]


@watched
async def test_garbage_and_silence_on_the_port_are_harmless() -> None:
    async with open_host(LOOPBACK) as host, AsyncExitStack() as stack:
        for said in SAID * 5:
            tcp = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port_of(host)))
            if said:
                await tcp.send_all(said)
        await assert_goes_on(host)
        await stack.aclose()
        await eventually(lambda: not host._tcp.undecided)


@watched
async def test_silent_connections_give_way_to_speaking_ones() -> None:
    limits = ConnectionLimits(unfinished=3)
    seed = next(seeds)
    async with (
        open_libp2p_transport(seed=seed, listen=[LOOPBACK], limits=limits) as host,
        AsyncExitStack() as stack,
    ):
        host.serve(ECHO, echo)
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
async def test_silent_connections_are_closed_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sniffing, "REPLY_SECONDS", 0.1)
    async with open_host(LOOPBACK) as host:
        for said in (b"", b"\x16"):
            async with await trio.open_tcp_stream("127.0.0.1", port_of(host)) as tcp:
                if said:
                    await tcp.send_all(said)
                assert await receive_end(tcp) == b""
