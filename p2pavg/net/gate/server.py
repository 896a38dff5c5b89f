"""The gate: it hands the network of this process to one program, through a Unix socket.

The program may be hostile. It opens and serves streams of the protocols that the gate names, to peers and addresses
that this peer would dial for a stranger's record; it gets signatures of messages that the gate allows; and it has no
socket of the network, and no key. What it asks for is bounded by the number of its connections.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType

import trio

from p2pavg.base.errors import (
    BusyError,
    ClosedError,
    P2PAvgError,
    RemoteProtocolError,
    StreamBrokenError,
    UnreachableError,
)
from p2pavg.base.limits import GLANCE_SECONDS, LOOK_SECONDS, REPLY_SECONDS
from p2pavg.base.messages import Message, decoded
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.gate.chunked_stream import ChunkedStream
from p2pavg.net.gate.messages import (
    MAX_ANSWERS,
    MAX_CHUNK_BYTES,
    MAX_GATE_BYTES,
    AnswerNews,
    AskSignature,
    AskStream,
    Attach,
    ConnectionNews,
    DialAddress,
    DropConnections,
    GateDone,
    GateError,
    GateRequest,
    InboundStream,
    ProgramNews,
    ProgramTold,
    RememberPeer,
    ServeProtocol,
    Settle,
    Signature,
    StopProgram,
    StreamOpened,
    TakeStream,
    TellNotice,
    TellUpdate,
    news_of,
)
from p2pavg.net.limits.rate import UNLIMITED, RateLimit
from p2pavg.net.transport import PeerId, Stream, StreamHandler, Transport, receive_message, send_message
from p2pavg.net.unix import UnixStream, open_unix_listener, serve_unix
from p2pavg_dht import Signer

MAX_GATE_CONNECTIONS = 512
"""Of the program: one for each of its streams. A peer of a group of 64 has some streams with each member."""
MAX_WAITING = 64
"""Inbound streams that the program has not taken yet."""
MAX_REMEMBERED = 1024
"""Peers for which the program keeps places."""
MAX_TOLD = 8
"""Notices and updates that were not read yet; with more, the next ones are left out."""
MAX_NEWS = 1024
"""News that the program has not read yet. One that reads none is detached."""


@dataclass(eq=False, slots=True)
class _Inbound:
    """A stream of another peer that waits for the program."""

    stream: Stream
    taken: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)


class Gate:
    """Made by :func:`open_gate`."""

    def __init__(
        self,
        transport: Transport,
        signer: Signer,
        protocols: Collection[str],
        signed: tuple[bytes, ...],
        named: Collection[str],
        upload: RateLimit,
        download: RateLimit,
        otherwise: Mapping[str, StreamHandler],
    ) -> None:
        self._transport = transport
        self._signer = signer
        self._protocols = frozenset(protocols)
        self._signed = signed
        self._named = named
        self._limits = (upload, download)
        self._otherwise = otherwise
        self._remembered: set[PeerId] = set()
        self._connected: set[PeerId] = set()
        """Peers that the program takes for connected: it hears when they are not any more."""
        self._attached = trio.CancelScope()
        self._news: trio.MemorySendChannel[Message] | None = None
        """To the program that is attached."""
        self._served: set[str] = set()
        self._numbers = count(1)
        self._waiting: dict[int, _Inbound] = {}
        self._tell_on, self.told = trio.open_memory_channel[ProgramTold](MAX_TOLD)
        """Notices and updates of the program. Its reader believes signatures only."""

    @property
    def attached(self) -> bool:
        """True while a program uses the network."""
        return self._news is not None

    async def serve(self, socket: UnixStream) -> None:
        """Serve one connection of the program.

        Raises:
            RemoteProtocolError, StreamBrokenError: the program ended it, or sent what no program sends.
        """
        while (data := await receive_message(socket, max_bytes=MAX_GATE_BYTES)) is not None:
            request: GateRequest = decoded(data, GateRequest)
            try:
                match request:
                    case Attach():
                        await self._attend(socket)
                        return
                    case AskStream():
                        await self._open(socket, request)
                        return
                    case TakeStream(number):
                        await self._give(socket, number)
                        return
                    case DialAddress(address, timeout):
                        # What a user names is dialled without the rules for strangers' addresses, also on this machine
                        # and in its network. A program names nothing in its user's place.
                        if address not in self._named:
                            raise UnreachableError("the address is none of the run's")
                        await _answer(socket, GateDone(await self._transport.dial(address, timeout=timeout)))
                    case DropConnections(peer_id):
                        await self._transport.disconnect(peer_id)
                        await _answer(socket, GateDone())
                    case Settle():
                        await self._transport.settle()
                        await _answer(socket, GateDone())
                    case AskSignature(message):
                        if not message.startswith(self._signed):
                            raise RemoteProtocolError("this peer does not sign such a message for a program")
                        await _answer(socket, Signature(self._signer.sign(message)))
            except (StreamBrokenError, ClosedError):
                raise
            except P2PAvgError as error:
                await _answer(socket, GateError(type(error).__name__, str(error)))

    def stop_program(self) -> bool:
        """Tell the program that is attached to end; return whether there is one."""
        self._tell(StopProgram())
        return self.attached

    # ------------------------------------------------------------------ the program

    async def _attend(self, socket: UnixStream) -> None:
        """Tell the program what is new, and take what it says, until it closes the connection."""
        if self._news is not None:
            raise BusyError("another program uses this peer's network")
        self._news, news = trio.open_memory_channel[Message](MAX_NEWS)
        self._attached, self._remembered = trio.CancelScope(), set()
        self._connected = set()

        def connected(peer_id: PeerId) -> None:
            self._connected.add(peer_id)
            self._tell(ConnectionNews(peer_id, True))

        async def poll() -> None:
            # No event says that a connection has ended, or that an address has changed.
            transport, last, looks = self._transport, None, 0
            looked = trio.current_time() - LOOK_SECONDS
            while True:
                for peer_id in [each for each in self._connected if not transport.is_connected(each)]:
                    self._connected.discard(peer_id)
                    self._tell(ConnectionNews(peer_id, False))
                if looks % round(LOOK_SECONDS / GLANCE_SECONDS) == 0:
                    now = news_of(transport.peer_id, transport.addresses, transport.reachability)
                    if now != last:
                        self._tell(now)
                        last = now
                    since, looked = trio.current_time() - looked + GLANCE_SECONDS, trio.current_time()
                    answer = [each for each in self._connected if transport.answers(each, since)]
                    # A program that stands still needs no old ones. Those for whom it keeps places come first.
                    if answer and not news.statistics().current_buffer_used:
                        answer.sort(key=lambda each: each not in self._remembered)
                        self._tell(AnswerNews(tuple(answer[:MAX_ANSWERS])))
                looks += 1
                await trio.sleep(GLANCE_SECONDS)

        async def send() -> None:
            async for each in news:
                await send_message(socket, each.encode())

        try:
            # Before the first look: a connection that is made in between would be told by neither.
            with self._transport.watching_connections(connected), self._attached, bare_exceptions():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(poll)
                    nursery.start_soon(send)
                    await self._receive_news(socket)
                    nursery.cancel_scope.cancel()
        finally:
            self._news, self._served = None, set()

    def _tell(self, news: Message) -> None:
        if self._news is None:
            return
        try:
            self._news.send_nowait(news)
        except (trio.WouldBlock, trio.BrokenResourceError):
            # It reads nothing: without the news, its picture of the network would be wrong.
            self._attached.cancel()

    async def _receive_news(self, socket: UnixStream) -> None:
        while (data := await receive_message(socket, max_bytes=MAX_GATE_BYTES)) is not None:
            said: ProgramNews = decoded(data, ProgramNews)
            match said:
                case ServeProtocol(protocol):
                    self._check_protocol(protocol)
                    self._served.add(protocol)
                case RememberPeer(peer_id, companion) if len(self._remembered | {peer_id}) <= MAX_REMEMBERED:
                    self._remembered.add(peer_id)
                    self._transport.remember_peer(peer_id, companion=companion)
                case TellNotice() | TellUpdate():
                    with suppress(trio.WouldBlock):
                        self._tell_on.send_nowait(said)

    def _check_protocol(self, protocol: str) -> None:
        if protocol not in self._protocols:
            raise UnreachableError(f"the protocol {protocol!r} is none that a program may use")

    # ------------------------------------------------------------------ streams

    async def _open(self, socket: UnixStream, asked: AskStream) -> None:
        self._check_protocol(asked.protocol)
        stream = await self._transport.open_stream(
            asked.peer_id,
            asked.protocol,
            addresses=asked.addresses,
            timeout=asked.timeout,
            wait_inbound=asked.wait_inbound,
        )
        try:
            await self._pass_on(socket, stream)
        finally:
            # It does nothing to a stream whose halves are both closed.
            await stream.reset()

    async def inbound(self, protocol: str, stream: Stream) -> None:
        """Offer a stream of another peer to the program; it ends with this call."""
        # The transport resets a stream whose handler returns, as it does for a protocol that is not served.
        if protocol not in self._served and protocol in self._otherwise:
            await self._otherwise[protocol](stream)
            return
        if protocol not in self._served or len(self._waiting) >= MAX_WAITING:
            return
        number, inbound = next(self._numbers), _Inbound(stream)
        self._waiting[number] = inbound
        try:
            self._tell(InboundStream(number, protocol))
            with trio.move_on_after(REPLY_SECONDS):
                await inbound.taken.wait()
        finally:
            del self._waiting[number]
        # The stream lives as long as this call, and another task passes its bytes on.
        if inbound.taken.is_set():
            await inbound.over.wait()

    async def _give(self, socket: UnixStream, number: int) -> None:
        inbound = self._waiting.get(number)
        if inbound is None or inbound.taken.is_set():
            raise RemoteProtocolError("there is no such stream, or it waited for too long")
        inbound.taken.set()
        try:
            await self._pass_on(socket, inbound.stream)
        finally:
            inbound.over.set()

    async def _pass_on(self, socket: UnixStream, stream: Stream) -> None:
        """Pass the bytes of a stream on, in both directions, until it has ended on both sides or was reset on one."""
        opened = StreamOpened(stream.remote, stream.remote_host, stream.remote_port, stream.relayed)
        await _answer(socket, opened)
        program = ChunkedStream(socket, opened)
        self._connected.add(stream.remote)  # also one that was there before the program

        upload, download = self._limits

        async def up() -> None:
            try:
                while data := await program.receive_some(MAX_CHUNK_BYTES):
                    await trio.sleep(upload.delay(len(data)))
                    await stream.send_all(data)
                await stream.aclose()
                # What the other peer still sends is of no use to a program that has closed the connection.
                await program.until_gone()
            except P2PAvgError:
                await stream.reset()
            # Whichever side has ended it: the bytes in the other direction have no receiver, or no sender.
            nursery.cancel_scope.cancel()

        async def down() -> None:
            try:
                while data := await stream.receive_some(MAX_CHUNK_BYTES):
                    await trio.sleep(download.delay(len(data)))
                    await program.send_all(data)
                await program.close_half()
            except P2PAvgError:
                await program.reset()
                await stream.reset()
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(up)
            nursery.start_soon(down)


async def _answer(socket: UnixStream, answer: Message) -> None:
    await send_message(socket, answer.encode())


@asynccontextmanager
async def open_gate(
    transport: Transport,
    signer: Signer,
    path: Path,
    protocols: Collection[str],
    signed: tuple[bytes, ...],
    *,
    named: Collection[str] = (),
    upload: RateLimit = UNLIMITED,
    download: RateLimit = UNLIMITED,
    otherwise: Mapping[str, StreamHandler] = MappingProxyType({}),
) -> AsyncIterator[Gate]:
    """Hand a transport to one program at a time, until the end of the block.

    Args:
        path: of the socket, in a folder that only this user can write to.
        protocols: those that the program may open and serve. From now on this transport serves them for it.
        signed: the beginnings of the messages of which the program gets this peer's signature.
        named: addresses that this peer's user has named, which the program may dial.
        upload, download: limits of all that the program sends and receives.
        otherwise: handlers of protocols while no program serves them.

    Raises:
        BusyError, ControlError: see :func:`~p2pavg.net.unix.open_unix_listener`.
    """
    gate = Gate(transport, signer, protocols, signed, named, upload, download, otherwise)
    for protocol in protocols:
        transport.serve(protocol, partial(gate.inbound, protocol))
    async with (
        open_unix_listener(path, backlog=MAX_GATE_CONNECTIONS) as listener,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(partial(serve_unix, listener, gate.serve, most=MAX_GATE_CONNECTIONS))
        yield gate
        nursery.cancel_scope.cancel()
