"""What every :class:`~p2pavg.net.transport.Transport` has to do, as plain async functions with asserts.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    async def test_conformance(check): await check(my_surroundings)

Each check makes its peers itself and ends them. Its limits in time are watchdogs and measure nothing.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

import trio

from p2pavg.errors import (
    AddressError,
    ClosedError,
    RemoteProtocolError,
    StreamBrokenError,
    UnreachableError,
)
from p2pavg.net.framing import LENGTH_BYTES, receive_message, send_message
from p2pavg.net.transport import Stream, Transport

WATCHDOG_SECONDS = 60.0
TIMEOUT = 20.0
"""For calls that are meant to succeed, or to fail long before it."""

ECHO = "/conformance/echo/1"
OTHER = "/conformance/other/1"
MANY_BYTES = 8 * 1024 * 1024
MORE_THAN_A_WINDOW = 1024 * 1024
MAX_MESSAGE_BYTES = 2 * MANY_BYTES


class Surroundings(Protocol):
    """How to make peers that can reach each other."""

    def transport(self, *, listening: bool = True) -> AbstractAsyncContextManager[Transport]:
        """A peer with an identity of its own; one that does not listen can only dial."""

    def address_of_nobody(self) -> str:
        """An address, with a peer id, where nobody listens."""


Check = Callable[[Surroundings], Awaitable[None]]

CHECKS: list[Check] = []
"""All of the suite."""


def _check(check: Check) -> Check:
    @functools.wraps(check)
    async def watched(around: Surroundings) -> None:
        with trio.fail_after(WATCHDOG_SECONDS):
            await check(around)

    CHECKS.append(watched)
    return watched


@asynccontextmanager
async def _peers(around: Surroundings, count: int) -> AsyncIterator[list[Transport]]:
    """Peers that all serve an echo."""
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(around.transport()) for _ in range(count)]
        for peer in peers:
            peer.serve(ECHO, echo)
        yield peers


async def echo(stream: Stream) -> None:
    """Answers every message with itself."""
    while (message := await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)) is not None:
        await send_message(stream, message)
    await stream.aclose()


async def _open(here: Transport, there: Transport, protocol: str = ECHO) -> Stream:
    return await here.open_stream(there.peer_id, protocol, addresses=there.addresses, timeout=TIMEOUT)


async def _assert_echoes(stream: Stream, message: bytes = b"are you there?") -> None:
    await send_message(stream, message)
    assert await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES) == message


async def _assert_serves(here: Transport, there: Transport) -> None:
    stream = await _open(here, there)
    await _assert_echoes(stream)
    await stream.aclose()


async def _assert_serves_strangers(around: Surroundings, host: Transport) -> None:
    async with around.transport() as stranger:
        await _assert_serves(stranger, host)


async def _assert_broken(call: Awaitable[object]) -> None:
    await _assert_raises(StreamBrokenError, call)


async def _assert_raises(expected: type[Exception], call: Awaitable[object]) -> None:
    try:
        result = await call
    except expected:
        return
    raise AssertionError(f"{expected.__name__} was expected, not {result!r}")


async def _eventually(condition: Callable[[], bool]) -> None:
    """For what no event announces; the watchdog bounds it."""
    while not condition():  # noqa: ASYNC110 - there is no event to wait for
        await trio.sleep(0.005)


async def _receive_all(stream: Stream) -> bytes:
    received = bytearray()
    while chunk := await stream.receive_some(65536):
        received += chunk
    return bytes(received)


class _Held:
    """A handler that takes its stream, and does nothing with it until it is told to."""

    def __init__(self) -> None:
        self.began = trio.Event()
        self.release = trio.Event()
        self.stream: Stream | None = None

    async def __call__(self, stream: Stream) -> None:
        self.stream = stream
        self.began.set()
        await self.release.wait()


class _Outcome:
    """What a call in a task of its own came to."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: Exception | None = None
        self.scope = trio.CancelScope()

    async def run(self, call: Callable[[], Awaitable[object]]) -> None:
        with self.scope:
            try:
                await call()
            except Exception as error:  # noqa: BLE001 - the check says which it has to be
                self.error = error
        self.done.set()


