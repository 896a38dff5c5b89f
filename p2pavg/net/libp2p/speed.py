"""Faster replacements for parts of py-libp2p 0.8.1 that do more work than they must.

In a round of a small vector, each peer handles a few dozen messages. For each of them, libp2p makes about twenty turns
of the event loop: one whenever a lock is taken, two for every frame that is read, and four for every frame that is
written. Nothing outside :mod:`p2pavg.net.libp2p` imports this module. The tests in ``tests/unit/net/libp2p`` and
``tests/integration/test_libp2p_writes.py`` check that the replacements behave like the originals.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

import libp2p.io.trio as _io_trio
import libp2p.network.stream.net_stream as _net_stream
import libp2p.security.noise.io as _noise_io
import libp2p.stream_muxer.rw_lock as _rw_lock
import libp2p.stream_muxer.yamux.yamux as _yamux
import trio
from libp2p.abc import IMultiselectCommunicator
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import DEFAULT_NEGOTIATE_TIMEOUT, Multiselect
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID, MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.io import NoisePacketReadWriter
from libp2p.stream_muxer.yamux.yamux import YamuxStream
from libp2p.utils.varint import encode_delim

from p2pavg.net.limits.admission import ConnectionArrival

_LENGTH_BYTES = 2  # of a message of Noise, before it

READ_AHEAD_BYTES = _LENGTH_BYTES + _noise_io.MAX_NOISE_MESSAGE_LEN  # of the longest message

# The longest frame that one message of Noise holds. Frames up to this size are written without waiting, where that is
# possible. After one of more than SMALL_FRAME_BYTES the writer lets other tasks run, so that a long transfer does not
# keep the event loop.
MAX_FRAME_BYTES = _noise_io.MAX_PLAINTEXT_LENGTH
SMALL_FRAME_BYTES = 4 * 1024


class EagerLock:
    """A lock that is acquired at once when it is free.

    trio's lock first lets all other tasks run. libp2p acquires a dozen locks for every frame, most of them without
    contention. In between it reads from a socket or writes to one, and there the other tasks get their turn.
    """

    def __init__(self) -> None:
        self._lock = trio.Lock()

    async def acquire(self) -> None:
        """Acquire the lock. Wait only if another task holds it; then it is as fair as trio's lock."""
        try:
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()

    def release(self) -> None:
        """Release the lock. Only the task that holds it may do so."""
        self._lock.release()

    def locked(self) -> bool:
        """Return whether a task holds the lock."""
        return self._lock.locked()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class _TrioWithEagerLocks(ModuleType):
    """The module ``trio`` as some of libp2p's modules see it, with eager locks."""

    Lock = EagerLock

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name)


def install() -> None:
    """Let libp2p's modules make eager locks and readers from now on. A second call changes nothing."""
    # These modules look `trio.Lock` up when they make a lock. trio itself,
    # which the whole process uses, is left alone.
    for module in (_yamux, _net_stream, _rw_lock, _io_trio):
        module.trio = _TrioWithEagerLocks("trio")  # type: ignore[attr-defined]
    _noise_io.NoisePacketReadWriter = EagerPackets  # type: ignore[misc]


class WriteStart(enum.Enum):
    """The outcome of an attempt to write a frame without waiting."""

    NOTHING = enum.auto()
    """It has to be written by waiting."""
    PART = enum.auto()
    """The rest is sent before the next frame, and the writer waits for that."""
    WHOLE = enum.auto()


