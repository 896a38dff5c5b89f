"""The two ways to make a lane, by a dial in either direction, and the memory of failed searches."""

import socket
from typing import Any, cast

import pytest
import trio
import trio.testing

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.net.lanes import pool
from p2pavg.net.lanes.acceptor import TICKET_BYTES
from p2pavg.net.lanes.certificates import OwnCertificate
from p2pavg.net.lanes.halfway import PROTOCOL, LaneOffer, LaneRequest, LaneSearch
from p2pavg.net.lanes.tls_connection import TlsConnection
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.transport import Stream, receive_message, send_message
from tests.integration.hosts import LOOPBACK, TIMEOUT, hide, open_host, watched
from tests.integration.lanes.company import Inbox, Serving, keeper, lane_to, pair, post


@watched
async def test_a_receiver_that_cannot_be_dialled_dials_back() -> None:
    async with open_host(LOOPBACK) as here, open_host() as there:
        inbox = Inbox()
        there.serve_lanes(Serving(inbox))
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
        hide(there)  # the other side names no address either
        hide(here)
        await here.open_lane(there.peer_id, timeout=TIMEOUT)


def closed_door(host: Libp2pTransport) -> None:
    """Make a host whose lanes cannot be dialled, as behind a router, although libp2p is connected."""

    async def drop(plain: socket.socket) -> None:
        plain.close()

    host._tcp.on_tls = drop


@watched
async def test_a_failed_search_is_reported_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (here, there):
        closed_door(here)
        closed_door(there)
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1.*dialled back: no connection; this peer"):
            await lane_to(here, there)
        for host in (here, there):
            host._tcp.on_tls = keeper(host)._doorway.accept
        with pytest.raises(UnreachableError, match=r"a moment ago: .*dialled back"):
            await lane_to(here, there)
        keeper(here)._nowhere._found[there.peer_id] = (trio.current_time(), "")
        await lane_to(here, there)


@watched
async def test_no_lane_if_neither_peer_listens() -> None:
    async with open_host(LOOPBACK) as here, open_host() as there:
        await there.dial(here.addresses[0], timeout=TIMEOUT)
        hide(here)
        with pytest.raises(UnreachableError, match="no address is known; and this peer does not listen"):
            await lane_to(here, there)


@watched
async def test_a_certificate_that_only_openssl_refuses_costs_its_sender_the_lane() -> None:
    """It passes the check of offers, and a receiver that cannot be dialled makes the sender load it."""
    offer = LaneOffer("", unreadable("abc"), bytes(TICKET_BYTES), (), False)

    async def offer_it(stream: Stream) -> None:
        await receive_message(stream)
        await send_message(stream, offer.encode())
        await trio.sleep_forever()

    async with open_host(LOOPBACK) as here, open_host() as there:
        there.serve(PROTOCOL, offer_it)
        await there.dial(here.addresses[0], timeout=TIMEOUT)
        with pytest.raises(UnreachableError, match="OpenSSL does not take the peer's certificate"):
            await here.open_lane(there.peer_id, timeout=TIMEOUT)


@watched
async def test_a_request_with_such_a_certificate_costs_its_stream_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair() as (here, there):
        there.serve_lanes(Serving(Inbox()))
        stream = await here.open_stream(there.peer_id, PROTOCOL, addresses=there.addresses, timeout=TIMEOUT)
        ask = LaneRequest(unreadable(here.peer_id))
        await send_message(stream, ask.encode())
        with pytest.raises((StreamBrokenError, RemoteProtocolError)):
            assert await receive_message(stream) is not None
        await lane_to(here, there)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def unreadable(name: str) -> bytes:
    """Return a certificate whose names are of a type that OpenSSL does not read."""
    text = bytes([len(name)]) + name.encode()
    certificate = OwnCertificate(name).der
    named = certificate.replace(b"\x0c" + text, b"\x04" + text)  # octet strings for UTF8Strings
    assert named != certificate
    return named


@watched
async def test_a_peer_without_lanes_is_remembered_too() -> None:
    async with pair() as (here, there):
        there._host.remove_stream_handler(cast(Any, PROTOCOL))
        with pytest.raises(UnreachableError, match="not supported"):
            await lane_to(here, there)
        with pytest.raises(UnreachableError, match="a moment ago"):
            await lane_to(here, there)


@watched
async def test_a_silent_receiver_ends_with_a_timeout() -> None:
    async def say_nothing(stream: Stream) -> None:
        await trio.sleep_forever()

    async with pair() as (here, there):
        there.serve(PROTOCOL, say_nothing)
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        with pytest.raises(UnreachableError, match=r"within 0\.2 s"):
            await here.open_lane(there.peer_id, timeout=0.2)
        assert there.peer_id not in keeper(here)._nowhere._found, "it is unknown whether a lane could be made"


@watched
async def test_a_search_is_given_the_time_in_which_there_was_no_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parts would otherwise go over streams, which takes more of a processor that is missing already."""
    monkeypatch.setattr(pool, "GLANCE_SECONDS", 0.01)

    async def say_nothing(stream: Stream) -> None:
        await trio.sleep_forever()

    async with pair() as (here, there):
        there.serve(PROTOCOL, say_nothing)
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        monkeypatch.setattr(keeper(here), "_processor_wait", trio.current_time)  # it never has one
        with trio.move_on_after(1.5) as scope:
            await here.open_lane(there.peer_id, timeout=0.5)
        assert scope.cancelled_caught


@watched
async def test_a_peer_that_has_answered_is_given_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for parts, and its address may never answer."""
    monkeypatch.setattr(pool, "GLANCE_SECONDS", 0.01)

    async def answer_and_wait(_: Stream, search: LaneSearch) -> TlsConnection:
        search.answered = True
        await trio.sleep_forever()
        raise AssertionError

    async with pair() as (here, there):
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        monkeypatch.setattr(keeper(here), "_processor_wait", trio.current_time)
        monkeypatch.setattr(keeper(here), "_ask", answer_and_wait)
        with pytest.raises(UnreachableError, match=r"within 0\.2 s"):
            await here.open_lane(there.peer_id, timeout=0.2)


@watched
async def test_a_silent_sender_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "REPLY_SECONDS", 0.1)
    async with pair() as (here, there):
        for first in (b"", LaneRequest(OwnCertificate("me").der).encode()):
            stream = await here.open_stream(
                there.peer_id, PROTOCOL, addresses=there.addresses, timeout=TIMEOUT
            )
            if first:
                await send_message(stream, first)
                assert LaneOffer.decode(await receive_message(stream) or b"").ticket
            with pytest.raises(StreamBrokenError):
                await stream.receive_some(1)
        assert not keeper(there)._doorway._expected
        assert not keeper(there)._inbound.slots._taken
