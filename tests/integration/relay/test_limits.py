"""Hostile peers take a bounded amount from a relay and from the peers that use it, and all of it comes back."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import psutil
import pytest
import trio

from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.libp2p import stream as stream_module
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.limits.rate import WIRE_OVERHEAD
from p2pavg.net.nat.relay.messages import (
    CIRCUIT_PROTOCOL,
    PROTOCOL,
    Connected,
    RelayPing,
    RelayRefusal,
    Reserve,
)
from p2pavg.net.nat.relay.service import MAX_PINGS
from p2pavg.net.transport import Stream, receive_message, send_message
from tests.integration.hosts import TIMEOUT, assert_serves, eventually, open_host, watched
from tests.integration.relay.meeting import (
    ask,
    behind,
    echoed,
    give_up_relays,
    open_echo,
    open_relay,
    refusal,
    relay_and_two,
    service_of,
)


def held(*hosts: Libp2pTransport) -> Sequence[int]:
    """Return the counts of tasks, sockets, streams and unread bytes."""
    connections = [muxed for host in hosts for muxed in host._connections.all()]
    return (
        trio.lowlevel.current_statistics().tasks_living,
        psutil.Process().num_fds(),
        sum(len(muxed.streams) for muxed in connections),
        sum(muxed.held() for muxed in connections),
    )


async def until_no_more_than(before: Sequence[int], *hosts: Libp2pTransport) -> None:
    await eventually(lambda: all(now <= then for now, then in zip(held(*hosts), before, strict=True)))


async def accept(stream: Stream) -> None:
    """Accept a circuit and never read from it."""
    await receive_message(stream)
    await send_message(stream, Connected().encode())
    await trio.sleep_forever()


async def swallow(stream: Stream) -> None:
    """Accept a circuit and read everything."""
    await receive_message(stream)
    await send_message(stream, Connected().encode())
    while await stream.receive_some(64 * 1024):
        pass


async def _send_without_end(stream: Stream) -> None:
    while True:
        await stream.send_all(bytes(64 * 1024))


async def push(stream: Stream) -> None:
    """Send without end, until the stream breaks."""
    with pytest.raises(StreamBrokenError):
        await _send_without_end(stream)


@watched
async def test_a_peer_that_asks_for_a_hundred_circuits_gets_its_share_and_leaves_nothing_behind() -> None:
    async with relay_and_two(asks_per_peer=200, asks_per_host=400) as (relay, there, honest):
        there.serve(CIRCUIT_PROTOCOL, swallow)
        async with behind(relay) as greedy:
            before = held(relay, there)
            streams, refused = [], 0
            for _ in range(100):
                stream, answer = await ask(greedy, relay, there.peer_id)
                if isinstance(answer, RelayRefusal):
                    assert "circuits of this peer already" in answer.reason
                    refused += 1
                    await stream.reset()
                else:
                    streams.append(stream)
            limit = service_of(relay).budget.limits.circuits_per_peer
            assert (len(streams), refused) == (limit, 100 - limit)
            assert len(service_of(relay).budget.circuits) == limit
            await assert_serves(there, honest)
            await there.disconnect(honest.peer_id)
            for stream in streams:
                await stream.reset()
            await eventually(lambda: not service_of(relay).budget.circuits)
            await until_no_more_than(before, relay, there)


@watched
async def test_circuits_that_no_side_reads_hold_little_memory() -> None:
    """The asker pushes through all of its circuits, and the peer behind the relay reads nothing."""
    async with relay_and_two(mbps=1000.0) as (relay, here, there):
        there.serve(CIRCUIT_PROTOCOL, accept)
        async with trio.open_nursery() as nursery:
            for _ in range(16):
                stream, _ = await ask(here, relay, there.peer_id)
                nursery.start_soon(push, stream)
            await eventually(lambda: held(relay)[3] > 1024 * 1024)
            for _ in range(100):
                await trio.sleep(0.01)
                assert held(relay)[3] <= 17 * 256 * 1024
            assert service_of(relay).budget.carried < 34 * 256 * 1024
            await assert_serves(there, relay)
            await there.disconnect(relay.peer_id)
        await eventually(lambda: not service_of(relay).budget.circuits)
        await eventually(lambda: held(relay)[3] < 100)


@watched
async def test_one_circuit_is_pushed_at_the_relays_rate_until_its_bytes_are_used_up() -> None:
    mbps, most = 20.0, 1_000_000
    async with relay_and_two(mbps=mbps, bytes_per_peer=most) as (relay, here, there):
        there.serve(CIRCUIT_PROTOCOL, swallow)
        stream, answer = await ask(here, relay, there.peer_id)
        assert answer == Connected()
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(push, stream)
            while service_of(relay).budget.circuits:
                carried, now = service_of(relay).budget.carried, trio.current_time()
                rate = mbps * 1e6 / 8 / WIRE_OVERHEAD
                assert carried <= rate * (now - begun + 0.1) + 64 * 1024
                assert held(relay)[3] <= 512 * 1024
                await trio.sleep(0.005)
        assert most <= service_of(relay).budget.carried <= most + 32 * 1024
        assert "used up its bytes" in await refusal(here, relay, there.peer_id)
        await assert_serves(here, relay)


@watched
async def test_addresses_share_a_relays_rate_equally() -> None:
    """Ten circuits of one address carry no more than one of another: each address has one piece under way."""
    async with relay_and_two(mbps=4.0) as (relay, here, there), behind(relay) as other:
        there.serve(CIRCUIT_PROTOCOL, swallow)
        service = service_of(relay)
        budget = service.budget
        connect = budget.connect
        hosts = {here.peer_id: "198.51.100.1", other.peer_id: "203.0.113.1"}

        def connect_from(source: str, _host: str, target: str, now: float) -> object:
            return connect(source, hosts[source], target, now)

        budget.connect = connect_from  # type: ignore[method-assign, assignment]
        async with trio.open_nursery() as nursery:
            for host in [here] * 10 + [other]:
                stream, _ = await ask(host, relay, there.peer_id)
                nursery.start_soon(push, stream)
            start = {circuit: circuit.carried for circuit in budget.circuits}
            await eventually(lambda: budget.carried - sum(start.values()) > 800_000)
            many = sum(c.carried - start[c] for c in budget.circuits if c.source == here.peer_id)
            one = sum(c.carried - start[c] for c in budget.circuits if c.source == other.peer_id)
            await here.disconnect(relay.peer_id)
            await other.disconnect(relay.peer_id)
        assert 0.5 < one / many < 2.0


@watched
async def test_an_end_that_does_not_read_costs_the_circuit_and_no_reservation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with relay_and_two(mbps=1000.0) as (relay, here, there):
        there.serve(CIRCUIT_PROTOCOL, accept)
        stream, _ = await ask(here, relay, there.peer_id)
        stream.carry_circuit()  # as for every circuit of a connection
        monkeypatch.setattr(stream_module, "STALL_SECONDS", 0.3)
        await push(stream)
        await eventually(lambda: not service_of(relay).budget.circuits)
        for host in (here, there):
            assert host.is_connected(relay.peer_id)
            assert host.peer_id in service_of(relay).budget.reserved
            assert host.addresses


@watched
async def test_a_connection_over_a_circuit_that_stalls_ends_and_the_relay_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other end has accepted a connection over the circuit, and then reads nothing of it."""
    async with relay_and_two(mbps=1000.0) as (relay, here, there):
        stream = await open_echo(here, there)
        assert await echoed(stream, b"one") == b"one"
        service = service_of(relay)
        ((circuit, scope),) = service._open.items()
        assert circuit.target == there.peer_id
        service.budget.carry = lambda *_, **__: 3600.0  # type: ignore[method-assign]  # the relay carries no more
        monkeypatch.setattr(stream_module, "STALL_SECONDS", 0.3)
        with pytest.raises(StreamBrokenError):
            await stream.send_all(bytes(2 * 1024 * 1024))
        await eventually(lambda: not here.is_connected(there.peer_id))
        assert not scope.cancel_called
        assert here.is_connected(relay.peer_id)
        assert here.addresses


@watched
async def test_a_peer_that_floods_its_reservation_with_pings_loses_it() -> None:
    async with relay_and_two() as (relay, here, _):
        give_up_relays(here)
        await eventually(lambda: here.peer_id not in service_of(relay).budget.reserved)
        stream = await here.open_stream(relay.peer_id, PROTOCOL, timeout=TIMEOUT)
        assert await echoed(stream, Reserve().encode())
        for _ in range(MAX_PINGS):
            assert await echoed(stream, RelayPing().encode()) == RelayPing().encode()
        with pytest.raises(StreamBrokenError):
            await echoed(stream, RelayPing().encode())
        assert here.peer_id not in service_of(relay).budget.reserved


@watched
async def test_a_full_relay_refuses_further_reservations(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="p2pavg")
    async with (
        open_relay(reservations_per_host=2) as relay,
        behind(relay) as one,
        behind(relay) as two,
        open_host() as three,
    ):
        await three.dial(relay.addresses[0], timeout=TIMEOUT)
        await eventually(lambda: "2 peers at this address" in caplog.text)
        assert not three.addresses
        assert service_of(relay).budget.reserved == {one.peer_id, two.peer_id}
