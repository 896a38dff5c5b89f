"""A simulated connection: a wire for each direction, an end for each of the two peers, and streams like yamux's."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import trio

from p2pavg.base.errors import ClosedError, P2PAvgError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import STALL_SECONDS
from p2pavg.net.transport import Buffer, PeerId, Stream, StreamHandler
from p2pavg.testing.memory.machine import Links, Machine

logger = logging.getLogger(__name__)

# The values of libp2p's yamux, with what p2pavg.net.libp2p sets.
WINDOW_BYTES = 256 * 1024
FRAME_BYTES = 32 * 1024
HEADER_BYTES = 12
MAX_INBOUND_STREAMS = 128


class Wire:
    """One direction of a connection: frames arrive in order, each after its latency.

    The wire runs among the receiver's tasks, so that frames of a peer that has left still arrive.

    Args:
        relay: the peer through which the frames travel; ``None`` if they travel directly.
    """

    def __init__(self, links: Links, sender: Machine, receiver: Machine, relay: Machine | None) -> None:
        self._links = links
        self._sender = sender
        self._receiver = receiver
        self._relay = relay
        hops = [sender.peer_id, *([] if relay is None else [relay.peer_id]), receiver.peer_id]
        self._hops = list(itertools.pairwise(hops))
        self._frames: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._filled = trio.Event()
        self._last_arrival = 0.0
        self.failure: Callable[[], None] | None = None
        """Replaces the delivery of every frame from now on."""
        self.scope = trio.CancelScope()

    def send(self, size: int, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` when a frame of ``size`` bytes has arrived."""
        size += HEADER_BYTES
        sent = self._sender.time_to_send(size)
        arrival = self._arrival(size, sent)
        self._last_arrival = max(self._last_arrival, arrival)
        self._frames.append((self._last_arrival, size, deliver))
        self._filled.set()

    def _arrival(self, size: int, sent: float) -> float:
        arrival = sent + self._links.draw_latency(*self._hops[0])
        if self._relay is None:
            return arrival
        return self._relay.time_to_relay(size, arrival) + self._links.draw_latency(*self._hops[1])

    def is_silent(self) -> bool:
        """Return whether frames are held back now."""
        return any(self._links.is_silent(*hop) for hop in self._hops)

    async def run(self) -> None:
        """Deliver frames until the connection ends."""
        with self.scope:
            while True:
                while not self._frames:
                    self._filled = trio.Event()
                    await self._filled.wait()
                arrival, size, deliver = self._frames.popleft()
                await trio.sleep_until(arrival)
                for hop in self._hops:
                    await self._links.until_heard(*hop)
                await self._receiver.receive(size)
                (self.failure or deliver)()


class End:
    """One peer's end of a connection.

    Args:
        machine: the peer's machine.
        remote: id of the other peer.
        remote_host: the IP address of the other peer, or of the relay.
        relayed: true if the connection leads through a relay.
        first_stream_id: id of the first stream that this end opens; each further one has an id higher by 2.
        on_close: called once, when this end closes.
    """

    outgoing: Wire
    incoming: Wire
    other: End

    def __init__(
        self,
        machine: Machine,
        remote: PeerId,
        remote_host: str,
        relayed: bool,
        first_stream_id: int,
        on_close: Callable[[End], None],
    ) -> None:
        self.machine = machine
        self.remote = remote
        self.remote_host = remote_host
        self.relayed = relayed
        self._on_close = on_close
        self.streams: dict[int, MemoryStream] = {}
        self.inbound_streams = 0
        self.closed = False
        self._next_stream_id = first_stream_id

    def close(self, why: str) -> None:
        """Break every stream of this end. Only a frame can tell the other end."""
        if not self.closed:
            self.closed = True
            self._on_close(self)
            self.incoming.scope.cancel()
            for stream in list(self.streams.values()):
                stream.break_off(why)

    def hang_up(self) -> None:
        """Close this end, and send a frame that closes the other one."""
        self.outgoing.send(0, partial(self.other.close, f"{self.machine.peer_id} closed the connection"))
        self.close("this process closed the connection")

    def tell(self, stream_id: int, size: int, what: Callable[[MemoryStream], None]) -> None:
        """Call ``what`` with the stream at the other end, when a frame of ``size`` bytes has arrived there."""
        self.outgoing.send(size, partial(self.other._receive, stream_id, what))

    def forget(self, stream_id: int) -> None:
        """Forget a stream that has ended."""
        self.streams.pop(stream_id, None)

    def _receive(self, stream_id: int, what: Callable[[MemoryStream], None]) -> None:
        if (stream := self.streams.get(stream_id)) is not None:
            what(stream)

    def open_stream(self, protocol: str) -> MemoryStream:
        """Open a stream from this end. The other side may still refuse it."""
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        stream = self.streams[stream_id] = MemoryStream(self, stream_id)
        self.outgoing.send(len(protocol), partial(self.other._accept, stream_id, protocol))
        return stream

    def _accept(self, stream_id: int, protocol: str) -> None:
        handler = self.machine.handlers.get(protocol)
        if handler is None:
            refusal = f"it does not serve {protocol}"
        elif self.inbound_streams >= MAX_INBOUND_STREAMS:
            refusal = f"more than {MAX_INBOUND_STREAMS} streams at once"
        else:
            stream = self.streams[stream_id] = MemoryStream(self, stream_id)
            self.inbound_streams += 1
            self.tell(stream_id, 0, MemoryStream.hear_opened)
            self.machine.nursery.start_soon(self._serve, handler, stream)
            return
        self.tell(stream_id, 0, lambda stream: stream.break_off(refusal))

    async def _serve(self, handler: StreamHandler, stream: MemoryStream) -> None:
        """Run the handler of a stream. An exception of the handler ends this stream only."""
        try:
            with trio.CancelScope() as scope, self.machine.among_served(scope):
                await handler(stream)
        except (P2PAvgError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.debug("stream of %s dropped: %r", self.remote, error)
        except Exception:
            logger.exception("serving %s failed; only this stream of it is reset", self.remote)
        finally:
            self.inbound_streams -= 1
            await stream.reset()


class MemoryStream(Stream):
    """One stream of a connection. A receiver that reads nothing blocks the sender after ``WINDOW_BYTES``."""

    def __init__(self, end: End, stream_id: int) -> None:
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
