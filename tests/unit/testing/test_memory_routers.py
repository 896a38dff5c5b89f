"""Peers of the network in memory that cannot be dialled, and connections through their relays. Times are virtual."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from p2pavg.base.errors import StreamBrokenError, UnreachableError
from p2pavg.net.nat.reach.reachability import Kind
from p2pavg.net.transport import receive_message, send_message
from p2pavg.testing import MemoryNetwork, MemoryTransport
from tests.unit.testing.test_memory_network import ECHO, SIGNERS, echo, open_echo

KINDS = {"d": Kind.PUBLIC, "p": Kind.PUNCHABLE, "r": Kind.RELAYED}


@asynccontextmanager
async def peers(network: MemoryNetwork, kinds: str) -> AsyncIterator[list[MemoryTransport]]:
    """Open a peer of each kind. The first one, which can be dialled, relays for the others."""
    async with AsyncExitStack() as stack:
        made = []
        for signer, kind in zip(SIGNERS, kinds, strict=False):
            relays = [] if kind == "d" else [SIGNERS[0].peer_id]
            made.append(
                await stack.enter_async_context(network.transport(signer, kind=KINDS[kind], relays=relays))
            )
        for peer in made:
            peer.serve(ECHO, echo)
        yield made


@pytest.mark.parametrize(
    ("pair", "relayed"),
    [("dr", False), ("rd", False), ("pp", False), ("pr", True), ("rp", True), ("rr", True)],
)
async def test_only_pairs_that_cannot_connect_directly_use_the_relay(
    pair: str, relayed: bool, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork()
    async with peers(network, "d" + pair) as (relay, here, there):
        stream = await open_echo(here, there)
        await send_message(stream, bytes(1000))
        assert await receive_message(stream) == bytes(1000)
        assert stream.relayed is relayed
        assert (network.bytes_relayed(relay.peer_id) > 2000) is relayed
        host = network.host_of((relay if relayed else there).peer_id)
        assert stream.remote_host == host


async def test_a_dial_to_the_own_address_of_a_peer_behind_a_router_is_never_answered(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with peers(network, "drr") as (relay, here, there):
        own = f"{network.location_of(there.peer_id)}/p2p/{there.peer_id}"
        for dialling in (relay, here):
            with pytest.raises(UnreachableError, match="within"):
                await dialling.dial(own, timeout=5.0)


async def test_circuits_share_the_rate_of_their_relay(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=(0.0, 0.0), relaying=1000.0)
    async with peers(network, "drrr") as (_, here, *others):
        streams = [await open_echo(here, other) for other in others]
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(send_message, stream, bytes(2500))
        for stream in streams:
            await receive_message(stream)
    assert trio.current_time() - began == pytest.approx(10.0, rel=0.05)


async def test_a_relayed_frame_takes_the_latency_of_both_hops(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=(1.0, 1.0), relaying=None)
    async with peers(network, "drr") as (_, here, there):
        stream = await open_echo(here, there, timeout=60.0)
        began = trio.current_time()
        await send_message(stream, b"x")
        await receive_message(stream)
        assert trio.current_time() - began == pytest.approx(4.0)


@pytest.mark.parametrize("leaves", [False, True])
async def test_connections_break_with_their_relay(leaves: bool, autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(peers(network, "drrp"))
        relay, here, there, punched = made
        over_relay = await open_echo(here, there)
        if leaves:
            relay.close()
            network._peers.pop(relay.peer_id)
        else:
            network.crash(relay.peer_id)
        with trio.fail_after(60.0), pytest.raises(StreamBrokenError, match="the relay has gone"):
            await receive_message(over_relay)
        assert not here.is_connected(there.peer_id)
        assert not there.is_connected(here.peer_id)
        assert here.addresses == ()
        with pytest.raises(UnreachableError):
            await open_echo(here, punched)


async def test_a_stopped_relay_carries_nothing_until_it_resumes(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, "drr") as (relay, here, there):
        stream = await open_echo(here, there)
        network.stop(relay.peer_id)
        await send_message(stream, b"later")
        with trio.move_on_after(3600.0) as scope:
            await receive_message(stream)
        assert scope.cancelled_caught
        network.resume(relay.peer_id)


async def test_a_cut_between_two_peers_does_not_cut_the_way_through_a_relay(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with peers(network, "drr") as (_, here, there):
        stream = await open_echo(here, there)
        network.cut(here.peer_id, there.peer_id)
        await send_message(stream, b"x")
        assert await receive_message(stream) == b"x"


async def test_a_full_relay_refuses_new_circuits_and_keeps_the_old(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, "drrr") as (relay, here, there, third):
        stream = await open_echo(here, there)
        network.refuse_circuits(relay.peer_id)
        with pytest.raises(UnreachableError, match="too many"):
            await open_echo(here, third)
        await send_message(stream, b"x")
        assert await receive_message(stream) == b"x"
