"""Connections, dials and streams return their tasks, sockets and memory when they end."""

import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import psutil
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.base.errors import UnreachableError
from p2pavg.net.libp2p.guarded_swarm import GuardedSwarm
from p2pavg.net.libp2p.transport import open_libp2p_transport
from p2pavg.net.limits.admission import ConnectionLimits
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg_dht import Ed25519Signer
from tests.integration.hosts import LOOPBACK, TIMEOUT, assert_serves, eventually, seeds, watched
from tests.integration.libp2p_hosts import (
    FLOOD,
    HUGE_WINDOW,
    assert_serves_strangers,
    connection_of,
    flood,
    open_host,
    until_it_cannot_write,
)
from tests.integration.raw_peers import raw_peer
from tests.transport_conformance import ECHO, echo


def open_sockets() -> int:
    return psutil.Process().num_fds()


def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


async def until_no_more_than(before: Sequence[int], held: Callable[[], Sequence[int]]) -> None:
    """Wait until no count is above ``before``. Some objects may have been closing when ``before`` was counted."""
    await eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


@watched
async def test_ended_inbound_connections_leave_nothing_behind() -> None:
    """Slots, tasks and sockets are free after many more connections than the host may have at once."""
    limits = ConnectionLimits(connections=30, inbound=30, per_host=30, per_prefix=30)
    async with open_libp2p_transport(seed=next(seeds), listen=[LOOPBACK], limits=limits) as host:
        host.serve(ECHO, echo)
        await assert_serves_strangers(host)
        await eventually(lambda: not host._swarm.get_connections())
        before = tasks(), open_sockets()
        for _ in range(100):
            async with raw_peer(host) as stranger:
                await stranger.open(1, ECHO)
            await eventually(lambda: len(host._swarm.get_connections()) < 25)
        await until_no_more_than(before, lambda: (tasks(), open_sockets()))
        assert not host._connections._arrivals
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


@watched
async def test_closing_leaves_no_socket_open() -> None:
    async with AsyncExitStack() as others:
        peers = [await others.enter_async_context(open_host()) for _ in range(3)]
        before = open_sockets()
        with trio.CancelScope() as closing:
            async with open_host() as host:
                for peer in peers:
                    await assert_serves(host, peer)
                closing.deadline = trio.current_time() + 3.0
        assert not closing.cancel_called, "closing took too long"
        await eventually(lambda: not any(peer._swarm.get_connections() for peer in peers))
        assert open_sockets() <= before


@watched
async def test_closing_does_not_wait_for_a_peer_that_reads_nothing() -> None:
    async with AsyncExitStack() as strangers:
        with trio.CancelScope() as closing:
            async with open_host() as host:
                host.serve(FLOOD, flood)
                stranger = await strangers.enter_async_context(raw_peer(host))
                await stranger.open(1, FLOOD, window=HUGE_WINDOW)
                await until_it_cannot_write(host, stranger)
                before = open_sockets()
                closing.deadline = trio.current_time() + 5.0
        assert not closing.cancel_called, "closing took too long"
        assert open_sockets() <= before - 2  # the host's listener and its connection


@watched
async def test_a_dial_that_is_given_up_leaves_no_socket_open() -> None:
    """The server accepts the connection and says nothing."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        stranger = Ed25519Signer(next(seeds)).peer_id
        address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{stranger}"
        async with open_host() as host:
            await wait_all_tasks_blocked()  # until the tasks of the host have started
            before = tasks(), open_sockets()
            with pytest.raises(UnreachableError, match="within"):
                await host.dial(address, timeout=0.1)
            await until_no_more_than(before, lambda: (tasks(), open_sockets()))


@watched
async def test_an_inbound_connection_ends_the_wait_for_a_dial() -> None:
    """Our dial is never answered, as behind a router that drops packets, but the other peer's dial is."""
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
async def test_a_peer_can_be_dialled_again_after_a_failed_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dial does not use libp2p's ``dial_peer``, which blacklists for a minute and waits for 0.25 s."""

    async def refuse(*_: object) -> None:
        raise AssertionError("dial_peer was called")

    monkeypatch.setattr(GuardedSwarm, "dial_peer", refuse)
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
