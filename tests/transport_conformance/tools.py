"""The registry of the checks, and the helpers that they share."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

import trio

from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.transport import Stream, Transport, receive_message, send_message

WATCHDOG_SECONDS = 180.0
TIMEOUT = 20.0
"""The timeout of calls that are expected to succeed, or to fail long before it."""

ECHO = "/conformance/echo/1"
OTHER = "/conformance/other/1"
MANY_BYTES = 8 * 1024 * 1024
MORE_THAN_A_WINDOW = 1024 * 1024
MAX_MESSAGE_BYTES = 2 * MANY_BYTES


class Surroundings(Protocol):
    """The transport under test: a factory of peers that can reach each other."""

    def transport(self, *, listening: bool = True) -> AbstractAsyncContextManager[Transport]:
        """Make a peer with its own identity. A peer that does not listen can only dial."""

    def unused_address(self) -> str:
        """Return an address, with a peer id, at which no peer listens."""


Check = Callable[[Surroundings], Awaitable[None]]

CHECKS: list[Check] = []
"""Every check of the suite."""


def check(function: Check) -> Check:
    """Add a check to the suite, with a watchdog around it."""

    @functools.wraps(function)
    async def watched(around: Surroundings) -> None:
        with trio.fail_after(WATCHDOG_SECONDS):
            await function(around)

    CHECKS.append(watched)
    return watched


@asynccontextmanager
async def peers_of(around: Surroundings, count: int) -> AsyncIterator[list[Transport]]:
    """Make ``count`` peers that all serve an echo."""
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(around.transport()) for _ in range(count)]
        for peer in peers:
            peer.serve(ECHO, echo)
        yield peers


async def echo(stream: Stream) -> None:
    """Serve a stream: answer every message with the same message."""
    while (message := await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)) is not None:
        await send_message(stream, message)
    await stream.aclose()


async def open_to(here: Transport, there: Transport, protocol: str = ECHO) -> Stream:
    """Open a stream from one peer to another."""
    return await here.open_stream(there.peer_id, protocol, addresses=there.addresses, timeout=TIMEOUT)


async def assert_echoes(stream: Stream, message: bytes = b"are you there?") -> None:
    """Assert that the other side returns a message."""
    await send_message(stream, message)
    assert await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES) == message


async def assert_serves(here: Transport, there: Transport) -> None:
    """Assert that ``there`` still serves a new stream of ``here``."""
    stream = await open_to(here, there)
    await assert_echoes(stream)
    await stream.aclose()


async def assert_serves_strangers(around: Surroundings, host: Transport) -> None:
    """Assert that ``host`` still serves a peer that it has never met."""
    async with around.transport() as stranger:
        await assert_serves(stranger, host)


async def assert_broken(call: Awaitable[object]) -> None:
    """Assert that a call raises StreamBrokenError."""
    await assert_raises(StreamBrokenError, call)


async def assert_raises(expected: type[Exception], call: Awaitable[object]) -> None:
    """Assert that a call raises an exception of this type."""
    try:
        result = await call
    except expected:
        return
    raise AssertionError(f"{expected.__name__} was expected, not {result!r}")


async def eventually(condition: Callable[[], bool]) -> None:
    """Poll for a condition that no event announces; the watchdog bounds the wait."""
    while not condition():
        await trio.sleep(0.005)


async def receive_all(stream: Stream) -> bytes:
    """Return everything that comes before the other side closes its half."""
    received = bytearray()
    while chunk := await stream.receive_some(65536):
        received += chunk
    return bytes(received)


class HeldStream:
    """A handler that takes its stream and leaves it alone until ``release`` is set."""

    def __init__(self) -> None:
        self.began = trio.Event()
        self.release = trio.Event()
        self.stream: Stream | None = None

    async def __call__(self, stream: Stream) -> None:
        self.stream = stream
        self.began.set()
        await self.release.wait()


class CallOutcome:
    """The outcome of a call that runs in a task of its own."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: Exception | None = None
        self.scope = trio.CancelScope()

    async def run(self, call: Callable[[], Awaitable[object]]) -> None:
        """Make the call and note how it ended."""
        with self.scope:
            try:
                await call()
            except Exception as error:  # noqa: BLE001 - the check says which it has to be
                self.error = error
        self.done.set()


def some_bytes(count: int, salt: int) -> bytes:
    """Return ``count`` bytes that look random and depend on ``salt``."""
    block = b"".join(hashlib.sha256(bytes([salt, number])).digest() for number in range(256))
    return (block * (count // len(block) + 1))[:count]
