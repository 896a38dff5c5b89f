"""Checks that a fault of one stream, handler or peer costs only that one."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.net.transport import Stream, Transport, receive_message, send_message
from tests.transport_conformance.tools import (
    MANY_BYTES,
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
    open_to,
    peers_of,
    receive_all,
    some_bytes,
)


@check
async def a_stalled_reader_holds_up_its_sender_only(around: Surroundings) -> None:
    async with peers_of(around, 3) as (here, there, third), trio.open_nursery() as nursery:
        held, outcome = HeldStream(), CallOutcome()
        there.serve(OTHER, held)
        stream = await open_to(here, there, OTHER)
        nursery.start_soon(outcome.run, lambda: stream.send_all(bytes(MANY_BYTES)))
        await held.began.wait()
        await assert_serves(here, there)
        await assert_serves(there, here)
        await assert_serves(third, there)
        assert not outcome.done.is_set(), "more was sent than the reader has room for"
        held.release.set()  # the handler returns, and so its stream is reset
        await outcome.done.wait()
        assert isinstance(outcome.error, StreamBrokenError)
        await assert_serves(here, there)


@check
async def a_cancelled_write_costs_its_direction_only(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there), trio.open_nursery() as nursery:
        held, outcome = HeldStream(), CallOutcome()
        there.serve(OTHER, held)
        stream = await open_to(here, there, OTHER)
        nursery.start_soon(outcome.run, lambda: stream.send_all(bytes(MANY_BYTES)))
        await held.began.wait()
        await assert_serves(here, there)
        outcome.scope.cancel()
        await outcome.done.wait()
        assert outcome.scope.cancelled_caught
        await assert_broken(stream.send_all(b"x"))
        assert held.stream is not None
        await held.stream.send_all(b"the other direction")
        assert await stream.receive_some(100) == b"the other direction"
        await assert_serves(here, there)
        await stream.aclose()
        await assert_broken(receive_all(held.stream))
        held.release.set()
        await assert_serves_strangers(around, there)


@check
async def a_cancelled_read_costs_its_direction_only(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there), trio.open_nursery() as nursery:
        outcome, received = CallOutcome(), trio.Event()

        async def take(stream: Stream) -> None:
            assert await receive_message(stream) == b"the other direction"
            received.set()

        there.serve(OTHER, take)
        stream = await open_to(here, there, OTHER)
        nursery.start_soon(outcome.run, lambda: stream.receive_some(1))
        await assert_serves(here, there)
        outcome.scope.cancel()
        await outcome.done.wait()
        assert outcome.scope.cancelled_caught
        await assert_broken(stream.receive_some(1))
        await send_message(stream, b"the other direction")
        await received.wait()
        await assert_serves(here, there)


@check
async def an_exception_of_a_handler_costs_its_stream_only(around: Surroundings) -> None:
    errors: Sequence[Exception] = (
        RuntimeError("a bug"),
        ExceptionGroup("of a nursery", [KeyError("x"), ExceptionGroup("inner", [ValueError("y")])]),
        StreamBrokenError("of another stream"),
        RemoteProtocolError("nonsense"),
        trio.TooSlowError(),
        OSError("no space"),
        StopIteration(),
    )
    async with peers_of(around, 2) as (here, there):
        for error in errors:

            async def fail(stream: Stream, error: Exception = error) -> None:
                await receive_message(stream)
                raise error

            there.serve(OTHER, fail)
            stream = await open_to(here, there, OTHER)
            await send_message(stream, b"go")
            await assert_broken(stream.receive_some(1))
            await assert_serves(here, there)
        await assert_serves_strangers(around, there)


@check
async def a_stream_is_reset_when_its_handler_returns(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):

        async def leave(stream: Stream) -> None:
            await receive_message(stream)

        there.serve(OTHER, leave)
        stream = await open_to(here, there, OTHER)
        await send_message(stream, b"go")
        await assert_broken(stream.receive_some(1))


@check
async def a_handler_may_lose_its_stream(around: Surroundings) -> None:
    """The remote resets while the handler sends, and the handler lets the error out."""
    async with peers_of(around, 2) as (here, there):
        ended = trio.Event()

        async def flood(stream: Stream) -> None:
            try:
                await stream.send_all(bytes(MANY_BYTES))
            finally:
                ended.set()

        there.serve(OTHER, flood)
        stream = await open_to(here, there, OTHER)
        await stream.receive_some(1)
        await stream.reset()
        await ended.wait()
        await assert_serves(here, there)
        await assert_serves_strangers(around, there)


@check
async def an_unserved_protocol_is_refused(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        await assert_raises(UnreachableError, open_to(here, there, "/conformance/unheard-of/1"))
        await assert_serves(here, there)
        await assert_serves_strangers(around, there)


@check
async def garbage_costs_its_stream_only(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        for garbage in (b"\xff" * 4096, bytes(4096), some_bytes(4096, 5)):
            stream = await open_to(here, there)
            await stream.send_all(garbage)
            await assert_broken(receive_all(stream))
            await assert_serves(here, there)
        await assert_serves_strangers(around, there)


@check
async def two_hundred_streams_at_once(around: Surroundings) -> None:
    """Each side of one connection opens a hundred streams."""
    async with peers_of(around, 2) as (here, there):
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        all_open = trio.Event()
        streams: list[Stream] = []

        async def one(opener: Transport, other: Transport, number: int) -> None:
            stream = await open_to(opener, other)
            streams.append(stream)
            if len(streams) == 200:
                all_open.set()
            await all_open.wait()
            await assert_echoes(stream, b"%d" % number)
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(one, here, there, number)
                nursery.start_soon(one, there, here, number)
        await assert_serves(here, there)