class ReadAheadStream(TrioTCPStream):
    """A TCP stream that reads all available bytes, and returns them piece by piece.

    libp2p reads a frame of Noise in two steps, its length and its body. Without reading ahead, that takes two system
    calls and two turns of the event loop.
    """

    @classmethod
    def of(cls, stream: TrioTCPStream) -> ReadAheadStream:
        """Turn a stream from which nothing has been read yet into one that reads ahead."""
        # libp2p makes the stream itself, and offers no place to choose its class.
        stream.__class__ = cls
        assert isinstance(stream, cls)
        stream._ahead = memoryview(b"")
        stream._ahead_lock = EagerLock()
        return stream

    _ahead: memoryview
    _ahead_lock: EagerLock
    reads = 0
    """Reads of the socket so far."""
    _unsent: bytes = b""
    """The bytes of the last write that the system has not taken."""
    arrival: ConnectionArrival | None = None
    """The place of an inbound connection among the others; ``None`` for an outbound connection."""
    expected: str = ""
    """The only peer that may be at the other end; empty if any peer may."""
    relay: str = ""
    """The relay through which the bytes travel: none."""
    punched: bool = False
    """True if the connection was made by hole punching."""

    @property
    def remote_endpoint(self) -> tuple[str, int]:
        """The IP address and port of the other end; empty and 0 if the connection has ended."""
        try:
            host, port, *_ = self.stream.socket.getpeername()
        except OSError:
            return "", 0
        return str(host), int(port)

    @property
    def is_writing(self) -> bool:
        """True while a write waits until the system takes it."""
        return self.write_lock.locked() or bool(self._unsent)

    def start_write(self, data: bytes) -> bool:
        """Hand the system as much as it takes at once; return whether that was all. No other write may be going on.

        What is left is sent before the bytes of the next :meth:`write`. So the caller calls that one, with no bytes, if
        nobody else does.

        Raises:
            ConnectionClosedError: the connection has ended.
        """
        try:
            # trio's own send() makes a turn of the event loop even if the system takes all bytes at once.
            count = self.stream.socket._sock.send(data)  # type: ignore[attr-defined]
        except BlockingIOError:
            count = 0
        except OSError as error:
            raise ConnectionClosedError(f"the TCP connection ended: {error}", transport="tcp") from error
        # A message of Noise that was begun has to be finished. Otherwise the other side could decrypt no later one.
        self._unsent = data[count:]
        return not self._unsent

    async def write(self, data: bytes) -> None:
        """Send the rest of the last write, and then ``data``. If that is cancelled half-way, close the connection.

        The rest may be of another stream's frame. Its writer would not hear that it is lost.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        data, self._unsent = self._unsent + data, b""
        try:
            await super().write(data)
        except trio.Cancelled:
            self.stream.socket.close()
            raise

    async def look_ahead(self, count: int) -> bytes:
        """Return the first ``count`` bytes without consuming them; fewer if the stream ends before."""
        async with self._ahead_lock:
            while len(self._ahead) < count:
                found = await super().read(READ_AHEAD_BYTES)
                # The stream has ended. The caller sees that from the number of bytes.
                if not found:
                    break
                self._ahead = memoryview(bytes(self._ahead) + found)
            return bytes(self._ahead[:count])

    async def _fill(self) -> None:
        self._ahead = memoryview(await super().read(READ_AHEAD_BYTES))
        self.reads += 1

    async def read_packet(self) -> bytes | None:
        """Return the next message of Noise, or ``None`` and consume nothing if not all of it comes at once."""
        async with self._ahead_lock:
            if not self._ahead:
                await self._fill()
            # If not even the length has come, `end` is beyond what is there all the same.
            end = _LENGTH_BYTES + int.from_bytes(self._ahead[:_LENGTH_BYTES], "big")
            if len(self._ahead) < end:
                return None
            packet = bytes(self._ahead[_LENGTH_BYTES:end])
            self._ahead = self._ahead[end:]
            return packet

    async def read(self, n: int | None = None) -> bytes:
        if n == 0:
            return b""
        async with self._ahead_lock:
            if not self._ahead:
                await self._fill()
            taken = bytes(self._ahead[:n])
            self._ahead = self._ahead[len(taken) :]
            return taken


class EagerPackets(NoisePacketReadWriter):
    """Reads a message of Noise at once if it has arrived, without the four calls for its length and its body."""

    async def read_msg(self) -> bytes:
        stream = getattr(self.read_write_closer, "stream", None)
        packet = await stream.read_packet() if isinstance(stream, ReadAheadStream) else None
        return await super().read_msg() if packet is None else packet


class EagerMultiselectClient(MultiselectClient):
    """The client of a negotiation. It sends its greeting and its request in one write, if it wants one protocol."""

    async def select_one_of(
        self,
        protocols: Sequence[TProtocol],
        communicator: IMultiselectCommunicator,
        negotiate_timeout: int = 30,
    ) -> TProtocol:
        if len(protocols) != 1 or not isinstance(communicator, MultiselectCommunicator):
            return await super().select_one_of(protocols, communicator, negotiate_timeout)
        wanted = protocols[0]
        lines = [MULTISELECT_PROTOCOL_ID, wanted]
        with trio.move_on_after(negotiate_timeout):
            try:
                await communicator.read_writer.write(b"".join(encode_delim(line.encode()) for line in lines))
                # The answers come in the order of the requests: the greeting first.
                for line in lines:
                    if (answer := await communicator.read()) != line:
                        raise MultiselectClientError(f"{wanted} is not supported: {answer[:64]!r}")
            except (IOException, MultiselectCommunicatorError, ValueError, AssertionError) as error:
                raise MultiselectClientError(f"{wanted} was not negotiated: {error}") from error
            return wanted
        raise MultiselectClientError(f"no answer to {wanted} within {negotiate_timeout} s")


def holds_more(stream: ReadWriteCloser) -> bool:
    """Return whether unread bytes of a stream have arrived."""
    muxed = getattr(stream, "muxed_stream", None)
    return isinstance(muxed, YamuxStream) and bool(muxed.conn.stream_buffers.get(muxed.stream_id))


class OneAnswerMultiselect(Multiselect):
    """The server of a negotiation. It sends its greeting together with its answer, in one write.

    It does so only for a client that has sent its greeting and its request at once.
    """

    async def negotiate(
        self, communicator: IMultiselectCommunicator, negotiate_timeout: int = DEFAULT_NEGOTIATE_TIMEOUT
    ) -> tuple[TProtocol | None, StreamHandlerFn | None]:
        if isinstance(communicator, MultiselectCommunicator):
            communicator = _GreetsLater(communicator.read_writer)
        return await super().negotiate(communicator, negotiate_timeout)


class _GreetsLater(MultiselectCommunicator):
    """A communicator that keeps its first line until there is a second one, or until the other side waits for it."""

    def __init__(self, stream: ReadWriteCloser) -> None:
        super().__init__(stream)
        self._greeting: bytes | None = None
        self._was_greeted = False

    async def read(self) -> str:
        # A client that sends its greeting alone waits for the answer. Without this, both sides would wait.
        if self._was_greeted and self._greeting and not holds_more(self.read_writer):
            await self._send(b"")
        line = await super().read()
        self._was_greeted = True
        return line

    async def write(self, msg_str: str) -> None:
        line = encode_delim(msg_str.encode())
        if self._greeting is None:
            self._greeting = line
        else:
            await self._send(line)

    async def _send(self, line: bytes) -> None:
        lines, self._greeting = (self._greeting or b"") + line, b""
        try:
            await self.read_writer.write(lines)
        except (IOException, AssertionError, ValueError) as error:
            raise MultiselectCommunicatorError(f"the answer was not sent: {error}") from error
