"""What py-libp2p 0.8.1 needs before strangers may talk to it.

Each class or function here mends one thing, names it, and has a test that fails without it: in
``tests/integration/test_libp2p_guards.py``, ``tests/unit/net/libp2p/test_guards.py`` or the transports' conformance
suite. Nothing outside :mod:`p2pavg.net.libp2p` imports this module.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import libp2p.io.msgio as _msgio
import libp2p.network.connection.swarm_connection as _swarm_connection
import libp2p.protocol_muxer.multiselect_communicator as _multiselect
import trio
from libp2p.abc import IMuxedConn, INetStream, ISecureConn
from libp2p.exceptions import BaseLibp2pError, ParseError
from libp2p.host.basic_host import BasicHost
from libp2p.io.abc import Reader, ReadWriteCloser
from libp2p.io.exceptions import IncompleteReadError, IOException
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux import yamux as _yamux
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from p2pavg.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.net.libp2p.speed import ReadAheadStream
from p2pavg.net.limits.entrance import NoPlaceError

logger = logging.getLogger(__name__)

# A stream's unread bytes, and those of a connection. libp2p lets the window grow to 16 MiB a stream and only warns
# when a sender ignores it. 4 MiB keep a link of 300 Mbit/s and 100 ms busy; go-yamux and rust-yamux default to 16.
MAX_WINDOW_BYTES = 4 * 1024 * 1024
MAX_STREAM_BYTES = MAX_WINDOW_BYTES + 64 * 1024
MAX_CONNECTION_BYTES = 64 * 1024 * 1024

# Inbound streams of one connection that may be open at once. A round needs four a member, a record call one.
MAX_INBOUND_STREAMS = 128

# Replies (acknowledgements, pongs) to one peer that wait to be written.
MAX_REPLIES = 256

# A line of protocol negotiation. Ours are under 40 bytes; the Go implementation takes 64 KiB.
MAX_NEGOTIATION_BYTES = 1024

_CLOSED_POLL_SECONDS = 0.25


def install() -> None:
    """The guards that can only be set on libp2p's modules; calling it twice does nothing more."""
    # It logs at error level what is everyday on an open network; a user who wants that adds a handler.
    logging.getLogger("libp2p").addHandler(logging.NullHandler())
    _yamux.MAX_WINDOW_SIZE = MAX_WINDOW_BYTES
    # It calls logging.warning() on the root logger, which installs a handler in the user's process.
    _swarm_connection.logging = logging.getLogger(_swarm_connection.__name__)  # type: ignore[assignment,attr-defined]
    _multiselect.read_delim = _read_line  # type: ignore[attr-defined]
    _yamux.read_exactly = read_exactly  # type: ignore[attr-defined]
    _msgio.read_exactly = read_exactly  # type: ignore[attr-defined]


async def _read_line(reader: Reader) -> bytes:
    """libp2p reads as many bytes as a stranger announces, before it knows who that is."""
    line = await read_varint_prefixed_bytes_limited(reader, MAX_NEGOTIATION_BYTES)
    if not line.endswith(b"\n"):
        raise ParseError("a line of the negotiation has no end")
    return line[:-1]


async def read_exactly(reader: Reader, n: int, retry_count: int = 0) -> bytes:  # noqa: ARG001 - libp2p's signature
    """libp2p gives up after 101 pieces, and says that the connection was closed; a slow link delivers smaller ones."""
    buffer = bytearray()
    while len(buffer) < n:
        piece = await reader.read(n - len(buffer))
        if not piece:
            raise IncompleteReadError(f"closed {n - len(buffer)} bytes early", n, len(buffer))
        if len(piece) == n:
            return piece  # as most are: not copied
        buffer += piece
    return bytes(buffer)


# What peers and the ways to them cause. UnicodeDecodeError: a protocol's name that is no text.
_OF_THE_NETWORK = (
    StreamBrokenError,
    RemoteProtocolError,
    UnreachableError,
    ClosedError,
    BaseLibp2pError,
    UnicodeDecodeError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    ConnectionError,
)


