"""Checks of one stream between two honest peers."""

from __future__ import annotations

import trio

from p2pavg.base.errors import ClosedError, StreamBrokenError
from p2pavg.net.transport import LENGTH_BYTES, Stream, receive_message, send_message
from tests.transport_conformance.tools import (
    MANY_BYTES,
    MAX_MESSAGE_BYTES,
    MORE_THAN_A_WINDOW,
    OTHER,
    CallOutcome,
    HeldStream,
    Surroundings,
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
async def a_message_comes_back(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        stream = await open_to(here, there)
        await assert_echoes(stream, b"x")
        await assert_echoes(stream, b"and another")
        await stream.aclose()


@check
async def the_remote_id_is_the_authenticated_one(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        seen: list[str] = []

        async def note(stream: Stream) -> None:
            seen.append(stream.remote)
            await send_message(stream, b"noted")
            await stream.aclose()

        there.serve(OTHER, note)
        stream = await open_to(here, there, OTHER)
        assert await receive_message(stream) == b"noted"
        assert stream.remote == there.peer_id
        assert seen == [here.peer_id]
        assert here.addresses[0].endswith(f"/p2p/{here.peer_id}")


@check
async def much_data_goes_both_ways_at_once(around: Surroundings) -> None:
    """Both sides send before either has read. A transport that waits for the other side to read would deadlock."""
    async with peers_of(around, 2) as (here, there):
        to_there, to_here = some_bytes(MANY_BYTES, 1), some_bytes(MANY_BYTES, 2)
        received: dict[str, bytes] = {}

        async def exchange(stream: Stream, data: bytes) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_message, stream, data)
                message = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
                assert message is not None
                received[stream.remote] = message

        async def answer(stream: Stream) -> None:
            await exchange(stream, to_here)
            await stream.aclose()

        there.serve(OTHER, answer)
        stream = await open_to(here, there, OTHER)
        await exchange(stream, to_there)
        assert await stream.receive_some(1) == b""
        assert received == {there.peer_id: to_here, here.peer_id: to_there}


@check
async def messages_survive_any_fragmentation(around: Surroundings) -> None:
    messages = [some_bytes(count, 3) for count in (1, 2, 3, 65_535, 65_536, 262_151)]
    sent = b"".join(len(message).to_bytes(LENGTH_BYTES, "big") + message for message in messages)
    async with peers_of(around, 2) as (here, there):
        stream = await open_to(here, there)
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                for start in range(40):
                    await stream.send_all(sent[start : start + 1])
                for start in range(40, len(sent), 7001):
                    await stream.send_all(memoryview(sent)[start : start + 7001])

            nursery.start_soon(send)
            for message in messages:
                assert await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES) == message


@check
async def a_closed_half_ends_after_its_data(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        data = some_bytes(MORE_THAN_A_WINDOW, 4)
        received: list[bytes] = []
        ended = trio.Event()

        async def take(stream: Stream) -> None:
            received.append(await receive_all(stream))
            assert await stream.receive_some(1) == b"", "an end is not followed by anything"
            ended.set()

        there.serve(OTHER, take)
        stream = await open_to(here, there, OTHER)
        await stream.send_all(data)
        await stream.aclose()
        await ended.wait()
        assert received == [data]


@check
async def the_other_half_stays_open(around: Surroundings) -> None:
    """The peer that closed its half still drains the other one: its sender is not blocked, and no other stream is."""
    async with peers_of(around, 2) as (here, there):

        async def say_and_go(stream: Stream) -> None:
            await send_message(stream, b"that is all")
            await stream.aclose()

        there.serve(OTHER, say_and_go)
        stream = await open_to(here, there, OTHER)
        assert await receive_message(stream) == b"that is all"
        assert await stream.receive_some(1) == b""
        await stream.send_all(bytes(MANY_BYTES))
        await stream.aclose()
        await assert_serves(here, there)


@check
async def a_reset_breaks_the_message(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        outcome = CallOutcome()
        there.serve(OTHER, lambda stream: outcome.run(lambda: receive_message(stream)))
        stream = await open_to(here, there, OTHER)
        await stream.send_all(b"\0\0\3\xe8" + b"only ten b")
        await stream.reset()
        await outcome.done.wait()
        assert isinstance(outcome.error, StreamBrokenError)
        await assert_serves_strangers(around, there)


@check
async def a_reset_is_not_an_end(around: Surroundings) -> None:
    """A reset breaks the stream between two messages too, and for a reader that was waiting already."""
    async with peers_of(around, 2) as (here, there):
        outcome, held = CallOutcome(), HeldStream()

        async def read(stream: Stream) -> None:
            held.began.set()
            await outcome.run(lambda: stream.receive_some(10))

        there.serve(OTHER, read)
        stream = await open_to(here, there, OTHER)
        await held.began.wait()
        await stream.reset()
        await outcome.done.wait()
        assert isinstance(outcome.error, StreamBrokenError)


@check
async def an_end_is_not_the_end_of_a_message(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        for sent, complete in (
            (b"", True),
            (b"\0\0", False),
            (b"\0\0\3\xe8", False),
            (b"\0\0\3\xe8ten", False),
        ):
            outcome = CallOutcome()

            async def read(stream: Stream, outcome: CallOutcome = outcome) -> None:
                await outcome.run(lambda: receive_message(stream))

            there.serve(OTHER, read)
            stream = await open_to(here, there, OTHER)
            await stream.send_all(sent)
            await stream.aclose()
            await outcome.done.wait()
            assert isinstance(outcome.error, type(None) if complete else StreamBrokenError), sent


@check
async def a_closed_stream_raises_closed_error(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        for end in ("aclose", "reset"):
            stream = await open_to(here, there)
            await getattr(stream, end)()
            await assert_raises(ClosedError, stream.send_all(b"x"))
            await assert_raises(ClosedError, stream.receive_some(1))
            await stream.aclose()
            await stream.reset()
        await assert_serves(here, there)


@check
async def closing_works_under_cancellation(around: Surroundings) -> None:
    async with peers_of(around, 2) as (here, there):
        for end in ("aclose", "reset"):
            outcome = CallOutcome()

            async def read(stream: Stream, outcome: CallOutcome = outcome) -> None:
                await outcome.run(lambda: receive_all(stream))

            there.serve(OTHER, read)
            stream = await open_to(here, there, OTHER)
            with trio.CancelScope() as scope:
                scope.cancel()
                await getattr(stream, end)()
            await outcome.done.wait()
            assert isinstance(outcome.error, type(None) if end == "aclose" else StreamBrokenError)
