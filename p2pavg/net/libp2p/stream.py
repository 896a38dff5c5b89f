"""A stream of the transport, over one stream of yamux."""

from __future__ import annotations

import logging
from typing import cast

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import IOException
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.network.stream.net_stream import NetStream, StreamState
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import HEADER_SIZE

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import FAREWELL_SECONDS, STALL_SECONDS
from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.libp2p.patient_stream import PatientStream
from p2pavg.net.libp2p.speed import MAX_FRAME_BYTES, SMALL_FRAME_BYTES, WriteStart
from p2pavg.net.transport import Buffer, Stream

# The errors of libp2p: which of them a peer or the network has caused, and their texts.

# Errors that a peer or the network causes. UnicodeDecodeError: a protocol name that is not text.
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

ANOTHER_PEER = "another peer is there: "
"""The beginning of the error of a dial that met a peer with another id, which follows."""


def is_of_the_network(error: BaseException) -> bool:
    """Return whether a peer or the network has caused an error. Any other error is a bug of this process."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_of_the_network, error.exceptions))
    return isinstance(error, _OF_THE_NETWORK)


def is_refusal(error: BaseException) -> bool:
    """Return whether the operating system at the other end refused the connection: no process listens there."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ExceptionGroup):
        return all(is_refusal(inner) for inner in error.exceptions)
    return isinstance(error, ConnectionRefusedError)


def error_text(error: BaseException) -> str:
    """Return the text of an error's root cause, or its type's name: many errors of libp2p have no text."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ExceptionGroup):  # trio's, with one error for each address of a host
        return "; ".join(error_text(inner) for inner in error.exceptions)
    if isinstance(error, PeerIDMismatchesPubkey):
        return f"{ANOTHER_PEER}{str(error).rpartition('=')[2]}"
    return str(error) or type(error).__name__


# The lifetime of one transport: the nursery of its tasks, and a note that it has ended.


class Lifetime:
    """Shared by a transport and its streams, so that a stream need not know the transport.

    Args:
        nursery: runs the tasks that must not end with a cancelled caller, e.g. the write of a frame.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.has_ended = False

    def end(self) -> None:
        """Cancel the tasks; streams refuse calls from now on."""
        self.has_ended = True
        self.nursery.cancel_scope.cancel()

    def check(self) -> None:
        """Raise ClosedError if the transport is closed."""
        if self.has_ended:
            raise ClosedError("the transport is closed")


logger = logging.getLogger(__name__)

# A write is cut into pieces. Each piece is finished even if its caller is cancelled: half a frame would corrupt the
# connection for every stream on it. With small pieces, other streams get their turn soon. After a piece that the system
# took at once, the next one may be as long as a message of Noise: no other stream waits for a turn then. A piece that
# has to wait before any of it is written is a small one in any case.
WRITE_PIECE_BYTES = 32 * 1024
LONG_PIECE_BYTES = MAX_FRAME_BYTES - HEADER_SIZE


_DRAIN_BYTES = 64 * 1024
_READ_AHEAD_BYTES = 16 * 1024

_UNWRITABLE_STATES = frozenset(
    (StreamState.ERROR, StreamState.RESET, StreamState.CLOSE_WRITE, StreamState.CLOSE_BOTH)
)


