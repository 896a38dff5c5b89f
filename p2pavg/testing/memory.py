"""A network in memory: seeded latencies, cuts, stops and crashes, on trio's virtual clock.

Nothing here takes real time: under ``trio.testing.MockClock(autojump_threshold=0)`` (pytest-trio's ``autojump_clock``)
an hour of silence passes in a moment. Latencies come from a generator of their own for each direction between two
peers, so what one pair does changes no other pair's. Tasks that are ready at the same instant run in trio's order,
which is not seeded: give ``latency`` a range, and instants differ.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Literal

import trio

from p2pavg.errors import (
    AddressError,
    ClosedError,
    P2PAvgError,
    RefusedError,
    StreamBrokenError,
    UnreachableError,
)
from p2pavg.group.milestones import Milestone
from p2pavg.net.addresses import parse_address_of, parse_peer_address, with_peer_id
from p2pavg.net.dialling import Dialler
from p2pavg.net.transport import Buffer, PeerId, Stream, StreamHandler, Transport
from p2pavg.threads.exceptions import bare_exceptions
from p2pavg_dht import Signer, public_key_of

logger = logging.getLogger(__name__)

# As libp2p's yamux has them, with what p2pavg.net.libp2p.transport sets.
WINDOW_BYTES = 256 * 1024
FRAME_BYTES = 32 * 1024
HEADER_BYTES = 12
MAX_INBOUND_STREAMS = 128
LINGER_SECONDS = 30.0

Inbound = Literal["accepted", "refused", "dropped"]
"""What becomes of dials to a peer: taken, refused at once, or never answered, as a home router does."""


class MemoryNetwork:
    """Peers in one process and what is between them.

    Everything that goes wrong is a plain call, valid at any moment and from any task of the same trio run:
    :meth:`cut` and :meth:`heal`, :meth:`stop` and :meth:`resume`, :meth:`crash`, :meth:`disconnect`, :meth:`limit`,
    :meth:`delay`, and ``transport.inbound``. :class:`~p2pavg.testing.FaultPlan` calls them by a plan.

    Args:
        seed: of the latencies.
        latency: seconds that a frame takes one way, drawn evenly from this range.
        bandwidth: bytes/s that a peer sends, over all its connections together; ``None`` is without limit.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        latency: tuple[float, float] = (0.01, 0.05),
        bandwidth: float | None = None,
    ) -> None:
        low, high = latency
        if not 0.0 <= low <= high:
            raise ValueError(f"latency is a range of seconds, not {latency}")
        if bandwidth is not None and not bandwidth > 0.0:
            raise ValueError(f"bandwidth is bytes per second, not {bandwidth}")
        self._seed = seed
        self._latency = latency
        self._bandwidth = bandwidth
        self._peers: dict[PeerId, MemoryTransport] = {}
        self._locations: dict[PeerId, str] = {}
        self._latencies: dict[tuple[PeerId, PeerId], random.Random] = {}
        self._cut: set[frozenset[PeerId]] = set()
        self._stopped: set[PeerId] = set()
        self._links_changed = trio.Event()
        self._delays: dict[PeerId, tuple[float, float]] = {}
        self.watchers: list[Callable[[PeerId, Milestone], None]] = []
        """Each is told when a simulated peer of this network gets further in a round."""

    @asynccontextmanager
    async def transport(
        self, peer: PeerId | Signer, *, bandwidth: float | None = None, inbound: Inbound = "accepted"
    ) -> AsyncIterator[MemoryTransport]:
        """A peer of this network for as long as the block runs. It comes back under the address that it had.

        Args:
            peer: its id, or the signer that has one.
            bandwidth: bytes/s that this peer sends; ``None`` takes the network's.
            inbound: what becomes of dials to it; can be set on the transport later.

        Raises:
            ValueError: the peer is in the network, or the text is no peer id.
        """
        peer_id = peer if isinstance(peer, str) else peer.peer_id
        public_key_of(peer_id)
        if peer_id in self._peers:
            raise ValueError(f"{peer_id} is in the network already")
        with bare_exceptions():
            async with trio.open_nursery() as nursery:
                transport = MemoryTransport(self, peer_id, nursery, bandwidth or self._bandwidth)
                transport.inbound = inbound
                self._peers[peer_id] = transport
                try:
                    yield transport
                finally:
                    self._leave(transport)
                    nursery.cancel_scope.cancel()

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Silence between two peers, as of a pulled cable: nothing arrives, and nobody is told.

        Senders block once their windows are full. What was on its way, and what is sent meanwhile, arrives after
        :meth:`heal`, in its order, as TCP would send it again.
        """
        self._cut.add(frozenset((a, b)))

    def heal(self, a: PeerId, b: PeerId) -> None:
        """End a :meth:`cut`."""
        self._cut.discard(frozenset((a, b)))
        self._change_links()

    def stop(self, peer_id: PeerId) -> None:
        """As SIGSTOP: nothing of this peer goes out and it takes nothing in, until :meth:`resume`; nobody is told.

        Its tasks run on, but see and change nothing of the network.
        """
        self._stopped.add(peer_id)

    def resume(self, peer_id: PeerId) -> None:
        """End a :meth:`stop`; what had been held arrives."""
        self._stopped.discard(peer_id)
        self._change_links()

    def has(self, peer_id: PeerId) -> bool:
        """Whether a peer is in the network, and has not crashed."""
        return peer_id in self._peers

    def disconnect(self, a: PeerId, b: PeerId) -> None:
        """Every connection between two peers breaks at once; they may make a new one."""
        for end in list(self._peers[a].ends(b)):
            end.close("the connection was lost")
            end.other.close("the connection was lost")

    def limit(self, peer_id: PeerId, bandwidth: float | None) -> None:
        """From now on a peer sends so many bytes/s; ``None`` takes the network's again."""
        self._peers[peer_id].bandwidth = bandwidth or self._bandwidth

    def delay(self, peer_id: PeerId, latency: tuple[float, float] | None) -> None:
        """From now on frames from and to a peer take so long, drawn evenly; ``None`` takes the network's again."""
        if latency is None:
            self._delays.pop(peer_id, None)
        else:
            self._delays[peer_id] = latency

    def reached(self, peer_id: PeerId, milestone: Milestone) -> None:
        """A peer is so far in a round: :attr:`watchers` hear of it."""
        if peer_id in self._peers:
            for watcher in self.watchers.copy():
                watcher(peer_id, milestone)

    def crash(self, peer_id: PeerId) -> None:
        """As SIGKILL: its connections break at once, its handlers are cancelled, and dials to it are refused.

        A peer that it is cut off from learns of it at :meth:`heal`. Its own calls raise from now on; whoever runs it
        should end it. The same id may join again with a new transport.
        """
        transport = self._peers.pop(peer_id)
        self._stopped.discard(peer_id)
        transport._crash()
        self._change_links()

    def _leave(self, transport: MemoryTransport) -> None:
        if self._peers.get(transport.peer_id) is transport:
            del self._peers[transport.peer_id]
        transport._close()

    def _change_links(self) -> None:
        self._links_changed.set()
        self._links_changed = trio.Event()

    def _is_silent(self, a: PeerId, b: PeerId) -> bool:
        return frozenset((a, b)) in self._cut or a in self._stopped or b in self._stopped

    async def _until_heard(self, a: PeerId, b: PeerId) -> None:
        while self._is_silent(a, b):
            await self._links_changed.wait()

    def _draw_latency(self, sender: PeerId, receiver: PeerId) -> float:
        pair = (sender, receiver)
        if pair not in self._latencies:
            self._latencies[pair] = random.Random(f"{self._seed}/{sender}/{receiver}")
        drawn = self._latencies[pair].uniform(*self._latency)
        for end in pair:
            if end in self._delays:
                drawn = max(drawn, self._latencies[pair].uniform(*self._delays[end]))
        return drawn

    def _location(self, peer_id: PeerId) -> str:
        if peer_id not in self._locations:
            number = len(self._locations) + 1
            self._locations[peer_id] = f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4001"
        return self._locations[peer_id]

    def _listener_at(self, location: str) -> MemoryTransport | None:
        return next(
            (found for found in self._peers.values() if self._location(found.peer_id) == location), None
        )

    def taking_dials(self, location: str) -> MemoryTransport:
        """Who takes dials at an address now. Raises UnreachableError when nobody does."""
        found = self._listener_at(location)
        if found is None:
            raise RefusedError("connection refused")
        if not found.listens:
            raise RefusedError("connection refused")
        if found.inbound != "accepted":
            raise UnreachableError("connection refused by a router")
        return found