def is_of_the_network(error: BaseException) -> bool:
    """Return whether a peer, or the way to it, has caused an error; any other one is a mistake of this process."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_of_the_network, error.exceptions))
    return isinstance(error, _OF_THE_NETWORK)


class ReceiveBuffer(bytearray):
    """A stream's unread bytes, bounded: a sender that ignores its window loses the stream, not us the memory."""

    conn: GuardedYamux
    stream_id: int

    def extend(self, data: Any, /) -> None:
        total = sum(map(len, self.conn.stream_buffers.values())) + len(data)
        if len(self) + len(data) > MAX_STREAM_BYTES or total > MAX_CONNECTION_BYTES:
            self.conn.reset_soon(self.stream_id)
            raise MuxedStreamError(f"a peer sent {len(data)} bytes more than it was allowed to")
        self.conn.arrived(len(data))
        if self.conn.is_reset(self.stream_id):
            raise MuxedStreamError(
                "a stream was given up, since this process holds too many bytes of its peer"
            )
        super().extend(data)


class _ReceiveBuffers(dict[int, bytearray]):
    def __init__(self, conn: GuardedYamux) -> None:
        self._conn = conn

    def __setitem__(self, stream_id: int, data: bytearray) -> None:
        buffer = ReceiveBuffer(data)
        buffer.conn = self._conn
        buffer.stream_id = stream_id
        super().__setitem__(stream_id, buffer)


class _StreamEvents(dict[int, trio.Event]):
    """libp2p's reader gives a stream a new event also when the stream has just ended, and leaks it."""

    def __init__(self, conn: GuardedYamux) -> None:
        self._conn = conn

    def __setitem__(self, stream_id: int, event: trio.Event) -> None:
        if stream_id in self._conn.streams:
            super().__setitem__(stream_id, event)


class PatientStream(YamuxStream):
    """A stream that waits for its window for as long as its owner likes, and whose end is one.

    libp2p gives up after 5 s without a window update, which a link of 100 kbit/s needs, and looks every 10 ms. It
    reports a reset and a lost connection to a waiting reader as the orderly end of the stream.
    """

    @property
    def send_window(self) -> int:
        return self._send_window

    @send_window.setter
    def send_window(self, value: int) -> None:
        self._send_window = value
        if value > 0:
            self.__dict__.setdefault("_window_opened", trio.Event()).set()

    async def read(self, n: int | None = -1) -> bytes:
        try:
            return await super().read(n)
        except MuxedStreamEOF as error:
            if self.reset_received or self.conn.event_shutting_down.is_set():
                raise MuxedStreamReset("the other side reset it, or its connection is gone") from error
            raise

    async def send_window_update(self, increment: int, skip_lock: bool = False) -> None:  # noqa: ARG002
        """In a task of the connection: libp2p writes it in the reader's, who then waits for the other side to read.

        A reader that is cancelled there would leave half a frame behind, and with it a dead connection.
        """
        if increment <= 0 or self.conn._nursery is None:
            return
        owed = self.__dict__.get("_owed_window", 0)
        self.__dict__["_owed_window"] = owed + increment
        if owed == 0:
            self.conn._nursery.start_soon(self._pay_window)

    async def _auto_tune_and_send_window_update(self, *, bytes_read: int = 0) -> None:  # noqa: ARG002
        """What is unread and what may still come are the window together, and no more.

        libp2p gives some of what was read back twice. A sender that uses it goes beyond the window, and so beyond what
        this process holds for it: an honest one would lose its stream.
        """
        async with self.window_lock:
            buffered = len(self.conn.stream_buffers.get(self.stream_id, b""))
            if self.target_recv_window - (self.recv_window + buffered) < self._grow_threshold():
                return
            increment = self._grow_to_delta(buffered) + self._apply_autotune_epoch(buffered)
        await self.send_window_update(increment, skip_lock=True)

    async def _pay_window(self) -> None:
        try:
            while (increment := self.__dict__["_owed_window"]) > 0:
                await super().send_window_update(increment)
                self.__dict__["_owed_window"] -= increment
        except (IOException, MuxedStreamError) as error:
            logger.debug("a window of %s was not opened: %r", self.conn.peer_id, error)
        except Exception:
            logger.exception("a window of %s was not opened", self.conn.peer_id)

    async def reset(self) -> None:
        """Unread bytes go too: libp2p keeps those, and the stream's place, for a minute or more."""
        self.conn.stream_buffers.get(self.stream_id, bytearray()).clear()
        await super().reset()
        self.conn.stream_buffers.get(self.stream_id, bytearray()).clear()
        await self.conn._finalize_stream(self, fully_closed=True)

    async def write(self, data: bytes) -> None:
        sent = 0
        while sent < len(data):
            await self._window()
            if self.send_closed or self.closed:
                raise MuxedStreamError("stream is closed for sending")
            count = min(self.send_window, _yamux.MAX_MESSAGE_SIZE - _yamux.HEADER_SIZE, len(data) - sent)
            self.send_window -= count
            header = struct.pack(_yamux.YAMUX_HEADER_FORMAT, 0, _yamux.TYPE_DATA, 0, self.stream_id, count)
            await self.conn._write_frame(header + data[sent : sent + count])
            sent += count

    async def _window(self) -> None:
        while self.send_window == 0 and not (self.send_closed or self.closed):
            self._window_opened = trio.Event()
            with trio.move_on_after(_CLOSED_POLL_SECONDS):  # a reset sets no event of ours
                await self._window_opened.wait()


