"""Checks of dials and connections."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from p2pavg.base.errors import AddressError, ClosedError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import MAX_TIMEOUT_SECONDS
from p2pavg.net.transport import Stream
from tests.transport_conformance.tools import (
    ECHO,
    OTHER,
    TIMEOUT,
    CallOutcome,
    HeldStream,
    Surroundings,
    assert_broken,
    assert_echoes,
    assert_raises,
    assert_serves,
    assert_serves_strangers,
    check,
    echo,
    eventually,
    open_to,
    peers_of,
)


@check
async def many_connections_come_and_go(around: Surroundings) -> None:
    async with peers_of(around, 1) as (host,):

        async def visit() -> None:
            async with around.transport(listening=False) as visitor:
                await assert_serves(visitor, host)

        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(visit)
        await assert_serves_strangers(around, host)


@check
async def a_dial_where_no_peer_listens_fails_at_once(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        address = around.unused_address()
        absent = address.rpartition("/")[2]
        with trio.fail_after(TIMEOUT / 2):
            await assert_raises(UnreachableError, here.dial(address, timeout=TIMEOUT))
            for addresses in ((address,), ()):
                await assert_raises(
                    UnreachableError, here.open_stream(absent, ECHO, addresses=addresses, timeout=TIMEOUT)
                )
        assert not here.is_connected(absent)
        await assert_serves(here, there)


@check
async def a_dial_ends_with_its_timeout(around: Surroundings) -> None:
    async with peers_of(around, 1) as (here,), around.transport(listening=False) as silent:
        await assert_raises(
            UnreachableError, here.open_stream(silent.peer_id, ECHO, timeout=0.05, wait_inbound=True)
        )


@check
async def another_peer_at_the_address_is_refused(around: Surroundings) -> None:
    async with peers_of(around, 3) as (here, there, claimed):
        address = there.addresses[0].rpartition("/")[0] + "/" + claimed.peer_id
        await assert_raises(UnreachableError, here.dial(address, timeout=TIMEOUT))
        await assert_raises(
            UnreachableError, here.open_stream(claimed.peer_id, ECHO, addresses=[address], timeout=TIMEOUT)
        )
        assert not here.is_connected(claimed.peer_id)
        await assert_serves(here, there)
        await assert_serves(here, claimed)


@check
async def a_malformed_address_raises_address_error(around: Surroundings) -> None:
    async with peers_of(around, 1) as (here,):
        for address in ("", "nonsense", "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/udp/1", here.addresses[0]):
            await assert_raises(AddressError, here.dial(address, timeout=TIMEOUT))


@check
async def useless_addresses_are_skipped(around: Surroundings) -> None:
    """Strangers may name addresses that are malformed, or that belong to other peers."""
    async with peers_of(around, 3) as (here, there, third):
        addresses = ["nonsense", "/ip4/1.2.3.4/udp/1", *third.addresses, *there.addresses]
        stream = await here.open_stream(there.peer_id, ECHO, addresses=addresses, timeout=TIMEOUT)
        await assert_echoes(stream)
        stream = await here.open_stream(third.peer_id, ECHO, addresses=third.addresses, timeout=TIMEOUT)
        await assert_echoes(stream)


@check
async def a_timeout_may_be_as_long_as_any_exchange(around: Surroundings) -> None:
    """A round leaves it to its failure detector when a member's stream is given up."""
    async with peers_of(around, 2) as (here, there):
        await assert_echoes(
            await here.open_stream(
                there.peer_id, ECHO, addresses=there.addresses, timeout=MAX_TIMEOUT_SECONDS
            )
        )


@check
async def an_inbound_connection_serves_as_well(around: Surroundings) -> None:
    """A peer that cannot be dialled dials itself; the other peer opens its stream over that connection."""
    async with peers_of(around, 1) as (here,), around.transport(listening=False) as hidden:
        hidden.serve(ECHO, echo)
        for addresses in ((), (around.unused_address(),)):
            opened: list[Stream] = []

            async def open_it(addresses: Sequence[str] = addresses, opened: list[Stream] = opened) -> None:
                opened.append(
                    await here.open_stream(
                        hidden.peer_id, ECHO, addresses=addresses, timeout=TIMEOUT, wait_inbound=True
                    )
                )

            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_it)
                await hidden.dial(here.addresses[0], timeout=TIMEOUT)
            await assert_echoes(opened[0])
            await hidden.disconnect(here.peer_id)
            await eventually(lambda: not here.is_connected(hidden.peer_id))


@check
async def both_ends_are_told_of_a_new_connection(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        told: dict[str, list[str]] = {here.peer_id: [], there.peer_id: []}
        with (
            here.watching_connections(told[here.peer_id].append),
            there.watching_connections(told[there.peer_id].append),
        ):
            await assert_serves(here, there)
            await eventually(lambda: bool(told[there.peer_id]))
            assert told == {here.peer_id: [there.peer_id], there.peer_id: [here.peer_id]}
        await here.disconnect(there.peer_id)
        await eventually(lambda: not there.is_connected(here.peer_id))
        await assert_serves(here, there)
        assert told[here.peer_id] == [there.peer_id]


@check
async def a_disconnect_is_seen_by_both(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there), trio.open_nursery() as nursery:
        near, far = CallOutcome(), CallOutcome()
        there.serve(OTHER, lambda stream: far.run(lambda: stream.receive_some(1)))
        stream = await open_to(here, there, OTHER)
        nursery.start_soon(near.run, lambda: stream.receive_some(1))
        assert here.is_connected(there.peer_id)
        await eventually(lambda: there.is_connected(here.peer_id))
        await here.disconnect(there.peer_id)
        assert not here.is_connected(there.peer_id)
        for outcome in (near, far):
            await outcome.done.wait()
            assert isinstance(outcome.error, StreamBrokenError)
        await eventually(lambda: not there.is_connected(here.peer_id))
        await assert_broken(stream.send_all(b"x"))
        await stream.aclose()
        await assert_serves(here, there)
        await assert_serves(there, here)


@check
async def a_peer_that_leaves_breaks_its_streams(around: Surroundings) -> None:
    async with peers_of(around, 1) as (host,):
        outcome, held = CallOutcome(), HeldStream()

        async def read(stream: Stream) -> None:
            held.began.set()
            await outcome.run(lambda: stream.receive_some(1))

        host.serve(OTHER, read)
        async with around.transport() as visitor:
            stream = await open_to(visitor, host, OTHER)
            await held.began.wait()
        await outcome.done.wait()
        assert isinstance(outcome.error, StreamBrokenError)
        await eventually(lambda: not host.is_connected(visitor.peer_id))
        await assert_raises(ClosedError, stream.send_all(b"x"))
        await assert_raises(ClosedError, stream.receive_some(1))
        await stream.aclose()
        await stream.reset()
        await assert_raises(ClosedError, visitor.dial(host.addresses[0], timeout=TIMEOUT))
        await assert_raises(ClosedError, open_to(visitor, host))


@check
async def two_peers_may_dial_each_other_at_once(around: Surroundings) -> None:
    for _ in range(5):
        async with peers_of(around, 2) as (here, there):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(assert_serves, here, there)
                nursery.start_soon(assert_serves, there, here)
            await assert_serves(here, there)
            await assert_serves(there, here)


@check
async def many_tasks_share_one_dial(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(assert_serves, here, there)
        await here.disconnect(there.peer_id)
        assert not here.is_connected(there.peer_id)
