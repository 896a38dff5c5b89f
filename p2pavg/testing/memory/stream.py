"""One stream of a simulated connection, with windows like those of libp2p's yamux."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import trio

from p2pavg.base.errors import ClosedError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import STALL_SECONDS
from p2pavg.net.transport import Buffer, PeerId, Stream
from p2pavg.testing.memory.machine import Machine

# The values of libp2p's yamux, with what p2pavg.net.libp2p sets.
WINDOW_BYTES = 256 * 1024
FRAME_BYTES = 32 * 1024


class Carrier(Protocol):
    """One peer's end of a connection, as the streams on it need it."""

    machine: Machine
    remote: PeerId

    @property
    def remote_host(self) -> str:
        """The IP address of the other peer, or of the relay."""

    @property
    def relayed(self) -> bool:
        """True if the connection leads through a relay."""

    def tell(self, stream_id: int, size: int, what: Callable[[MemoryStream], None]) -> None:
        """Call ``what`` with the stream at the other end, when a frame of ``size`` bytes has arrived there."""

    def forget(self, stream_id: int) -> None:
        """Forget a stream that has ended."""


class MemoryStream(Stream):
    """One stream of a connection. A receiver that reads nothing blocks the sender after ``WINDOW_BYTES``."""

    def __init__(self, end: Carrier, stream_id: int) -> None:
        self.remote = end.remote
        self.remote_host = end.remote_host
        self.relayed = end.relayed
        self._end = end
        self._id = stream_id
        self._unread = bytearray()
        self._ended = False
        self._window = WINDOW_BYTES
        self._taken = 0
        self._closed = False
        self._broken: str | None = None
        self._unreadable: str | None = None
        self._unwritable: str | None = None
        self._busy: set[str] = set()
        self._changed = trio.Event()
        self.opened = False

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _check(self, unusable: str | None) -> None:
        if self._closed or self._end.machine.has_left:
            raise ClosedError(f"the stream to {self.remote} was closed by this process")
        if (broken := self._broken or unusable) is not None:
            raise StreamBrokenError(f"the stream to {self.remote} broke: {broken}")

    @contextmanager
    def _alone(self, doing: str) -> Iterator[None]:
        if doing in self._busy:
            raise trio.BusyResourceError(f"another task is {doing} on this stream")
        self._busy.add(doing)
        try:
            yield
        finally:
            self._busy.discard(doing)

    async def until_opened(self) -> None:
        """Wait until the other side has accepted the stream. Raises UnreachableError if it refuses."""
        while not self.opened:
            if self._broken is not None:
                raise UnreachableError(f"{self.remote} opened no stream: {self._broken}")
            await self._changed.wait()

    async def send_all(self, data: Buffer) -> None:
        self._check(self._unwritable)
        view = memoryview(data)
        with self._alone("sending"):
            try:
                while len(view) > 0:
                    view = view[await self._send_some(view) :]
            except trio.Cancelled:
                self._unwritable = "a write was cancelled half-way"
                raise

    async def _send_some(self, view: memoryview) -> int:
        await trio.lowlevel.checkpoint()
        self._check(None)
        while self._window == 0:
            await self._changed.wait()
            self._check(None)
        async with self._end.machine.room_to_send(min(len(view), self._window, FRAME_BYTES)):
            self._check(None)
            count = min(len(view), self._window, FRAME_BYTES)
            self._window -= count
            frame = bytes(view[:count])
            self._end.tell(self._id, count, lambda stream: stream.hear_data(frame))
            return count

    async def receive_some(self, max_bytes: int) -> bytes:
        self._check(self._unreadable)
        with self._alone("receiving"):
            try:
                # A turn of the event loop for data that is there would be most of the simulation's work.
                await trio.lowlevel.checkpoint_if_cancelled()
                while not self._unread and not self._ended and self._broken is None and not self._closed:
                    await self._changed.wait()
            except trio.Cancelled:
                self._unreadable = "a read was cancelled half-way"
                raise
        self._check(None)
        taken = bytes(self._unread[:max_bytes])
        del self._unread[: len(taken)]
        self._take(len(taken))
        return taken

    def _take(self, count: int) -> None:
        """Reopen the sender's window, half a window at a time: an update for every read would double the traffic."""
        self._taken += count
        if self._taken >= WINDOW_BYTES // 2:
            granted, self._taken = self._taken, 0
            self._end.tell(self._id, 0, lambda stream: stream.hear_window(granted))

    async def aclose(self) -> None:
        if self._closed:
            return
        if self._unwritable is not None or self._broken is not None:
            await self.reset()
            return
        self._closed = True
        self._end.tell(self._id, 0, MemoryStream.hear_end)
        self._take(len(self._unread))
        self._unread.clear()
        self._change()
        self._end.machine.start_soon(self._linger)

    async def _linger(self) -> None:
        """Keep the stream until the other side closes its half; reset it after a timeout."""
        with trio.move_on_after(STALL_SECONDS):
            while not self._ended and self._broken is None:
                await self._changed.wait()
            self._end.forget(self._id)
            return
        self._reset()

    async def reset(self) -> None:
        if not self._closed:
            self._closed = True
            self._reset()

    def _reset(self) -> None:
        if self._broken is None:
            self._end.tell(self._id, 0, lambda stream: stream.break_off("the other side reset it"))
            self.break_off("this process reset it")

    def break_off(self, why: str) -> None:
        """End the stream in both directions. Unread bytes are lost."""
        self._broken = why
        self._unread.clear()
        self._end.forget(self._id)
        self._change()

    def hear_opened(self) -> None:
        self.opened = True
        self._change()

    def hear_data(self, frame: bytes) -> None:
        if self._closed:
            self._take(len(frame))
        else:
            self._unread += frame
            self._change()

    def hear_window(self, granted: int) -> None:
        self._window += granted
        self._change()

    def hear_end(self) -> None:
        self._ended = True
        self._change()