def _some_bytes(count: int, salt: int) -> bytes:
    block = b"".join(hashlib.sha256(bytes([salt, number])).digest() for number in range(256))
    return (block * (count // len(block) + 1))[:count]


# -- one stream


@_check
async def a_message_comes_back(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        stream = await _open(here, there)
        await _assert_echoes(stream, b"x")
        await _assert_echoes(stream, b"and another")
        await stream.aclose()


@_check
async def the_remote_id_is_the_authenticated_one(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        seen: list[str] = []

        async def note(stream: Stream) -> None:
            seen.append(stream.remote)
            await send_message(stream, b"noted")
            await stream.aclose()

        there.serve(OTHER, note)
        stream = await _open(here, there, OTHER)
        assert await receive_message(stream) == b"noted"
        assert stream.remote == there.peer_id
        assert seen == [here.peer_id]
        assert here.addresses[0].endswith(f"/p2p/{here.peer_id}")


@_check
async def much_data_goes_both_ways_at_once(around: Surroundings) -> None:
    """Both sides send before either has read: whoever waits for the other's reading first waits for ever."""
    async with _peers(around, 2) as (here, there):
        to_there, to_here = _some_bytes(MANY_BYTES, 1), _some_bytes(MANY_BYTES, 2)
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
        stream = await _open(here, there, OTHER)
        await exchange(stream, to_there)
        assert await stream.receive_some(1) == b""
        assert received == {there.peer_id: to_here, here.peer_id: to_there}


@_check
async def messages_do_not_depend_on_how_they_were_cut(around: Surroundings) -> None:
    messages = [_some_bytes(count, 3) for count in (1, 2, 3, 65_535, 65_536, 262_151)]
    sent = b"".join(len(message).to_bytes(LENGTH_BYTES, "big") + message for message in messages)
    async with _peers(around, 2) as (here, there):
        stream = await _open(here, there)
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                for start in range(40):
                    await stream.send_all(sent[start : start + 1])
                for start in range(40, len(sent), 7001):
                    await stream.send_all(memoryview(sent)[start : start + 7001])

            nursery.start_soon(send)
            for message in messages:
                assert await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES) == message


@_check
async def a_closed_half_ends_after_its_data(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        data = _some_bytes(MORE_THAN_A_WINDOW, 4)
        received: list[bytes] = []
        ended = trio.Event()

        async def take(stream: Stream) -> None:
            received.append(await _receive_all(stream))
            assert await stream.receive_some(1) == b"", "an end is not followed by anything"
            ended.set()

        there.serve(OTHER, take)
        stream = await _open(here, there, OTHER)
        await stream.send_all(data)
        await stream.aclose()
        await ended.wait()
        assert received == [data]


@_check
async def the_other_half_stays_open(around: Surroundings) -> None:
    """And whoever still sends to one that has let go of the stream is neither blocked nor costs anybody else."""
    async with _peers(around, 2) as (here, there):

        async def say_and_go(stream: Stream) -> None:
            await send_message(stream, b"that is all")
            await stream.aclose()

        there.serve(OTHER, say_and_go)
        stream = await _open(here, there, OTHER)
        assert await receive_message(stream) == b"that is all"
        assert await stream.receive_some(1) == b""
        await stream.send_all(bytes(MANY_BYTES))
        await stream.aclose()
        await _assert_serves(here, there)


@_check
async def a_reset_breaks_the_message(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        outcome = _Outcome()
        there.serve(OTHER, lambda stream: outcome.run(lambda: receive_message(stream)))
        stream = await _open(here, there, OTHER)
        await stream.send_all(b"\0\0\3\xe8" + b"only ten b")
        await stream.reset()
        await outcome.done.wait()
        assert isinstance(outcome.error, StreamBrokenError)
        await _assert_serves_strangers(around, there)


@_check
async def a_reset_is_not_an_end(around: Surroundings) -> None:
    """Also between two messages, and also for a reader that was waiting already."""
    async with _peers(around, 2) as (here, there):
        outcome, held = _Outcome(), _Held()

        async def read(stream: Stream) -> None:
            held.began.set()
            await outcome.run(lambda: stream.receive_some(10))

        there.serve(OTHER, read)
        stream = await _open(here, there, OTHER)
        await held.began.wait()
        await stream.reset()
        await outcome.done.wait()
        assert isinstance(outcome.error, StreamBrokenError)


@_check
async def an_end_is_not_the_end_of_a_message(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        for sent, complete in (
            (b"", True),
            (b"\0\0", False),
            (b"\0\0\3\xe8", False),
            (b"\0\0\3\xe8ten", False),
        ):
            outcome = _Outcome()

            async def read(stream: Stream, outcome: _Outcome = outcome) -> None:
                await outcome.run(lambda: receive_message(stream))

            there.serve(OTHER, read)
            stream = await _open(here, there, OTHER)
            await stream.send_all(sent)
            await stream.aclose()
            await outcome.done.wait()
            assert isinstance(outcome.error, type(None) if complete else StreamBrokenError), sent


@_check
async def a_closed_stream_says_so(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        for end in ("aclose", "reset"):
            stream = await _open(here, there)
            await getattr(stream, end)()
            await _assert_raises(ClosedError, stream.send_all(b"x"))
            await _assert_raises(ClosedError, stream.receive_some(1))
            await stream.aclose()
            await stream.reset()
        await _assert_serves(here, there)


@_check
async def closing_works_under_cancellation(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        for end in ("aclose", "reset"):
            outcome = _Outcome()

            async def read(stream: Stream, outcome: _Outcome = outcome) -> None:
                await outcome.run(lambda: _receive_all(stream))

            there.serve(OTHER, read)
            stream = await _open(here, there, OTHER)
            with trio.CancelScope() as scope:
                scope.cancel()
                await getattr(stream, end)()
            await outcome.done.wait()
            assert isinstance(outcome.error, type(None) if end == "aclose" else StreamBrokenError)


# -- abuse


@_check
async def a_stalled_reader_holds_up_its_sender_only(around: Surroundings) -> None:
    async with _peers(around, 3) as (here, there, third), trio.open_nursery() as nursery:
        held, outcome = _Held(), _Outcome()
        there.serve(OTHER, held)
        stream = await _open(here, there, OTHER)
        nursery.start_soon(outcome.run, lambda: stream.send_all(bytes(MANY_BYTES)))
        await held.began.wait()
        await _assert_serves(here, there)
        await _assert_serves(there, here)
        await _assert_serves(third, there)
        assert not outcome.done.is_set(), "more was sent than the reader has room for"
        held.release.set()  # the handler returns, and so its stream is reset
        await outcome.done.wait()
        assert isinstance(outcome.error, StreamBrokenError)
        await _assert_serves(here, there)


@_check
async def a_cancelled_write_costs_its_direction_only(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there), trio.open_nursery() as nursery:
        held, outcome = _Held(), _Outcome()
        there.serve(OTHER, held)
        stream = await _open(here, there, OTHER)
        nursery.start_soon(outcome.run, lambda: stream.send_all(bytes(MANY_BYTES)))
        await held.began.wait()
        await _assert_serves(here, there)
        outcome.scope.cancel()
        await outcome.done.wait()
        assert outcome.scope.cancelled_caught
        await _assert_broken(stream.send_all(b"x"))
        assert held.stream is not None
        await held.stream.send_all(b"the other direction")
        assert await stream.receive_some(100) == b"the other direction"
        await _assert_serves(here, there)
        await stream.aclose()
        await _assert_broken(_receive_all(held.stream))
        held.release.set()
        await _assert_serves_strangers(around, there)


@_check
async def a_cancelled_read_costs_its_direction_only(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there), trio.open_nursery() as nursery:
        outcome, received = _Outcome(), trio.Event()

        async def take(stream: Stream) -> None:
            assert await receive_message(stream) == b"the other direction"
            received.set()

        there.serve(OTHER, take)
        stream = await _open(here, there, OTHER)
        nursery.start_soon(outcome.run, lambda: stream.receive_some(1))
        await _assert_serves(here, there)
        outcome.scope.cancel()
        await outcome.done.wait()
        assert outcome.scope.cancelled_caught
        await _assert_broken(stream.receive_some(1))
        await send_message(stream, b"the other direction")
        await received.wait()
        await _assert_serves(here, there)


@_check
async def whatever_a_handler_raises_costs_its_stream_only(around: Surroundings) -> None:
    errors: Sequence[Exception] = (
        RuntimeError("a bug"),
        ExceptionGroup("of a nursery", [KeyError("x"), ExceptionGroup("inner", [ValueError("y")])]),
        StreamBrokenError("of another stream"),
        RemoteProtocolError("nonsense"),
        trio.TooSlowError(),
        OSError("no space"),
        StopIteration(),
    )
    async with _peers(around, 2) as (here, there):
        for error in errors:

            async def fail(stream: Stream, error: Exception = error) -> None:
                await receive_message(stream)
                raise error

            there.serve(OTHER, fail)
            stream = await _open(here, there, OTHER)
            await send_message(stream, b"go")
            await _assert_broken(stream.receive_some(1))
            await _assert_serves(here, there)
        await _assert_serves_strangers(around, there)


@_check
async def a_stream_is_reset_when_its_handler_returns(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):

        async def leave(stream: Stream) -> None:
            await receive_message(stream)

        there.serve(OTHER, leave)
        stream = await _open(here, there, OTHER)
        await send_message(stream, b"go")
        await _assert_broken(stream.receive_some(1))


@_check
async def a_handler_may_lose_its_stream(around: Surroundings) -> None:
    """The remote resets while the handler sends, and the handler lets the error out."""
    async with _peers(around, 2) as (here, there):
        ended = trio.Event()

        async def flood(stream: Stream) -> None:
            try:
                await stream.send_all(bytes(MANY_BYTES))
            finally:
                ended.set()

        there.serve(OTHER, flood)
        stream = await _open(here, there, OTHER)
        await stream.receive_some(1)
        await stream.reset()
        await ended.wait()
        await _assert_serves(here, there)
        await _assert_serves_strangers(around, there)


@_check
async def a_protocol_that_nobody_serves_is_refused(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        await _assert_raises(UnreachableError, _open(here, there, "/conformance/unheard-of/1"))
        await _assert_serves(here, there)
        await _assert_serves_strangers(around, there)


@_check
async def garbage_costs_its_stream_only(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        for garbage in (b"\xff" * 4096, bytes(4096), _some_bytes(4096, 5)):
            stream = await _open(here, there)
            await stream.send_all(garbage)
            await _assert_broken(_receive_all(stream))
            await _assert_serves(here, there)
        await _assert_serves_strangers(around, there)


@_check
async def two_hundred_streams_at_once(around: Surroundings) -> None:
    """A hundred from either side of one connection."""
    async with _peers(around, 2) as (here, there):
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        all_open = trio.Event()
        streams: list[Stream] = []

        async def one(opener: Transport, other: Transport, number: int) -> None:
            stream = await _open(opener, other)
            streams.append(stream)
            if len(streams) == 200:
                all_open.set()
            await all_open.wait()
            await _assert_echoes(stream, b"%d" % number)
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(one, here, there, number)
                nursery.start_soon(one, there, here, number)
        await _assert_serves(here, there)


# -- connections


@_check
async def hundreds_of_connections_come_and_go(around: Surroundings) -> None:
    async with _peers(around, 1) as (host,):

        async def visit() -> None:
            async with around.transport(listening=False) as visitor:
                await _assert_serves(visitor, host)

        for _ in range(6):
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(visit)
        await _assert_serves_strangers(around, host)


@_check
async def nobody_is_refused_without_waiting(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        address = around.address_of_nobody()
        nobody = address.rpartition("/")[2]
        with trio.fail_after(TIMEOUT / 2):
            await _assert_raises(UnreachableError, here.dial(address, timeout=TIMEOUT))
            for addresses in ((address,), ()):
                await _assert_raises(
                    UnreachableError, here.open_stream(nobody, ECHO, addresses=addresses, timeout=TIMEOUT)
                )
        assert not here.is_connected(nobody)
        await _assert_serves(here, there)


@_check
async def a_dial_ends_with_its_timeout(around: Surroundings) -> None:
    async with _peers(around, 1) as (here,), around.transport(listening=False) as silent:
        await _assert_raises(
            UnreachableError,
            here.open_stream(silent.peer_id, ECHO, timeout=0.05, wait_inbound=True),
        )


@_check
async def somebody_else_at_an_address_is_refused(around: Surroundings) -> None:
    async with _peers(around, 3) as (here, there, claimed):
        address = there.addresses[0].rpartition("/")[0] + "/" + claimed.peer_id
        await _assert_raises(UnreachableError, here.dial(address, timeout=TIMEOUT))
        await _assert_raises(
            UnreachableError,
            here.open_stream(claimed.peer_id, ECHO, addresses=[address], timeout=TIMEOUT),
        )
        assert not here.is_connected(claimed.peer_id)
        await _assert_serves(here, there)
        await _assert_serves(here, claimed)


@_check
async def what_is_no_address_is_the_callers_error(around: Surroundings) -> None:
    async with _peers(around, 1) as (here,):
        for address in ("", "nonsense", "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/udp/1", here.addresses[0]):
            await _assert_raises(AddressError, here.dial(address, timeout=TIMEOUT))


@_check
async def addresses_that_are_no_use_are_passed_over(around: Surroundings) -> None:
    """They come from strangers."""
    async with _peers(around, 3) as (here, there, third):
        addresses = ["nonsense", "/ip4/1.2.3.4/udp/1", *third.addresses, *there.addresses]
        stream = await here.open_stream(there.peer_id, ECHO, addresses=addresses, timeout=TIMEOUT)
        await _assert_echoes(stream)
        stream = await here.open_stream(third.peer_id, ECHO, addresses=third.addresses, timeout=TIMEOUT)
        await _assert_echoes(stream)


@_check
async def an_inbound_connection_is_as_good(around: Surroundings) -> None:
    """One of two cannot be dialled: it dials, and the other opens its stream over that connection."""
    async with _peers(around, 1) as (here,), around.transport(listening=False) as hidden:
        hidden.serve(ECHO, echo)
        for addresses in ((), (around.address_of_nobody(),)):
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
            await _assert_echoes(opened[0])
            await hidden.disconnect(here.peer_id)
            await _eventually(lambda: not here.is_connected(hidden.peer_id))


@_check
async def a_disconnect_is_seen_by_both(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there), trio.open_nursery() as nursery:
        near, far = _Outcome(), _Outcome()
        there.serve(OTHER, lambda stream: far.run(lambda: stream.receive_some(1)))
        stream = await _open(here, there, OTHER)
        nursery.start_soon(near.run, lambda: stream.receive_some(1))
        assert here.is_connected(there.peer_id)
        await _eventually(lambda: there.is_connected(here.peer_id))
        await here.disconnect(there.peer_id)
        assert not here.is_connected(there.peer_id)
        for outcome in (near, far):
            await outcome.done.wait()
            assert isinstance(outcome.error, StreamBrokenError)
        await _eventually(lambda: not there.is_connected(here.peer_id))
        await _assert_broken(stream.send_all(b"x"))
        await stream.aclose()
        await _assert_serves(here, there)
        await _assert_serves(there, here)


@_check
async def who_leaves_breaks_its_streams(around: Surroundings) -> None:
    async with _peers(around, 1) as (host,):
        outcome, held = _Outcome(), _Held()

        async def read(stream: Stream) -> None:
            held.began.set()
            await outcome.run(lambda: stream.receive_some(1))

        host.serve(OTHER, read)
        async with around.transport() as visitor:
            stream = await _open(visitor, host, OTHER)
            await held.began.wait()
        await outcome.done.wait()
        assert isinstance(outcome.error, StreamBrokenError)
        await _eventually(lambda: not host.is_connected(visitor.peer_id))
        await _assert_raises(ClosedError, stream.send_all(b"x"))
        await _assert_raises(ClosedError, stream.receive_some(1))
        await stream.aclose()
        await stream.reset()
        await _assert_raises(ClosedError, visitor.dial(host.addresses[0], timeout=TIMEOUT))
        await _assert_raises(ClosedError, _open(visitor, host))


@_check
async def two_may_dial_each_other_at_once(around: Surroundings) -> None:
    for _ in range(5):
        async with _peers(around, 2) as (here, there):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_assert_serves, here, there)
                nursery.start_soon(_assert_serves, there, here)
            await _assert_serves(here, there)
            await _assert_serves(there, here)


@_check
async def many_tasks_share_one_dial(around: Surroundings) -> None:
    async with _peers(around, 2) as (here, there):
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(_assert_serves, here, there)
        await here.disconnect(there.peer_id)
        assert not here.is_connected(there.peer_id)


__all__ = ["CHECKS", "Check", "Surroundings", "echo"]
