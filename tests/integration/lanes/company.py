"""Helpers of the tests of direct lanes: hosts on loopback, and receivers."""

from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager, suppress

import psutil
import trio

from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.lanes.certificates import OwnCertificate
from p2pavg.net.lanes.halfway import PROTOCOL, LaneOffer, LaneRequest
from p2pavg.net.lanes.pool import LaneKeeper
from p2pavg.net.lanes.tls_lane import TlsLane
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.transport import DirectLane, Stream, Transport, receive_message, send_message
from tests.integration.hosts import LOOPBACK, TIMEOUT, assert_serves, open_host


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        yield here, there


in_thread = trio.to_thread.run_sync


class Serving:
    """A host of lanes that reads them by a function, and expects those of some peers, or of all."""

    def __init__(
        self, read: Callable[[DirectLane], Awaitable[None]], wanted: Container[str] | None = None
    ) -> None:
        self.read, self.wanted = read, wanted

    async def serve_lane(self, lane: DirectLane) -> None:
        await self.read(lane)

    def wants_lane(self, peer_id: str) -> bool:
        return self.wanted is None or peer_id in self.wanted


class Inbox:
    """A handler of lanes that keeps and acknowledges each message, which has a length and a body."""

    def __init__(self) -> None:
        self.lanes: list[TlsLane] = []
        self._send, self.messages = trio.open_memory_channel[bytes](1000)

    async def __call__(self, lane: DirectLane) -> None:
        assert isinstance(lane, TlsLane)
        self.lanes.append(lane)
        self._send.send_nowait(await in_thread(read_message, lane))
        with suppress(StreamBrokenError):  # the sender may be gone
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


async def offered(here: Transport, there: Transport, own: OwnCertificate) -> tuple[Stream, LaneOffer]:
    """Ask for a lane as a sender that goes its own ways."""
    stream = await here.open_stream(there.peer_id, PROTOCOL, addresses=there.addresses, timeout=TIMEOUT)
    await send_message(stream, LaneRequest(own.der).encode())
    return stream, LaneOffer.decode(await receive_message(stream) or b"")


def keeper(host: Libp2pTransport) -> LaneKeeper:
    return host._lanes


async def assert_goes_on(host: Libp2pTransport) -> None:
    """Assert that a host still serves streams and lanes to a new peer."""
    inbox = Inbox()
    host.serve_lanes(Serving(inbox))
    async with open_host() as stranger:
        await assert_serves(stranger, host)
        await post(await lane_to(stranger, host), b"hello")
        assert await inbox.messages.receive() == b"hello"


async def until_still(value: Callable[[], int]) -> None:
    """Wait until a thread seems to make no more progress."""
    before = -1
    while before != (before := value()):
        await trio.sleep(0.1)


def descriptors() -> int:
    return int(psutil.Process().num_fds())
