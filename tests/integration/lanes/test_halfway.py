"""The third way to make a lane: both peers connect at once, where neither can dial the other."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from p2pavg.base.errors import StreamBrokenError, UnreachableError
from p2pavg.net.lanes import acceptor, limits, pool
from p2pavg.net.lanes.certificates import OwnCertificate
from p2pavg.net.lanes.halfway import Back, Halfway, LaneVerdict, Meet
from p2pavg.net.lanes.tls_connection import TlsConnection
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.nat.punch import plan
from p2pavg.net.nat.punch.plan import Endpoint, PunchAnswer, PunchProposal, PunchVerdict, Sync
from p2pavg.net.nat.punch.sockets import FreshPort, punch
from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.net.transport import Stream, receive_message, send_message
from tests.integration.hosts import LOOPBACK, TIMEOUT, open_host, watched
from tests.integration.lanes.company import Inbox, Serving, descriptors, keeper, lane_to, offered, post
from tests.integration.punch.peers import BEHIND_A_ROUTER, BEHIND_A_SYMMETRIC_ROUTER, Router


def behind_a_router(host: Libp2pTransport, own: Reachability = BEHIND_A_ROUTER) -> None:
    """Give a host no address and no dialled one, and let it punch."""
    host._reaching.addresses = (f"/ip4/203.0.113.9/tcp/1/p2p/{host.peer_id}/p2p-circuit/p2p/{host.peer_id}",)
    lanes = keeper(host)
    lanes._dialled_addresses = lambda _: ()
    lanes._halfway = Halfway(lanes._doorway, Router(own).puncher(host._connections.gate), lanes._inbound)


@asynccontextmanager
async def two_behind_routers() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    """Open two hosts that are connected, of which neither can be dialled for a lane."""
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        for host in (here, there):
            behind_a_router(host)
        yield here, there


@watched
async def test_a_lane_over_a_punch_carries_bytes_and_is_kept() -> None:
    async with two_behind_routers() as (here, there):
        inbox = Inbox()
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        await post(lane, b"half-way" * 100_000)
        assert await inbox.messages.receive() == b"half-way" * 100_000
        assert (inbox.lanes[0].remote, lane.remote) == (here.peer_id, there.peer_id)
        await lane.acknowledged()
        here.keep_lane(lane)
        assert await lane_to(here, there) is lane


@watched
async def test_each_lane_has_ports_of_its_own_and_a_place_of_its_own() -> None:
    async with two_behind_routers() as (here, there):
        there.serve_lanes(Serving(Inbox(), wanted=()))
        lanes = [await lane_to(here, there) for _ in range(limits.MAX_UNEXPECTED_PER_PEER)]
        assert len({lane._connection.tls for lane in lanes}) == len(lanes)
        assert keeper(there)._inbound.slots._taken[here.peer_id] == len(lanes)
        with pytest.raises(UnreachableError, match="holds 2 lanes already"):
            await lane_to(here, there)


@watched
async def test_no_dial_and_no_wait_comes_before_the_punch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without addresses, the first two ways are skipped at once. An address through a relay is none."""

    async def fail(*_: object) -> TlsConnection:
        raise AssertionError("an address was dialled")

    async with two_behind_routers() as (here, there):
        monkeypatch.setattr(acceptor.TlsAcceptor, "dial", fail)
        await here.open_lane(there.peer_id, addresses=there.addresses, timeout=TIMEOUT)


@watched
async def test_a_dial_that_works_needs_no_punch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> TlsConnection:
        raise AssertionError("a punch began")

    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        addresses = there.addresses
        behind_a_router(here)
        behind_a_router(there)
        there._reaching.addresses = addresses
        for host in (here, there):
            monkeypatch.setattr(keeper(host)._halfway, "ask", never)
        await here.open_lane(there.peer_id, addresses=addresses, timeout=TIMEOUT)
        await there.open_lane(here.peer_id, timeout=TIMEOUT)


def listening_address(host: Libp2pTransport) -> str:
    (listener,) = host._swarm.listeners.values()
    (address,) = listener.get_addrs()
    return f"{address}/p2p/{host.peer_id}"