class Libp2pStream(Stream):
    """One stream of yamux.

    A write that has to wait runs in the transport's nursery, so that a cancelled caller leaves no half-written frame
    behind. One that the window allows and the system takes at once need not wait.
    """

    def __init__(self, net_stream: NetStream, lifetime: Lifetime) -> None:
        self._muxed = cast(GuardedYamux, net_stream.muxed_conn)
        self.remote = str(self._muxed.peer_id)
        self.remote_host, self.remote_port = self._muxed.remote_endpoint
        self.relayed = bool(self._muxed.relay)
        self._stream_id: int = net_stream.muxed_stream.stream_id  # type: ignore[attr-defined]
        self._net_stream = net_stream
        self._lifetime = lifetime
        self._closed = False
        self._unreadable: str | None = None
        self._unwritable: str | None = None
        self._ahead = memoryview(b"")
        self._ends_alone = False
        self._piece_bytes = WRITE_PIECE_BYTES
        self._gone = trio.Event()

    @property
    def _patient(self) -> PatientStream:
        return cast(PatientStream, self._net_stream.muxed_stream)

    def _check(self, broken: str | None) -> None:
        # This end first: what broke after it was closed here is no news to the caller.
        if self._closed or self._lifetime.has_ended:
            raise ClosedError(f"the stream to {self.remote} was closed by this process")
        if broken is not None:
            raise StreamBrokenError(broken)

    async def send_all(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        view = memoryview(data).cast("B")
        self._check(self._unwritable)
        sent = 0
        try:
            while sent < len(view):
                piece, started = self._start_piece(view[sent:])
                sent += len(piece)
                self._check(self._unwritable)
                # Finished even if the caller is cancelled: half a frame would corrupt the connection for all streams.
                await self._finish_piece(piece, started)
                self._check(self._unwritable)
                if sent < len(view):
                    await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            # The other side has the beginning of a message, so nothing that follows could be read.
            self._unwritable = f"a write to {self.remote} was cancelled half-way"
            raise

    def _start_piece(self, left: memoryview) -> tuple[bytes, WriteStart]:
        """Begin to write the next piece. Return it, and how far it has come."""
        piece = bytes(left[: self._piece_bytes])
        started = self._start_write(piece)
        # A piece that has to wait is a small one: other streams of the connection get their turn soon.
        if started is WriteStart.NOTHING and len(piece) > WRITE_PIECE_BYTES:
            piece = piece[:WRITE_PIECE_BYTES]
            started = self._start_write(piece)
        return piece, started

    async def _finish_piece(self, piece: bytes, started: WriteStart) -> None:
        """Wait until a piece is written. If it is written already, only let other tasks run, unless it is small."""
        if started is WriteStart.WHOLE:
            if len(piece) >= WRITE_PIECE_BYTES:
                self._piece_bytes = LONG_PIECE_BYTES
            # A long send that never has to wait would keep all other tasks from running.
            if len(piece) > SMALL_FRAME_BYTES:
                await trio.lowlevel.cancel_shielded_checkpoint()
            return
        self._piece_bytes = WRITE_PIECE_BYTES
        done = trio.Event()
        # In the transport's nursery, so the write outlives a caller that is cancelled.
        self._lifetime.nursery.start_soon(self._finish_write, piece, started, done)
        await done.wait()

    def _start_write(self, piece: bytes) -> WriteStart:
        if self._net_stream._state in _UNWRITABLE_STATES:
            return WriteStart.NOTHING
        try:
            return self._patient.start_write(piece)
        except IOException as error:
            self._unwritable = f"the stream to {self.remote} broke: {error_text(error)}"
            return WriteStart.NOTHING

    async def _finish_write(self, piece: bytes, started: WriteStart, done: trio.Event) -> None:
        try:
            with trio.move_on_after(STALL_SECONDS) as scope:
                if started is WriteStart.PART:
                    await self._muxed.finish_frame()
                else:
                    await self._net_stream.write(piece)
            if scope.cancelled_caught:
                self._unwritable = f"{self.remote} took no data for {STALL_SECONDS:.0f} s"
                await self._give_up()
        except (IOException, MuxedStreamError, ValueError) as error:
            self._unwritable = f"the stream to {self.remote} broke: {error_text(error)}"
        except Exception as error:
            # In this nursery, an exception would end the transport and every other stream with it.
            logger.exception("a write to %s failed", self.remote)
            self._unwritable = f"the stream to {self.remote} broke: {error_text(error)}"
        finally:
            done.set()

    async def _give_up(self) -> None:
        """End the stream of a write that has stalled, and the connection unless the stream's window was closed.

        Outside of the window, half a frame may have been written.
        """
        if self._ends_alone and self._patient.starved:
            # The window was closed, so no frame has been begun: the stream can end without its connection.
            self._lifetime.nursery.start_soon(self._send_last_frame, True, trio.Event())
        else:
            await self._muxed.abort()

    async def receive_some(self, max_bytes: int) -> bytes:
        self._check(self._unreadable)
        try:
            return await self._read(max_bytes)
        except trio.Cancelled:
            # Bytes may have been taken and lost, so what follows has no known beginning.
            self._unreadable = f"a read from {self.remote} was cancelled half-way"
            raise
        except (IOException, MuxedStreamError, ValueError, KeyError) as error:
            self._unreadable = f"the stream of {self.remote} broke: {error_text(error)}"
            raise StreamBrokenError(self._unreadable) from None

    def hold(self, count: int) -> None:
        if count and not self._patient.dropped_here:
            self._muxed.assembling[self._stream_id] = count
        else:
            self._muxed.assembling.pop(self._stream_id, None)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            # A message that was cut off must not look like an orderly end to the other side.
            await self._finish(reset=self._unwritable is not None)

    async def reset(self) -> None:
        if not self._closed:
            self._closed = True
            await self._finish(reset=True)

    def carry_circuit(self) -> None:
        self._ends_alone = True
        self._patient.window_grows = False
        self._patient.delivers_rest = False

    async def wait_closed(self) -> None:
        if not self._lifetime.has_ended:
            with trio.move_on_after(STALL_SECONDS):
                await self._gone.wait()

    async def reset_connection(self) -> None:
        self._closed = True
        self._gone.set()
        await self._muxed.abort()

    async def _finish(self, *, reset: bool) -> None:
        """Close or reset the stream in the transport's nursery, so that a stuck socket blocks no caller."""
        if self._lifetime.has_ended:
            return
        done = trio.Event()
        self._lifetime.nursery.start_soon(self._send_last_frame, reset, done)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_SECONDS):
            await done.wait()

    async def _send_last_frame(self, reset: bool, done: trio.Event) -> None:
        try:
            with trio.move_on_after(STALL_SECONDS) as scope:
                await (self._net_stream.reset() if reset else self._net_stream.close())
            if scope.cancelled_caught:
                await cast(GuardedYamux, self._net_stream.muxed_conn).abort()
            # The caller waits for the last frame only, and not for the other side's end.
            done.set()
            if not reset and not await self._drain():
                await self._net_stream.reset()
        except (IOException, MuxedStreamError, ValueError) as error:
            logger.debug("closing a stream to %s: %s", self.remote, error_text(error))
        except Exception:
            logger.exception("closing a stream to %s failed", self.remote)
        finally:
            done.set()
            self._gone.set()

    async def _drain(self) -> bool:
        """Discard incoming data until the other side closes its half. Return whether it did so in time.

        Without this, a sender whose window stays closed would give up the whole connection.
        """
        with trio.move_on_after(STALL_SECONDS):
            try:
                while await self._read(_DRAIN_BYTES):
                    pass
                return True
            except (IOException, MuxedStreamError) as error:
                logger.debug("a closed stream to %s broke: %s", self.remote, error_text(error))
        return False

    async def _read(self, max_bytes: int) -> bytes:
        """Read ahead, and return at most ``max_bytes``.

        A message is read in two steps, its length and its body. Reading ahead saves one of the two reads below.
        """
        if not self._ahead:
            try:
                self._ahead = memoryview(await self._net_stream.read(max(max_bytes, _READ_AHEAD_BYTES)))
            except StreamEOF:
                return b""
        taken = bytes(self._ahead[:max_bytes])
        self._ahead = self._ahead[max_bytes:]
        return taken