class _Streams(dict[int, YamuxStream]):
    def __setitem__(self, stream_id: int, stream: YamuxStream) -> None:
        window = stream.__dict__.pop("send_window", None)
        stream.__class__ = PatientStream
        if window is not None:
            stream.send_window = window
        super().__setitem__(stream_id, stream)


class GuardedYamux(Yamux):
    """Yamux with bounded buffers, patient writers, a reader that never writes, and a way out of a stuck socket."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams = _Streams()
        self.stream_buffers = _ReceiveBuffers(self)
        self.stream_events = _StreamEvents(self)
        self.inbound_streams = 0
        self.assembling: dict[int, int] = {}
        """Bytes of unfinished messages that were read already, by stream."""
        self.arrived: Callable[[int], None] = lambda _: None
        """Called with the number of bytes that are about to be held for a stream."""
        self._reader: trio.lowlevel.Task | None = None
        self._replies = 0

    async def handle_incoming(self) -> None:
        self._reader = trio.lowlevel.current_task()
        await super().handle_incoming()

    async def _write_frame(self, data: bytes) -> None:
        """libp2p's reader writes its replies itself, and so waits for the other side to read.

        With both directions busy, each side's reader then waits for the other's: nothing moves any more.
        """
        if trio.lowlevel.current_task() is not self._reader or self._nursery is None:
            await super()._write_frame(data)
            return
        if self._replies >= MAX_REPLIES:
            # Of all errors this one ends the connection; after others libp2p reads on.
            raise RawConnError(f"{self.peer_id} asks for replies faster than it reads them")
        self._replies += 1
        self._nursery.start_soon(self._reply, data)

    async def _reply(self, data: bytes) -> None:
        try:
            await super()._write_frame(data)
        except (IOException, MuxedStreamError) as error:
            logger.debug("a reply to %s was not sent: %r", self.peer_id, error)
        except Exception:
            logger.exception("a reply to %s was not sent", self.peer_id)
        finally:
            self._replies -= 1

    @property
    def owner(self) -> str:
        return str(self.peer_id)

    def held(self) -> int:
        return sum(map(len, self.stream_buffers.values())) + sum(self.assembling.values())

    def shed(self) -> int:
        sizes = {
            stream_id: len(self.stream_buffers.get(stream_id, b"")) + self.assembling.get(stream_id, 0)
            for stream_id, stream in self.streams.items()
            if not stream.reset_received
        }
        largest = max(sizes, key=sizes.__getitem__, default=None)
        if largest is None or sizes[largest] == 0:
            return 0
        logger.warning("a stream of %s is given up: it holds %d bytes", self.peer_id, sizes[largest])
        self.reset_soon(largest)
        self.stream_buffers.get(largest, bytearray()).clear()
        self.assembling.pop(largest, None)
        if largest in self.stream_events:  # the one who waits to read hears of it
            self.stream_events[largest].set()
        return sizes[largest]

    def is_reset(self, stream_id: int) -> bool:
        """Return whether a stream was reset, by either side."""
        stream = self.streams.get(stream_id)
        return stream is not None and stream.reset_received

    def reset_soon(self, stream_id: int) -> None:
        """Reset a stream from where nothing may be awaited."""
        stream = self.streams[stream_id]
        if self._nursery is not None and not stream.reset_received:
            stream.reset_received = True
            self._nursery.start_soon(self._reset, stream)

    async def _reset(self, stream: YamuxStream) -> None:
        try:
            await stream.reset()
        except (IOException, MuxedStreamError) as error:
            logger.debug("a stream of %s was not reset: %r", self.peer_id, error)
        except Exception:
            logger.exception("a stream of %s was not reset", self.peer_id)

    @property
    def tcp_stream(self) -> ReadAheadStream:
        """The stream under Noise and its buffers."""
        found: Any = self.secured_conn
        return cast(ReadAheadStream, found.conn.read_writer.read_write_closer.stream)

    @property
    def socket(self) -> trio.socket.SocketType:
        """The TCP socket under everything."""
        return self.tcp_stream.stream.socket

    @cached_property
    def remote_host(self) -> str:
        """The address at the other end, as when it was first asked for; empty when it was gone by then."""
        try:
            return str(self.socket.getpeername()[0])
        except OSError:
            return ""

    async def abort(self) -> None:
        """Close the socket under everything. ``close()`` first sends a frame, and waits for a stuck writer."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await self.secured_conn.close()


