"""A stream of the network as it travels over a gate's socket, in chunks: the same on both sides of the socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError
from p2pavg.base.limits import REPLY_SECONDS, TAIL_SECONDS
from p2pavg.net.gate.messages import CHUNK_LENGTH_BYTES, MAX_CHUNK_BYTES, StreamOpened
from p2pavg.net.transport import Buffer, Stream
from p2pavg.net.unix import UnixStream

_HALF_CLOSED = bytes(CHUNK_LENGTH_BYTES)


class ChunkedStream(Stream):
    """A stream over a connection of a gate's socket, which it owns.

    The half is closed by an empty chunk, because the socket alone cannot tell a stream that has ended from one that was
    reset.
    """

    def __init__(self, socket: UnixStream, opened: StreamOpened) -> None:
        self.remote = opened.remote
        self.remote_host = opened.remote_host
        self.remote_port = opened.remote_port
        self.relayed = opened.relayed
        self._socket = socket
        self._left = 0  # bytes of the chunk that is being read
        self.is_closed = False
        """True when this side has closed or reset the stream."""
        self._unusable: set[str] = set()
        """Directions in which a call was cancelled, which may have lost a part of a chunk."""
        self.ended = False
        """True when the other side has closed its half."""

    async def send_all(self, data: Buffer) -> None:
        """See :class:`~p2pavg.net.transport.Stream`."""
        with self._whole("sending"):
            view = memoryview(data).cast("B")
            for start in range(0, len(view), MAX_CHUNK_BYTES):
                part = view[start : start + MAX_CHUNK_BYTES]
                await self._socket.send_all(len(part).to_bytes(CHUNK_LENGTH_BYTES, "big") + part)

    async def receive_some(self, max_bytes: int) -> bytes:
        """See :class:`~p2pavg.net.transport.Stream`.

        Raises:
            RemoteProtocolError: the other side has sent a chunk that is too long.
        """
        with self._whole("receiving"):
            return await self._receive(max_bytes)

    async def _receive(self, max_bytes: int) -> bytes:
        if not self._left and not self.ended:
            header = b""
            while len(header) < CHUNK_LENGTH_BYTES:
                header += await self._some(CHUNK_LENGTH_BYTES - len(header))
            self._left = int.from_bytes(header, "big")
            self.ended = not self._left
        if self.ended:
            await trio.lowlevel.checkpoint()
            return b""
        if self._left > MAX_CHUNK_BYTES:
            raise RemoteProtocolError(f"a chunk of {self._left} bytes on a gate's socket")
        data = await self._some(min(max_bytes, self._left))
        self._left -= len(data)
        return data

    async def _some(self, count: int) -> bytes:
        data = await self._socket.receive_some(count)
        if not data:
            raise StreamBrokenError(f"the stream of {self.remote} was reset")
        return data

    async def aclose(self) -> None:
        """See :class:`~p2pavg.net.transport.Stream`."""
        if not self.is_closed:
            self.is_closed = True
            await self.close_half()

    async def close_half(self) -> None:
        """Close this side's half; what the other side sends can still be received. Never raises; bounded in time."""
        if "sending" in self._unusable:  # the other side must not take what has come for all that was sent
            await self._socket.reset()
            return
        # A receiver that takes nothing must not hold its sender.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + TAIL_SECONDS) as scope:
            try:
                await self._socket.send_all(_HALF_CLOSED)
            except (StreamBrokenError, ClosedError, trio.BusyResourceError):
                return
        if scope.cancelled_caught:
            await self._socket.reset()

    async def wait_closed(self) -> None:
        """See :class:`~p2pavg.net.transport.Stream`. The connection is closed afterwards."""
        with trio.move_on_after(REPLY_SECONDS):
            try:
                while await self._receive(MAX_CHUNK_BYTES):
                    pass
            except (StreamBrokenError, ClosedError, RemoteProtocolError, trio.BusyResourceError):
                pass
        await self._socket.reset()

    async def until_gone(self) -> None:
        """Wait until the other side has closed the connection, after its half."""
        while await self._socket.receive_some(MAX_CHUNK_BYTES):
            pass

    async def reset(self) -> None:
        """See :class:`~p2pavg.net.transport.Stream`."""
        self.is_closed = True
        await self._socket.reset()

    @contextmanager
    def _whole(self, direction: str) -> Iterator[None]:
        if self.is_closed:
            raise ClosedError("the stream was closed")
        if direction in self._unusable:
            raise StreamBrokenError("an earlier call was cancelled")
        try:
            yield
        except ClosedError:
            # Another task, or the end of the transport, has closed the socket since.
            raise ClosedError("the stream was closed") from None
        except trio.Cancelled:
            self._unusable.add(direction)
            raise
