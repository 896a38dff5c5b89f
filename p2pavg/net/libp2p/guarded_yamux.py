"""Yamux with bounded buffers, and with a reader that never waits for the other side to read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import trio
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.security.noise.io import NoiseTransportReadWriter
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import GO_AWAY_NORMAL, Yamux, YamuxStream

from p2pavg.net.libp2p.carriers import Carrier
from p2pavg.net.libp2p.patient_stream import PatientStream
from p2pavg.net.libp2p.speed import MAX_FRAME_BYTES, ReadAheadStream, WriteStart

logger = logging.getLogger(__name__)

# Limits of the unread bytes of a stream and of a connection. libp2p lets the window of a stream grow to 16 MiB, and
# only logs a warning if a sender ignores it. 4 MiB keep a link of 300 Mbit/s and 100 ms busy; go-yamux and rust-yamux
# default to 16 MiB.
MAX_WINDOW_BYTES = 4 * 1024 * 1024
MAX_STREAM_BYTES = MAX_WINDOW_BYTES + 64 * 1024
MAX_CONNECTION_BYTES = 64 * 1024 * 1024

# Replies (acknowledgements, pongs) to one peer that wait to be written.
MAX_REPLIES = 256
# Replies that the reader writes itself, to frames that have come in one read of the socket.
MAX_REPLIES_AT_ONCE = 64


class ReceiveBuffer(bytearray):
    """The unread bytes of a stream, bounded: a sender that ignores its window loses the stream."""

    conn: GuardedYamux
    stream_id: int

    def extend(self, data: Any, /) -> None:
        total = sum(map(len, self.conn.stream_buffers.values())) + len(data)
        if len(self) + len(data) > MAX_STREAM_BYTES or total > MAX_CONNECTION_BYTES:
            self.conn.reset_soon(self.stream_id)
            raise MuxedStreamError(f"a peer sent {len(data)} bytes more than it was allowed to")
        # This may reset a stream of the greediest peer, which can be this very one. So it is asked afterwards.
        self.conn.arrived(len(data))
        if self.conn.is_reset(self.stream_id):
            raise MuxedStreamError(
                "a stream was reset, because this process holds too many unread bytes of its peer"
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
    """The events of streams that exist.

    libp2p's reader also makes one for a stream that has just ended, and leaks it.
    """

    def __init__(self, conn: GuardedYamux) -> None:
        self._conn = conn

    def __setitem__(self, stream_id: int, event: trio.Event) -> None:
        if stream_id in self._conn.streams:
            super().__setitem__(stream_id, event)


class _Streams(dict[int, YamuxStream]):
    def __setitem__(self, stream_id: int, stream: YamuxStream) -> None:
        # libp2p sets the window before it stores the stream here, and the class below keeps it in a property.
        window = stream.__dict__.pop("send_window", None)
        stream.__class__ = PatientStream
        if window is not None:
            stream.send_window = window
        super().__setitem__(stream_id, stream)


class GuardedYamux(Yamux):
    """Yamux with bounded buffers, patient writers, a reader that waits for no write, and an abort for stuck sockets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams = _Streams()
        self.stream_buffers = _ReceiveBuffers(self)
        self.stream_events = _StreamEvents(self)
        self.inbound_streams = 0
        self.assembling: dict[int, int] = {}
        """Bytes of unfinished messages that were read already, by stream id."""
        self.arrived: Callable[[int], None] = lambda _: None
        """A function that is called with the number of bytes that are about to be held for a stream."""
        self.dropped_here = False
        """True if this process has dropped the connection, and not only cleans up after the other end has."""
        self._reader: trio.lowlevel.Task | None = None
        self._replies = 0
        self._replied_in = -1  # the number of the socket's read whose frames are answered now
        self._replied = 0  # replies at once, to these frames

    async def handle_incoming(self) -> None:
        self._reader = trio.lowlevel.current_task()
        await super().handle_incoming()

    async def _read_data_body(self, length: int) -> bytes:
        """Read the body of a frame. If it has arrived, as it mostly has, no timeout is set up for it."""
        session = self.secured_conn
        if isinstance(session, SecureSession) and session.high_watermark - session.low_watermark >= length:
            return session._drain(length)
        return await super()._read_data_body(length)

    def start_frame(self, frame: bytes) -> WriteStart:
        """Write a frame without waiting, if nothing else is being written and the system takes it.

        It saves a task and several turns of the event loop, which is most of what a small message costs.

        Raises:
            ConnectionClosedError: the connection has ended.
        """
        noise = getattr(self.secured_conn, "conn", None)
        if len(frame) > MAX_FRAME_BYTES or not isinstance(noise, NoiseTransportReadWriter):
            return WriteStart.NOTHING
        carrier = self.carrier
        # Two frames must not be mixed, and Noise numbers its messages: they go
        # out in the order in which they are encrypted.
        if not isinstance(carrier, ReadAheadStream) or self._write_lock.locked() or carrier.is_writing:
            return WriteStart.NOTHING
        whole = carrier.start_write(noise.read_writer.encode_msg(noise.encrypt(frame)))
        return WriteStart.WHOLE if whole else WriteStart.PART

    async def finish_frame(self) -> None:
        """Write the rest of a frame that was started."""
        carrier = self.carrier
        async with self._write_lock:
            await carrier.write(b"")

    async def _write_frame(self, data: bytes) -> None:
        """Write a frame. What the reader cannot write without waiting is written by another task.

        libp2p's reader writes its replies itself, and so waits for the other side to read. When both directions are
        busy, the two readers wait for each other: a deadlock.
        """
        # Any other task may wait for the other side to read.
        if trio.lowlevel.current_task() is not self._reader or self._nursery is None:
            started = self.start_frame(data)
            if started is WriteStart.PART:
                await self.finish_frame()
            elif started is WriteStart.NOTHING:
                await super()._write_frame(data)
            return
        try:
            started = self.start_frame(data) if self._may_reply_at_once() else WriteStart.NOTHING
        except ConnectionClosedError as error:
            # After this error, libp2p goes on with the next frame that it has, and waits 10 ms for each.
            raise RawConnError(f"{self.peer_id} has gone: {error}") from error
        if started is WriteStart.WHOLE:
            return
        # A peer that asks for replies and reads none would fill the memory with them.
        if self._replies >= MAX_REPLIES:
            # RawConnError ends the connection. After any other error, libp2p goes on reading.
            raise RawConnError(f"{self.peer_id} asks for replies faster than it reads them")
        self._replies += 1
        self._nursery.start_soon(self._reply, data, started)

    def _may_reply_at_once(self) -> bool:
        """Return whether the reader may write one more reply before it reads from the socket again.

        It makes no turn of the event loop in between, and a peer can ask for thousands of replies in one message.
        """
        carrier = self.carrier
        if not isinstance(carrier, ReadAheadStream):
            return False
        if carrier.reads != self._replied_in:
            self._replied_in, self._replied = carrier.reads, 0
        self._replied += 1
        return self._replied <= MAX_REPLIES_AT_ONCE

    async def _reply(self, data: bytes, started: WriteStart) -> None:
        try:
            await (self.finish_frame() if started is WriteStart.PART else super()._write_frame(data))
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
            for stream_id in self.streams
        }
        largest = max(sizes, key=sizes.__getitem__, default=None)
        # Nothing can be freed here, so the budget goes on with the next peer.
        if largest is None or sizes[largest] == 0:
            return 0
        logger.warning("a stream of %s is reset: it holds %d unread bytes", self.peer_id, sizes[largest])
        self.reset_soon(largest)
        # The memory is needed now. The stream itself ends when its reader sees the reset.
        self.stream_buffers.get(largest, bytearray()).clear()
        self.assembling.pop(largest, None)
        if largest in self.stream_events:  # wake the reader, so that it sees the reset
            self.stream_events[largest].set()
        return sizes[largest]

    def is_reset(self, stream_id: int) -> bool:
        """Return whether a stream was reset, by either side."""
        stream = self.streams.get(stream_id)
        return stream is not None and stream.reset_received

    def reset_soon(self, stream_id: int) -> None:
        """Reset a stream from synchronous code: mark it now, send the frame from a task."""
        stream = self.streams[stream_id]
        cast(PatientStream, stream).dropped_here = True
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
    def carrier(self) -> Carrier:
        """The stream below Noise and its buffers."""
        found: Any = self.secured_conn
        return cast(Carrier, found.conn.read_writer.read_write_closer.stream)

    @property
    def relay(self) -> str:
        """The id of the relay through which the connection leads; empty if it is direct."""
        return self.carrier.relay

    @property
    def punched(self) -> bool:
        """True if the connection was made by hole punching."""
        return self.carrier.punched

    @property
    def socket(self) -> trio.socket.SocketType | None:
        """The TCP socket of the connection; ``None`` if it leads through a relay."""
        carrier = self.carrier
        return carrier.stream.socket if isinstance(carrier, ReadAheadStream) else None

    @cached_property
    def remote_endpoint(self) -> tuple[str, int]:
        """The IP address and port of the other end, cached; empty and 0 if the connection had ended before.

        Through a relay, the relay's address and port 0.
        """
        return self.carrier.remote_endpoint

    @property
    def remote_host(self) -> str:
        """The IP address of the other end, or of the relay; empty if the connection had ended before."""
        return self.remote_endpoint[0]

    async def abort(self) -> None:
        """Close the TCP socket or the circuit at once.

        ``close()`` would send a frame first, and wait for a stuck writer.
        """
        self._note_drop()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await self.secured_conn.close()

    async def close(self, error_code: int = GO_AWAY_NORMAL) -> None:
        """Send that the connection ends, and close it. libp2p calls this too when the other end has closed it."""
        self._note_drop()
        await super().close(error_code)

    def _note_drop(self) -> None:
        if not self.event_shutting_down.is_set():
            self.dropped_here = True