class _Wire:
    """One direction of a connection: frames arrive in their order, each after its latency.

    It runs among the receiver's tasks: what a peer said before it left still arrives.
    """

    def __init__(self, network: MemoryNetwork, sender: MemoryTransport, receiver: MemoryTransport) -> None:
        self._network = network
        self._sender = sender
        self._receiver = receiver
        self._frames: deque[tuple[float, Callable[[], None]]] = deque()
        self._filled = trio.Event()
        self._last_arrival = 0.0
        self.failure: Callable[[], None] | None = None
        """Delivered in the place of every frame to come."""
        self.scope = trio.CancelScope()

    def send(self, size: int, deliver: Callable[[], None]) -> None:
        """``deliver`` is called when a frame of ``size`` bytes has arrived."""
        sent = self._sender.time_to_send(size + HEADER_BYTES)
        arrival = sent + self._network._draw_latency(self._sender.peer_id, self._receiver.peer_id)
        self._last_arrival = max(self._last_arrival, arrival)
        self._frames.append((self._last_arrival, deliver))
        self._filled.set()

    async def run(self) -> None:
        with self.scope:
            while True:
                while not self._frames:
                    self._filled = trio.Event()
                    await self._filled.wait()
                arrival, deliver = self._frames.popleft()
                await trio.sleep_until(arrival)
                await self._network._until_heard(self._sender.peer_id, self._receiver.peer_id)
                (self.failure or deliver)()


