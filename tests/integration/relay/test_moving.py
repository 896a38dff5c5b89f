"""Relays that end, and connections that move: from one relay to another, and from a relay to a direct connection."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest
import trio
import trio.lowlevel
import trio.testing

from p2pavg.base.errors import StreamBrokenError, UnreachableError
from p2pavg.base.messages import pack
from p2pavg.net.libp2p import reaching
from p2pavg.net.libp2p.transport import Libp2pTransport, open_libp2p_transport
from p2pavg.net.limits.admission import ConnectionLimits
from p2pavg.net.nat.relay import reservations, service
from p2pavg.net.nat.relay.messages import PROTOCOL, RelayPing, Reserve, Reserved, decode
from p2pavg.net.transport import Stream, receive_message, send_message
from tests.integration.hosts import LOOPBACK, TIMEOUT, assert_serves, eventually, open_host, seeds, watched
from tests.integration.relay.meeting import (
    behind,
    connections_to,
    echoed,
    give_up_relays,
    many_behind,
    open_echo,
    open_relay,
    relay_and_two,
    service_of,
)
from tests.integration.relay.test_limits import held, until_no_more_than
from tests.transport_conformance import ECHO, echo


class TestRelaysThatEnd:
    @watched
    async def test_when_a_relay_closes_the_circuit_ends_and_another_relay_is_taken(self) -> None:
        async with open_relay() as lasting, open_host() as here:
            await here.dial(lasting.addresses[0], timeout=TIMEOUT)
            async with open_relay() as relay, behind(relay) as there:
                await there.dial(lasting.addresses[0], timeout=TIMEOUT)
                await eventually(lambda: len(there.addresses) == 2)
                address = next(each for each in there.addresses if relay.peer_id in each)
                await here.dial(address, timeout=TIMEOUT)
                stream = await open_echo(here, there)
                relay._reaching._nursery.start_soon(relay._connections.close_all)
                with pytest.raises(StreamBrokenError):
                    await receive_message(stream)
                await eventually(lambda: not here.is_connected(there.peer_id))
                await eventually(lambda: len(there.addresses) == 1)
                assert lasting.peer_id in there.addresses[0]
                await assert_serves(here, there)

    @watched
    async def test_a_relay_that_falls_silent_is_given_up(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is killed, or a router has forgotten the connection: no byte comes any more, and no reset."""
        monkeypatch.setattr(reservations, "RELAY_PING_SECONDS", 0.1)
        caplog.set_level(logging.INFO, logger="p2pavg")
        async with open_host(LOOPBACK) as relay, open_host() as here:

            async def fall_silent(stream: Stream) -> None:
                assert decode(await receive_message(stream) or b"") == Reserve()
                await send_message(stream, Reserved(relay.addresses).encode())
                await trio.sleep_forever()

            relay.serve(PROTOCOL, fall_silent)
            await here.dial(relay.addresses[0], timeout=TIMEOUT)
            await eventually(lambda: bool(here.addresses))
            monkeypatch.setattr(reservations, "QUICK_REPLY_SECONDS", 0.1)
            await eventually(lambda: not here.addresses)
            await eventually(lambda: not here.is_connected(relay.peer_id))
            assert "the reservation is lost at" in caplog.text
            assert "no answer to a ping" in caplog.text

    @watched
    async def test_a_peer_that_falls_silent_loses_its_reservation(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service, "RELAY_PING_SECONDS", 0.1)
        async with open_relay() as relay, open_host() as here:
            give_up_relays(here)
            await here.dial(relay.addresses[0], timeout=TIMEOUT)
            stream = await here.open_stream(relay.peer_id, PROTOCOL, timeout=TIMEOUT)
            assert await echoed(stream, Reserve().encode())
            await eventually(lambda: not service_of(relay).budget.reserved)
            await eventually(lambda: not relay.is_connected(here.peer_id))

    @pytest.mark.parametrize(
        "answer",
        [
            RelayPing().encode(),
            b"\xc1",
            None,
            Reserved(()).encode(),
            pack("reserved", ("/ip4/1.2.3.4/tcp/1",)),
        ],
    )
    @watched
    async def test_a_relay_that_answers_nonsense_is_avoided(self, answer: bytes | None) -> None:
        async with open_host(LOOPBACK) as liar, open_relay() as relay, open_host() as here:
            asked = 0

            async def lie(stream: Stream) -> None:
                nonlocal asked
                asked += 1
                await receive_message(stream)
                if answer is not None:
                    await send_message(stream, answer)
                await stream.aclose()

            liar.serve(PROTOCOL, lie)
            await here.dial(liar.addresses[0], timeout=TIMEOUT)
            await here.dial(relay.addresses[0], timeout=TIMEOUT)
            await eventually(lambda: asked == 1)
            await eventually(lambda: here._reaching.reservations.relays == (relay.peer_id,))
            for _ in range(5):
                here._reaching.reservations.poll()
                await assert_serves(here, relay)
            assert asked == 1

    @watched
    async def test_a_new_reservation_replaces_the_old_one_and_its_connection(self) -> None:
        """The peer has another network, or was restarted: its old connection still looks alive at the relay."""
        seed = next(seeds)
        async with (
            open_relay() as relay,
            open_libp2p_transport(seed=seed, listen=[]) as before,
            open_libp2p_transport(seed=seed, listen=[]) as after,
            behind(relay) as here,
        ):
            for host in (before, after):
                host.serve(ECHO, echo)
            await before.dial(relay.addresses[0], timeout=TIMEOUT)
            await eventually(lambda: bool(before.addresses))
            give_up_relays(before)  # it does not fight for the reservation
            before._reaching._nursery.start_soon(hold_on, before, relay)
            await eventually(lambda: before.peer_id in service_of(relay).budget.reserved)
            await after.dial(relay.addresses[0], timeout=TIMEOUT)
            await eventually(lambda: bool(after.addresses))
            await eventually(lambda: not before.is_connected(relay.peer_id))
            await eventually(lambda: len(connections_to(relay, after)) == 1)
            await assert_serves(here, after)
            assert before.path_to(here.peer_id) == ""


