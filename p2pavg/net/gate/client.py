"""The transport of a program whose peer has its network in another process, behind a gate."""

from __future__ import annotations

import logging
import math
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import trio

from p2pavg.base.errors import (
    AddressError,
    BusyError,
    ClosedError,
    ControlError,
    P2PAvgError,
    RefusedError,
    RemoteProtocolError,
    UnreachableError,
)
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.base.messages import Message, decoded
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.gate.chunked_stream import ChunkedStream
from p2pavg.net.gate.messages import (
    MAX_GATE_BYTES,
    AnswerNews,
    AskSignature,
    AskStream,
    Attach,
    ConnectionNews,
    DialAddress,
    DropConnections,
    GateAnswer,
    GateDone,
    GateError,
    GateNews,
    InboundStream,
    PeerNews,
    ProgramTold,
    RememberPeer,
    ServeProtocol,
    Settle,
    Signature,
    StopProgram,
    StreamOpened,
    TakeStream,
)
from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.net.transport import (
    LENGTH_BYTES,
    PeerId,
    Stream,
    StreamHandler,
    Transport,
    receive_message,
    send_message,
)
from p2pavg.net.unix import UnixStream, connect_unix, dial_unix, short_name

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer", bound=Message)

_ERRORS: dict[str, type[P2PAvgError]] = {
    each.__name__: each
    for each in (AddressError, BusyError, ClosedError, RefusedError, RemoteProtocolError, UnreachableError)
}
MAX_SAID = 256  # news of this program that the gate has not read yet


class _ProgramStream(ChunkedStream):
    """A stream of this program, with what only its transport can do."""

    def __init__(self, socket: UnixStream, opened: StreamOpened, transport: GateTransport) -> None:
        super().__init__(socket, opened)
        self._transport = transport

    async def aclose(self) -> None:
        """Close this side's half. The connection stays until the other side has closed its half, or for 10 s."""
        if not self.is_closed:
            await super().aclose()
            self._transport.linger(self)

    async def wait_closed(self) -> None:
        """See :class:`~p2pavg.net.transport.Stream`."""
        await super().wait_closed()
        self._transport.streams.discard(self)

    async def reset(self) -> None:
        """See :class:`~p2pavg.net.transport.Stream`."""
        await super().reset()
        self._transport.streams.discard(self)

    async def reset_connection(self) -> None:
        """Drop the connection below the stream, with everything on it."""
        await self.reset()
        await self._transport.disconnect(self.remote)


class GateTransport(Transport):
    """Made by :func:`open_gate_transport`."""

    def __init__(self, path: Path, nursery: trio.Nursery, news: PeerNews) -> None:
        self.peer_id = news.peer_id
        self.nursery = nursery
        self._path = path
        self._news = news
        self._connected: set[PeerId] = set()
        self._answered: dict[PeerId, float] = {}
        """When the gate last said that a peer's system answers; of the peers that are connected."""
        self._watchers: list[Callable[[PeerId], None]] = []
        self._handlers: dict[str, StreamHandler] = {}
        self.streams: set[Stream] = set()
        """Those whose connections are open."""
        self._closed = False
        self._say, self.said = trio.open_memory_channel[Message](MAX_SAID)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._news.addresses

    @property
    def reachability(self) -> Reachability:
        return self._news.reachability

    async def settle(self) -> None:
        await self._ask(Settle())

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._handlers[protocol] = handler
        self._say.send_nowait(ServeProtocol(protocol))

    async def dial(self, address: str, *, timeout: float) -> PeerId:
        peer_id = (await self._ask(DialAddress(address, timeout))).text
        self._note(peer_id, True)
        return peer_id

    async def open_stream(
        self,
        peer_id: PeerId,
        protocol: str,
        *,
        addresses: Sequence[str] = (),
        timeout: float,
        wait_inbound: bool = False,
    ) -> Stream:
        asked = AskStream(peer_id, protocol, tuple(addresses), timeout, wait_inbound)
        stream = await self._stream(asked)
        # The gate says so too, later: until then, a caller would not find the connection that it has.
        self._note(peer_id, True)
        return stream

    def is_connected(self, peer_id: PeerId) -> bool:
        return peer_id in self._connected

    def answers(self, peer_id: PeerId, seconds: float) -> bool:
        return self._answered.get(peer_id, -math.inf) > trio.current_time() - seconds

    @contextmanager
    def watching_connections(self, connected: Callable[[PeerId], None]) -> Iterator[None]:
        self._watchers.append(connected)
        try:
            yield
        finally:
            self._watchers.remove(connected)

    async def disconnect(self, peer_id: PeerId) -> None:
        try:
            await self._ask(DropConnections(peer_id))
        except P2PAvgError as error:
            logger.debug("cannot tell the gate to disconnect %s: %s", peer_id, error)
        self._note(peer_id, False)

    def remember_peer(self, peer_id: PeerId, *, companion: bool = False) -> None:
        # A wish: while the gate's process stands still, as after Ctrl-Z, some may be lost.
        with suppress(trio.WouldBlock):
            self._say.send_nowait(RememberPeer(peer_id, companion))

    def tell(self, told: ProgramTold) -> None:
        """Tell the process that has the network of something, which checks it itself. It may be lost."""
        with suppress(trio.WouldBlock):
            self._say.send_nowait(told)

    # ------------------------------------------------------------------ the gate's socket

    def receive_news(self, news: GateNews) -> None:
        """Take what the gate says is new."""
        match news:
            case PeerNews():
                self._news = news
            case ConnectionNews(peer_id, is_open):
                self._note(peer_id, is_open)
            case AnswerNews(peer_ids):
                self._answered |= dict.fromkeys(self._connected.intersection(peer_ids), trio.current_time())
            case InboundStream(number, protocol):
                self.nursery.start_soon(self._take, number, protocol)
            case StopProgram():
                # As Ctrl-C, which also ends a wait of the training loop.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _note(self, peer_id: PeerId, is_open: bool) -> None:
        if not is_open:
            self._connected.discard(peer_id)
            self._answered.pop(peer_id, None)
        elif peer_id not in self._connected:
            self._connected.add(peer_id)
            for connected in tuple(self._watchers):
                connected(peer_id)

    async def _take(self, number: int, protocol: str) -> None:
        """Serve a stream of another peer. An exception costs that stream only."""
        handler = self._handlers.get(protocol)
        if handler is None:  # the gate gives it up after a while
            return
        try:
            stream = await self._stream(TakeStream(number))
        except P2PAvgError as error:
            logger.debug("an inbound stream of %s was not taken: %s", protocol, error)
            return
        self._note(stream.remote, True)
        try:
            await handler(stream)
        except P2PAvgError as error:
            logger.debug("%s on a stream of %s: %s", stream.remote, protocol, error)
        except Exception:
            logger.exception("an exception while %s was served on %s", stream.remote, protocol)
        finally:
            # One that its handler has closed lingers, as long as the other side still sends.
            if not stream.is_closed:
                await stream.reset()

    async def _stream(self, request: AskStream | TakeStream) -> _ProgramStream:
        self._check_open()
        socket = await dial_unix(self._path)
        try:
            await send_message(socket, request.encode())
            opened = await _answer_of(socket, StreamOpened)
        except BaseException:
            await socket.reset()
            raise
        stream = _ProgramStream(socket, opened, self)
        self.streams.add(stream)
        return stream

    def linger(self, stream: Stream) -> None:
        """Let a stream that was closed here end by itself."""
        if not self._closed:
            self.nursery.start_soon(stream.wait_closed)

    async def aclose(self) -> None:
        """Reset all streams; later calls raise ClosedError."""
        self._closed = True
        for stream in [*self.streams]:
            await stream.reset()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the peer's network was closed")

    async def _ask(self, request: DialAddress | DropConnections | Settle) -> GateDone:
        self._check_open()
        async with connect_unix(self._path) as socket:
            await send_message(socket, request.encode())
            return await _answer_of(socket, GateDone)