class TestNoPunch:
    @watched
    async def test_a_sender_behind_a_symmetric_router_gives_up_at_once(self) -> None:
        async with two_behind_routers() as (here, there):
            behind_a_router(here, BEHIND_A_SYMMETRIC_ROUTER)
            with pytest.raises(UnreachableError, match=r"this peer takes part in no punch: .*symmetric"):
                await lane_to(here, there)

    @watched
    async def test_a_search_that_skips_every_way_is_repeated_soon(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The receiver's offer says that it is behind a symmetric router. It may learn more when it has met others."""
        monkeypatch.setattr(pool, "CALM_LOOK_SECONDS", 0.0)
        async with two_behind_routers() as (here, there):
            behind_a_router(there, BEHIND_A_SYMMETRIC_ROUTER)
            with pytest.raises(UnreachableError, match="the other peer takes part in no punch"):
                await lane_to(here, there)
            behind_a_router(there)
            await lane_to(here, there)

    @watched
    async def test_a_failed_punch_is_reported_and_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plan, "PUNCH_SECONDS", 0.1)
        async with two_behind_routers() as (here, there):

            async def wrong(version: int, port: int) -> int:
                return 65535

            for host in (here, there):
                puncher = keeper(host)._halfway._puncher
                assert puncher is not None
                puncher._watcher.outer_port = wrong  # type: ignore[method-assign]
            with pytest.raises(UnreachableError, match=r"no address is known; .*; try 1: .*try 3: "):
                await lane_to(here, there)
            with pytest.raises(UnreachableError, match=r"a moment ago: .*try 3"):
                await lane_to(here, there)
            while keeper(there)._inbound.slots._taken:  # freed once the sender's close has come
                await trio.sleep(0.01)  # the watchdog bounds it

    @watched
    async def test_nothing_stays_open_if_the_sender_gives_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pool, "REPLY_SECONDS", 0.3)
        async with two_behind_routers() as (here, there):
            reached = trio.Event()

            async def never(version: int, port: int) -> int:
                reached.set()
                await trio.sleep_forever()
                return 0

            puncher = keeper(there)._halfway._puncher
            assert puncher is not None
            puncher._watcher.outer_port = never  # type: ignore[method-assign]
            before = descriptors()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lane_to, here, there)
                await reached.wait()
                nursery.cancel_scope.cancel()
            while descriptors() != before or keeper(there)._inbound.slots._taken:
                await trio.sleep(0.01)  # the watchdog bounds it


async def punched(stream: Stream, port: FreshPort) -> socket.socket:
    """Carry out the first try, up to the plain connection."""
    await send_message(stream, Meet().encode())
    assert LaneVerdict.decode(await receive_message(stream) or b"").attempt == 1
    assert LaneVerdict.decode(await receive_message(stream) or b"") == LaneVerdict(3, "")
    await send_message(stream, PunchProposal(1, (Endpoint("127.0.0.1", port.port),)).encode())
    answer = PunchAnswer.decode(await receive_message(stream) or b"")
    assert answer.endpoint is not None
    await send_message(stream, Sync().encode())
    return await punch(port, answer.endpoint, trio.current_time())


class TestHostileSenders:
    @watched
    async def test_a_punch_without_the_named_certificate_is_no_lane(self) -> None:
        async with two_behind_routers() as (here, there):
            named, other = OwnCertificate("me"), OwnCertificate("me")
            stream, offer = await offered(here, there, named)
            with FreshPort() as port:
                plain = await punched(stream, port)
            connection = TlsConnection(
                other.client_context(offer.certificate), plain, server_name=offer.ticket.hex()
            )
            # The refusal comes after the client's part.
            await connection.shake_hands(lambda: offer.certificate)
            verdict = PunchVerdict.decode(await receive_message(stream) or b"")
            assert verdict.reason == "no connection"
            assert not keeper(there)._inbound.lanes
            connection.close()
            await stream.reset()

    @pytest.mark.parametrize("first", ["back", "meet"])
    @watched
    async def test_a_way_that_was_tried_is_not_tried_again(self, first: str) -> None:
        async with two_behind_routers() as (here, there):
            stream, _ = await offered(here, there, OwnCertificate("me"))
            back = Back(b"\x07" * 16, ()).encode()
            await send_message(stream, back if first == "back" else Meet().encode())
            for attempt in (1, 2 if first == "back" else 3):
                assert LaneVerdict.decode(await receive_message(stream) or b"").attempt == attempt
            await send_message(stream, back)
            with pytest.raises(StreamBrokenError):
                await receive_message(stream)
            while keeper(there)._inbound.slots._taken:
                await trio.sleep(0.01)  # the watchdog bounds it

    @watched
    async def test_a_sender_that_has_a_lane_gets_no_second_one_at_the_same_place(self) -> None:
        async with two_behind_routers() as (here, there):
            own = OwnCertificate("me")
            stream, offer = await offered(here, there, own)
            plain = socket.create_connection(("127.0.0.1", int(listening_address(there).split("/")[4])))
            connection = TlsConnection(
                own.client_context(offer.certificate), plain, server_name=offer.ticket.hex()
            )
            await connection.shake_hands(lambda: offer.certificate)
            assert LaneVerdict.decode(await receive_message(stream) or b"") == LaneVerdict(1, "")
            await send_message(stream, Meet().encode())
            assert "made a lane" in LaneVerdict.decode(await receive_message(stream) or b"").reason
            assert keeper(there)._inbound.slots._taken[here.peer_id] == 1
            connection.close()
            await stream.reset()
