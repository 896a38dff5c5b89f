"""What the tests of direct lanes share: hosts on loopback, and who receives."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil
import trio

from p2pavg.errors import StreamBrokenError
from p2pavg.net.direct import LaneKeeper
from p2pavg.net.framing import receive_message, send_message
from p2pavg.net.libp2p import Libp2pTransport, open_libp2p_transport
from p2pavg.net.tls_lane import TlsLane
from p2pavg.net.transport import DirectLane, Transport
from p2pavg.testing.transport_conformance import ECHO, echo

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


TIMEOUT = 20.0


_seeds = iter(number.to_bytes(32, "big") for number in range(500_000, 600_000))


def watched(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """What is missing shows as waiting for ever."""

    @functools.wraps(test)
    async def bounded(*args: Any, **kwargs: Any) -> None:
        with trio.fail_after(30.0):
            await test(*args, **kwargs)

    return bounded


@asynccontextmanager
async def open_host(*listen: str) -> AsyncIterator[Libp2pTransport]:
    async with open_libp2p_transport(seed=next(_seeds), listen=listen) as host:
        host.serve(ECHO, echo)
        yield host


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        yield here, there


async def eventually(condition: Callable[[], bool]) -> None:
    """For what no event announces; the watchdog bounds it."""
    while not condition():
        await trio.sleep(0.005)


in_thread = trio.to_thread.run_sync


class Inbox:
    """Serves lanes: messages of a length and a body, each kept and acknowledged."""

    def __init__(self) -> None:
        self.lanes: list[TlsLane] = []
        self._send, self.messages = trio.open_memory_channel[bytes](1000)

    async def __call__(self, lane: DirectLane) -> None:
        assert isinstance(lane, TlsLane)
        self.lanes.append(lane)
        self._send.send_nowait(await in_thread(read_message, lane))
        with suppress(StreamBrokenError):  # the sender may have gone
            await in_thread(lane.acknowledge)


def read_message(lane: DirectLane) -> bytes:
    header = bytearray(8)
    lane.receive_into(memoryview(header))
    body = bytearray(int.from_bytes(header, "big"))
    lane.receive_into(memoryview(body))
    return bytes(body)


async def post(lane: DirectLane, body: bytes) -> None:
    def send() -> None:
        lane.send(len(body).to_bytes(8, "big"))
        lane.send(body)

    await in_thread(send)


async def lane_to(here: Transport, there: Transport) -> TlsLane:
    lane = await here.open_lane(there.peer_id, addresses=there.addresses, timeout=TIMEOUT)
    assert isinstance(lane, TlsLane)
    return lane


def keeper(host: Libp2pTransport) -> LaneKeeper:
    return host._lanes


def port_of(host: Transport) -> int:
    return int(host.addresses[0].split("/")[4])


async def assert_serves(here: Transport, there: Transport) -> None:
    stream = await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)
    await send_message(stream, b"are you there?")
    assert await receive_message(stream) == b"are you there?"
    await stream.aclose()


async def assert_goes_on(host: Libp2pTransport) -> None:
    """It still speaks libp2p, and still gives lanes, to somebody new."""
    inbox = Inbox()
    host.serve_lanes(inbox)
    async with open_host() as stranger:
        await assert_serves(stranger, host)
        await post(await lane_to(stranger, host), b"hello")
        assert await inbox.messages.receive() == b"hello"


async def until_still(value: Callable[[], int]) -> None:
    """Until a thread makes no progress any more, as far as can be seen."""
    before = -1
    while before != (before := value()):
        await trio.sleep(0.1)


def descriptors() -> int:
    return int(psutil.Process().num_fds())