async def hold_on(host: Libp2pTransport, relay: Libp2pTransport) -> None:
    """Have a reservation until it is replaced."""
    while True:
        stream = await host.open_stream(relay.peer_id, PROTOCOL, timeout=TIMEOUT)
        if await echoed(stream, Reserve().encode()):
            break
    with pytest.raises(StreamBrokenError):
        await receive_message(stream)


@pytest.fixture
def soon_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "QUICK_REPLY_SECONDS", 0.05)


def is_only_direct(here: Libp2pTransport, there: Libp2pTransport) -> Callable[[], bool]:
    return lambda: {muxed.relay for muxed in connections_to(here, there)} == {""}


class TestFromRelayedToDirect:
    @pytest.mark.usefixtures("soon_retired")
    @watched
    async def test_new_streams_are_direct_and_the_relayed_connection_ends_with_its_last_stream(self) -> None:
        async with open_relay() as relay, open_host(LOOPBACK) as there, behind(relay) as here:
            stream = await there.open_stream(here.peer_id, ECHO, addresses=here.addresses, timeout=TIMEOUT)
            assert there.path_to(here.peer_id) == "relayed"
            await connect(here, there)
            await eventually(lambda: there.path_to(here.peer_id) == here.path_to(there.peer_id) == "direct")
            for _ in range(30):
                assert await echoed(stream, b"on the way") == b"on the way"
                for one, other in ((here, there), (there, here)):
                    new = await one.open_stream(other.peer_id, ECHO, timeout=TIMEOUT)
                    assert not new.relayed
                    assert await echoed(new, b"directly") == b"directly"
                    await new.aclose()
            assert {muxed.relay for muxed in connections_to(here, there)} == {"", relay.peer_id}
            await stream.aclose()
            await eventually(is_only_direct(here, there))
            await eventually(is_only_direct(there, here))
            await eventually(lambda: not service_of(relay).budget.circuits)
            await assert_serves(here, there)

    @pytest.mark.usefixtures("soon_retired")
    @watched
    async def test_a_relayed_connection_beside_a_direct_one_ends(self) -> None:
        async with open_relay() as relay, open_host(LOOPBACK) as there, behind(relay) as here:
            await here.dial(there.addresses[0], timeout=TIMEOUT)
            await there._connections.dial_one(here.peer_id, here.addresses[0])
            await eventually(is_only_direct(here, there))
            await eventually(is_only_direct(there, here))

    @watched
    async def test_a_negotiation_that_a_relay_holds_up_costs_no_direct_connection(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("p2pavg.net.libp2p.connections.REPLY_SECONDS", 0.5)
        async with open_relay() as relay, open_host(LOOPBACK) as there, behind(relay) as here:
            await assert_serves_over_relay(there, here)
            service_of(relay).budget.carry = lambda *_, **__: 3600.0  # type: ignore[method-assign]
            async with trio.open_nursery() as nursery:

                async def wait_for_the_relay() -> None:
                    with pytest.raises(UnreachableError):
                        await there.open_stream(here.peer_id, ECHO, timeout=TIMEOUT)

                nursery.start_soon(wait_for_the_relay)
                await trio.testing.wait_all_tasks_blocked(0.01)
                await connect(here, there)
                stream = await here.open_stream(there.peer_id, ECHO, timeout=TIMEOUT)
            assert await echoed(stream, b"still here") == b"still here"
            assert is_only_direct(there, here)()


async def assert_serves_over_relay(here: Libp2pTransport, there: Libp2pTransport) -> None:
    await assert_serves(here, there)
    assert here.path_to(there.peer_id) == "relayed"


async def connect(here: Libp2pTransport, there: Libp2pTransport) -> None:
    """Make a direct connection beside a relayed one."""
    here._connections.gate.trust_address(there.addresses[0])
    await here._connections.dial_one(there.peer_id, there.addresses[0])


async def sink(stream: Stream) -> None:
    while await stream.receive_some(64 * 1024):
        pass


class TestPlaces:
    @watched
    async def test_circuits_count_as_connections_of_the_relays_address(self) -> None:
        limits = ConnectionLimits(per_host=2, per_prefix=2, inbound=3, connections=8)
        async with (
            open_relay() as relay,
            open_libp2p_transport(seed=next(seeds), listen=[], limits=limits) as there,
        ):
            there.serve(ECHO, echo)
            await there.dial(relay.addresses[0], timeout=TIMEOUT)
            await eventually(lambda: bool(there.addresses))
            async with many_behind(relay, 4) as others:
                for other in others:
                    await assert_serves(other, there)
                inbound = [each for each in there._connections.all() if not each.is_initiator]
                assert len(inbound) <= 2
                assert there.is_connected(relay.peer_id)
                assert there.addresses
            await eventually(lambda: len(there._connections.all()) == 1)
            assert len(there._connections.entrance.admission) == 1

    @watched
    async def test_closing_under_cancellation_leaves_nothing_behind(self) -> None:
        async with open_relay() as relay, behind(relay) as there:
            await trio.testing.wait_all_tasks_blocked(0.05)
            before = held(relay, there)
            with trio.CancelScope() as cancelled:
                async with behind(relay) as here, trio.open_nursery() as nursery:
                    there.serve("/sink/1", sink)
                    for _ in range(5):
                        stream = await here.open_stream(
                            there.peer_id, "/sink/1", addresses=there.addresses, timeout=TIMEOUT
                        )
                        nursery.start_soon(stream.send_all, bytes(10_000_000))
                    await eventually(lambda: service_of(relay).budget.carried > 100_000)
                    cancelled.cancel()
            await eventually(lambda: not service_of(relay).budget.circuits)
            await until_no_more_than(before, relay, there)

    @watched
    async def test_circuits_that_are_given_up_while_they_are_made_leave_nothing_behind(self) -> None:
        async with relay_and_two() as (relay, here, there):
            await trio.testing.wait_all_tasks_blocked(0.05)
            before = held(relay, there, here)
            for turns in range(0, 120, 4):
                with trio.CancelScope() as given_up:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(open_echo, here, there)
                        for _ in range(turns):
                            await trio.lowlevel.checkpoint()
                        await trio.lowlevel.checkpoint()
                        given_up.cancel()
                await here.disconnect(there.peer_id)
            await eventually(lambda: not service_of(relay).budget.circuits)
            await until_no_more_than(before, relay, there, here)
            await assert_serves(here, there)

    @watched
    async def test_a_forked_child_closes_its_sockets_also_with_relayed_connections(self) -> None:
        async with relay_and_two() as (_, here, there):
            await assert_serves(here, there)
            own = {opened.fileno() for opened in here.sockets()}
            assert len(own) == 1
            copies = {os.dup(number) for number in own}
            assert set(here.detach_all()) == own
            for number in own | copies:
                os.close(number)