async def _answer_of(socket: UnixStream, kind: type[_Answer]) -> _Answer:
    """Return the gate's answer, of the kind that is expected. Raise the error that it says instead."""
    data = await receive_message(socket, max_bytes=MAX_GATE_BYTES)
    if data is None:
        raise UnreachableError("the process that has this peer's network did not answer")
    return _checked(decoded(data, GateAnswer), kind)


def _checked(answer: Message, kind: type[_Answer]) -> _Answer:
    if isinstance(answer, GateError):
        raise _ERRORS.get(answer.name, UnreachableError)(answer.reason)
    if not isinstance(answer, kind):
        raise RemoteProtocolError(f"a gate answered with {type(answer).__name__}, not {kind.__name__}")
    return answer


@asynccontextmanager
async def open_gate_transport(path: Path) -> AsyncIterator[GateTransport]:
    """Use the network of another process until the end of the block.

    Raises:
        ControlError: no process has a gate there, or it is gone.
        BusyError: another program uses it.
    """
    async with connect_unix(path) as socket:
        await send_message(socket, Attach().encode())
        news = await _answer_of(socket, PeerNews)
        with bare_exceptions():
            async with trio.open_nursery() as nursery:
                transport = GateTransport(path, nursery, news)

                async def send_all_said() -> None:
                    async for each in transport.said:
                        await send_message(socket, each.encode())

                async def receive_all_news() -> None:
                    while (data := await receive_message(socket, max_bytes=MAX_GATE_BYTES)) is not None:
                        transport.receive_news(decoded(data, GateNews))
                    raise ControlError(f"the process behind {path}, which has this peer's network, is gone")

                nursery.start_soon(send_all_said)
                nursery.start_soon(receive_all_news)
                try:
                    yield transport
                finally:
                    await transport.aclose()
                nursery.cancel_scope.cancel()


class GateSigner:
    """Gets the signatures of a peer whose key is in another process. For any thread.

    Args:
        path: of the gate's socket.
        peer_id: of the peer.

    Raises:
        ControlError: no process has a gate there.
    """

    def __init__(self, path: Path, peer_id: PeerId) -> None:
        self.peer_id = peer_id
        self._path = path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._connected()

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of a message.

        Raises:
            RemoteProtocolError: it is of a kind that is not signed for a program.
            ControlError: the process that has the key did not answer.
        """
        asked = AskSignature(message).encode()
        # Of two threads, each gets the answer to its own question.
        with self._lock:
            try:
                opened = self._connected()
                opened.sendall(len(asked).to_bytes(LENGTH_BYTES, "big") + asked)
                data = _received(opened, int.from_bytes(_received(opened, LENGTH_BYTES), "big"))
            except OSError as error:
                # An answer that comes late must not be taken for the one to the next question.
                self.close()
                raise ControlError(f"the process that has this peer's key did not answer: {error}") from None
        return _checked(decoded(data, GateAnswer), Signature).signature

    def _connected(self) -> socket.socket:
        if self._socket is None:
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                opened.settimeout(REPLY_SECONDS)
                with short_name(self._path) as name:
                    opened.connect(name)
            except OSError as error:
                opened.close()
                raise ControlError(f"cannot connect to {self._path}: {error}") from None
            self._socket = opened
        return self._socket

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _received(opened: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = opened.recv(count - len(found))
        if not part:
            raise ConnectionResetError("it has closed the connection")
        found += part
    return found