class _End:
    """One peer's end of a connection."""

    outgoing: _Wire
    incoming: _Wire
    other: _End

    def __init__(self, owner: MemoryTransport, remote: PeerId, first_stream_id: int) -> None:
        self.owner = owner
        self.remote = remote
        self.streams: dict[int, MemoryStream] = {}
        self.inbound_streams = 0
        self.closed = False
        self._next_stream_id = first_stream_id

    def close(self, why: str) -> None:
        """Break every stream of this end. The other end is told by frames, or not at all."""
        if not self.closed:
            self.closed = True
            self.owner.forget(self)
            self.incoming.scope.cancel()
            for stream in list(self.streams.values()):
                stream.break_off(why)

    def hang_up(self) -> None:
        self.outgoing.send(0, partial(self.other.close, f"{self.owner.peer_id} closed the connection"))
        self.close("this process closed the connection")

    def tell(self, stream_id: int, size: int, what: Callable[[MemoryStream], None]) -> None:
        """Have ``what`` done to the stream at the other end, once it has heard."""
        self.outgoing.send(size, partial(self.other._hear, stream_id, what))

    def _hear(self, stream_id: int, what: Callable[[MemoryStream], None]) -> None:
        if (stream := self.streams.get(stream_id)) is not None:
            what(stream)

    def open_stream(self, protocol: str) -> MemoryStream:
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        stream = self.streams[stream_id] = MemoryStream(self, stream_id)
        self.outgoing.send(len(protocol), partial(self.other._accept, stream_id, protocol))
        return stream

    def _accept(self, stream_id: int, protocol: str) -> None:
        handler = self.owner.handlers.get(protocol)
        if handler is None:
            refusal = f"it does not serve {protocol}"
        elif self.inbound_streams >= MAX_INBOUND_STREAMS:
            refusal = f"more than {MAX_INBOUND_STREAMS} streams at once"
        else:
            stream = self.streams[stream_id] = MemoryStream(self, stream_id)
            self.inbound_streams += 1
            self.tell(stream_id, 0, MemoryStream.hear_opened)
            self.owner.nursery.start_soon(self._serve, handler, stream)
            return
        self.tell(stream_id, 0, lambda stream: stream.break_off(refusal))

    async def _serve(self, handler: StreamHandler, stream: MemoryStream) -> None:
        """Whatever the handler raises costs its stream only."""
        try:
            with trio.CancelScope() as scope, self.owner.among_served(scope):
                await handler(stream)
        except (P2PAvgError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            logger.info("stream of %s dropped: %r", self.remote, error)
        except Exception:
            logger.exception("serving %s failed; only this stream of it is reset", self.remote)
        finally:
            self.inbound_streams -= 1
            await stream.reset()


class MemoryStream(Stream):
    """One stream of a connection. A receiver that takes nothing blocks the sender after ``WINDOW_BYTES``."""

    def __init__(self, end: _End, stream_id: int) -> None:
        self.remote = end.remote
        self.remote_host = end.owner.host_of(end.remote)
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
        if self._closed or self._end.owner.closed:
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
        """Raises UnreachableError when the other side refuses it."""
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
        count = min(len(view), self._window, FRAME_BYTES)
        self._window -= count
        frame = bytes(view[:count])
        self._end.tell(self._id, count, lambda stream: stream.hear_data(frame))
        return count

    async def receive_some(self, max_bytes: int) -> bytes:
        self._check(self._unreadable)
        with self._alone("receiving"):
            try:
                await trio.lowlevel.checkpoint()
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
        """Give the sender its window back, in halves: a frame for every read would double the traffic."""
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
        self._end.owner.start_soon(self._linger)

    async def _linger(self) -> None:
        """Until the other side closes its half as well; one that never does holds nothing here for ever."""
        with trio.move_on_after(LINGER_SECONDS):
            while not self._ended and self._broken is None:
                await self._changed.wait()
            self._end.streams.pop(self._id, None)
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
        """Nothing more goes or comes; what was not read is lost."""
        self._broken = why
        self._unread.clear()
        self._end.streams.pop(self._id, None)
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


class MemoryTransport(Transport):
    """Made by :meth:`MemoryNetwork.transport`, which owns its tasks."""

    def __init__(
        self, network: MemoryNetwork, peer_id: PeerId, nursery: trio.Nursery, bandwidth: float | None
    ) -> None:
        self.peer_id = peer_id
        self.inbound: Inbound = "accepted"
        self.listens = True
        """True if it announces an address; like a peer with ``listen=[]``, one that does not cannot be dialled."""
        self.nursery = nursery
        self.handlers: dict[str, StreamHandler] = {}
        self._network = network
        self.bandwidth = bandwidth
        self._sending_until = 0.0
        self._ends: dict[PeerId, list[_End]] = {}
        self._served: set[trio.CancelScope] = set()
        self._met: set[PeerId] = set()
        self._dialler = Dialler(nursery, self.is_connected, self._dial_one)
        self.closed = False
        self.crashed = trio.Event()
        """Set by :meth:`MemoryNetwork.crash`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return with_peer_id([self._network._location(self.peer_id)] if self.listens else [], self.peer_id)

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        self.handlers[protocol] = handler

    async def dial(self, address: str, *, timeout: float) -> PeerId:
        _, peer_id = parse_peer_address(address)
        if peer_id == self.peer_id:
            raise AddressError(f"{address} is this peer itself")
        self._check_open()
        with trio.move_on_after(timeout):
            await self._dialler.connect(peer_id, [address])
            return peer_id
        raise UnreachableError(f"no connection to {address} within {timeout:.1f} s")

    async def open_stream(
        self,
        peer_id: PeerId,
        protocol: str,
        *,
        addresses: Sequence[str] = (),
        timeout: float,
        wait_inbound: bool = False,
    ) -> Stream:
        self._check_open()
        with trio.move_on_after(timeout):
            await self._dialler.connect(peer_id, addresses, wait_inbound=wait_inbound)
            stream = self._ends[peer_id][0].open_stream(protocol)
            try:
                await stream.until_opened()
            except trio.Cancelled:
                await stream.reset()
                raise
            return stream
        raise UnreachableError(f"no stream to {peer_id} within {timeout:.1f} s")

    def is_connected(self, peer_id: PeerId) -> bool:
        return peer_id in self._ends

    async def disconnect(self, peer_id: PeerId) -> None:
        for end in self._ends.get(peer_id, [])[:]:
            end.hang_up()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the transport is closed")
        if self.crashed.is_set():
            raise UnreachableError("this peer has crashed")

    async def _dial_one(self, peer_id: PeerId, text: str) -> None:
        parse_address_of(peer_id, text)
        location = text.partition("/p2p/")[0]
        found = self._network._listener_at(location)
        if found is not None and found.inbound == "dropped":
            await trio.sleep_forever()
        listener = found.peer_id if found is not None else location
        await self._round_trip(listener)  # of TCP
        self._taking_dials(peer_id, location)
        await self._round_trip(listener)  # of Noise
        answering = self._taking_dials(peer_id, location)
        if answering.peer_id != peer_id:
            raise UnreachableError(f"{answering.peer_id} answered")
        self._connect(answering)

    def _taking_dials(self, peer_id: PeerId, location: str) -> MemoryTransport:
        try:
            return self._network.taking_dials(location)
        except RefusedError as error:
            if peer_id in self._met:
                raise
            raise UnreachableError(str(error)) from None

    async def _round_trip(self, listener: str) -> None:
        for one, other in ((self.peer_id, listener), (listener, self.peer_id)):
            await trio.sleep(self._network._draw_latency(one, other))
            await self._network._until_heard(one, other)

    def _connect(self, listener: MemoryTransport) -> None:
        near, far = _End(self, listener.peer_id, 1), _End(listener, self.peer_id, 2)
        near.other, far.other = far, near
        near.outgoing = far.incoming = _Wire(self._network, self, listener)
        near.incoming = far.outgoing = _Wire(self._network, listener, self)
        for end in (near, far):
            end.owner._met.add(end.remote)
            end.owner._ends.setdefault(end.remote, []).append(end)
            end.owner.nursery.start_soon(end.incoming.run)
            end.owner._dialler.something_changed()

    def host_of(self, peer_id: PeerId) -> str:
        """The address from which a peer's connections come."""
        return self._network._location(peer_id).split("/")[2]

    def forget(self, end: _End) -> None:
        """An end has closed."""
        self._ends[end.remote].remove(end)
        if not self._ends[end.remote]:
            del self._ends[end.remote]

    def time_to_send(self, size: int) -> float:
        """When ``size`` bytes more have left this peer."""
        start = max(self._sending_until, trio.current_time())
        self._sending_until = start + (size / self.bandwidth if self.bandwidth is not None else 0.0)
        return self._sending_until

    def start_soon(self, work: Callable[[], object]) -> None:
        """Among this peer's tasks; a peer that has left has none."""
        if not self.closed:
            self.nursery.start_soon(work)  # type: ignore[arg-type]

    @contextmanager
    def among_served(self, scope: trio.CancelScope) -> Iterator[None]:
        """For as long as the block runs, a crash cancels this scope."""
        self._served.add(scope)
        try:
            yield
        finally:
            self._served.discard(scope)

    def ends(self, peer_id: PeerId) -> list[_End]:
        """This peer's ends of its connections with another one."""
        return self._ends.get(peer_id, [])

    def _all_ends(self) -> list[_End]:
        return [end for ends in self._ends.values() for end in ends]

    def _close(self) -> None:
        self.closed = True
        for end in self._all_ends():
            end.hang_up()

    def _crash(self) -> None:
        self.crashed.set()
        for scope in self._served:
            scope.cancel()
        for end in self._all_ends():
            end.close("this peer has crashed")
            broken = partial(end.other.close, f"{self.peer_id} is gone")
            if self._network._is_silent(self.peer_id, end.remote):
                end.outgoing.failure = broken
                end.outgoing.send(0, broken)
            else:
                broken()


__all__ = ["Inbound", "MemoryNetwork", "MemoryStream", "MemoryTransport"]