class GuardedMuxerMultistream(MuxerMultistream):
    """libp2p names its own Yamux class here whatever is registered."""

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        muxed = GuardedYamux(conn, peer_id, is_initiator=conn.is_initiator)
        return self._annotate_connection(muxed, conn, protocol)


class _IdleConnector(AutoConnector):
    """libp2p dials whomever it has an address of, up to the mean of its watermarks, also when the lower one is 0."""

    async def maybe_connect(self) -> None:
        """Who is dialled is for this library to say."""


class GuardedSwarm(Swarm):
    """A swarm whose inbound connections give back what they took.

    libp2p keeps a task and a slot of its limiter for every inbound connection until the host ends: after 250 of
    them, one after another, it refuses everybody.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_connection: Callable[[SwarmConn], None] = lambda _: None
        """Called whenever there is one more connection."""
        self.admit: Callable[[GuardedYamux], None] = lambda _: None
        """Called before there is one more connection. Raises NoPlaceError to refuse it."""
        self.on_end: Callable[[GuardedYamux], None] = lambda _: None
        """Called when a connection that was admitted has ended."""

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = _IdleConnector(self)

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> SwarmConn:
        assert isinstance(muxed_conn, GuardedYamux)
        try:
            self.admit(muxed_conn)
        except NoPlaceError as error:
            raise SwarmException(str(error)) from None
        try:
            connection = await super().add_conn(muxed_conn, direction)
        except BaseException:
            self.on_end(muxed_conn)
            raise
        self.on_connection(connection)
        return connection

    def remove_conn(self, swarm_conn: SwarmConn) -> None:
        super().remove_conn(swarm_conn)
        self.on_end(cast(GuardedYamux, swarm_conn.muxed_conn))

    async def _do_handle_inbound_connection(
        self,
        read_write_closer: ReadWriteCloser,
        maddr: Any,
        failure_event: Any,  # noqa: ARG002
    ) -> None:
        raw = RawConnection(read_write_closer, False)
        try:
            muxed = await self.upgrade_inbound_raw_conn(raw, maddr)
        except Exception as error:  # noqa: BLE001 - a stranger's handshake may fail in any way; it costs the stranger
            logger.debug("inbound connection on %s refused: %r", maddr, error)
            await raw.close()
            return
        assert isinstance(muxed, GuardedYamux)
        try:
            await muxed.event_closed.wait()
        finally:
            await muxed.abort()


class GuardedHost(BasicHost):
    """A host that no stream can end, and that believes no address it was not given by us."""

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        """Identify would replace a good address by ``0.0.0.0``, and runs in a system task that may end trio."""

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        """libp2p lets what a handler or a non-UTF-8 protocol name raises end the whole host."""
        muxed = net_stream.muxed_conn
        assert isinstance(muxed, GuardedYamux)
        if muxed.inbound_streams >= MAX_INBOUND_STREAMS:
            logger.info("%s opened more than %d streams at once", muxed.peer_id, MAX_INBOUND_STREAMS)
            await net_stream.reset()
            return
        muxed.inbound_streams += 1
        try:
            await super()._swarm_stream_handler(net_stream)
        except Exception as error:
            if is_of_the_network(error):
                logger.info("stream of %s dropped: %r", muxed.peer_id, error)
            else:
                logger.exception("stream of %s dropped, by a mistake of this process", muxed.peer_id)
            await net_stream.reset()
        finally:
            muxed.inbound_streams -= 1


__all__ = [
    "GuardedHost",
    "GuardedMuxerMultistream",
    "GuardedSwarm",
    "GuardedYamux",
    "install",
]
