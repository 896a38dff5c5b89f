"""A stream of yamux that waits patiently for its window, and reports how it ended."""

from __future__ import annotations

import logging
import struct
from typing import Any

import trio
from libp2p.io.exceptions import IOException
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from libp2p.stream_muxer.yamux import yamux as _yamux
from libp2p.stream_muxer.yamux.yamux import YamuxStream

from p2pavg.base.limits import GLANCE_SECONDS
from p2pavg.net.libp2p.speed import WriteStart

logger = logging.getLogger(__name__)


class PatientStream(YamuxStream):
    """A stream that waits for its window without a timeout of its own, and tells a reset from an orderly end.

    libp2p's stream polls its window every 10 ms and gives up after 5 s, but a link of 100 kbit/s may need longer. It
    also reports a reset or a lost connection to a waiting reader as the orderly end of the stream.
    """

    window_grows = True
    """False keeps the first receive window of 256 KiB, which carries 20 Mbit/s over a link of 100 ms."""
    delivers_rest = True
    """False if what came before a reset of the other side is not read any more."""
    dropped_here = False
    """True if this process has reset it because it held too much."""
    starved = False
    """True while a write waits for the window, and if it was cancelled there: then no half frame was written."""

    @property
    def send_window(self) -> int:
        return self._send_window

    @send_window.setter
    def send_window(self, value: int) -> None:
        self._send_window = value
        if value > 0:
            self.__dict__.setdefault("_window_opened", trio.Event()).set()

    async def read(self, n: int | None = -1) -> bytes:
        """Read at most ``n`` bytes, first of all those that came before the other side reset the stream.

        libp2p discards them. A handler that answers and returns resets its stream right after its answer.
        """
        try:
            return await super().read(n)
        except MuxedStreamReset:
            if rest := await self._take_rest(n):
                return rest
            raise
        except MuxedStreamEOF as error:
            if self.reset_received or self.conn.event_shutting_down.is_set():
                raise MuxedStreamReset("the other side reset it, or its connection is gone") from error
            raise

    async def _take_rest(self, n: int | None) -> bytes:
        buffer = self.conn.stream_buffers.get(self.stream_id)
        if not buffer or not self.delivers_rest:
            return b""
        rest = bytes(buffer if n is None or n < 0 else buffer[:n])
        del buffer[: len(rest)]
        if not buffer:
            await self.conn._finalize_stream(self, fully_closed=True)
        return rest

    async def send_window_update(self, increment: int, skip_lock: bool = False) -> None:  # noqa: ARG002
        """Send a window update from a task of the connection.

        libp2p sends it in the task that reads the stream, which then waits for the other side to read. If that task
        were cancelled there, it would leave half a frame behind, and the connection would be dead.
        """
        if increment <= 0 or self.conn._nursery is None:
            return
        owed = self.__dict__.get("_owed_window", 0)
        self.__dict__["_owed_window"] = owed + increment
        if owed == 0:
            self.conn._nursery.start_soon(self._pay_window)

    async def _auto_tune_and_send_window_update(self, *, bytes_read: int = 0) -> None:  # noqa: ARG002
        """Grant window so that unread bytes and bytes still to come never exceed it together.

        libp2p returns some of the bytes that were read twice. An honest sender that used this window would exceed the
        bytes that this process holds for it, and would lose its stream.
        """
        async with self.window_lock:
            buffered = len(self.conn.stream_buffers.get(self.stream_id, b""))
            if self.target_recv_window - (self.recv_window + buffered) < self._grow_threshold():
                return
            increment = self._grow_to_delta(buffered)
            if self.window_grows:
                increment += self._apply_autotune_epoch(buffered)
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
        """Reset the stream and drop its unread bytes.

        libp2p keeps them, and the stream's place, for a minute or more.
        """
        self.conn.stream_buffers.get(self.stream_id, bytearray()).clear()
        await super().reset()
        self.conn.stream_buffers.get(self.stream_id, bytearray()).clear()
        await self.conn._finalize_stream(self, fully_closed=True)

    def start_write(self, data: bytes) -> WriteStart:
        """Write without waiting, if the window and the connection allow it.

        Raises:
            ConnectionClosedError: the connection has ended.
        """
        if self.send_closed or self.closed or self.send_window < len(data):
            return WriteStart.NOTHING
        conn: Any = self.conn  # a GuardedYamux, which imports this module
        started: WriteStart = conn.start_frame(self._header(len(data)) + data)
        if started is not WriteStart.NOTHING:
            self.send_window -= len(data)
        return started

    async def write(self, data: bytes) -> None:
        sent = 0
        while sent < len(data):
            await self._window()
            if self.send_closed or self.closed:
                raise MuxedStreamError("stream is closed for sending")
            count = min(self.send_window, _yamux.MAX_MESSAGE_SIZE - _yamux.HEADER_SIZE, len(data) - sent)
            self.send_window -= count
            await self.conn._write_frame(self._header(count) + data[sent : sent + count])
            sent += count

    def _header(self, count: int) -> bytes:
        return struct.pack(_yamux.YAMUX_HEADER_FORMAT, 0, _yamux.TYPE_DATA, 0, self.stream_id, count)

    async def _window(self) -> None:
        """Wait until the window opens or the stream ends."""
        self.starved = True  # stays true if the wait is cancelled
        while self.send_window == 0 and not (self.send_closed or self.closed):
            self._window_opened = trio.Event()
            with trio.move_on_after(GLANCE_SECONDS):  # a reset sets no event of ours
                await self._window_opened.wait()
        self.starved = False
