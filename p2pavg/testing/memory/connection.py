"""A simulated connection: a wire for each direction, and an end for each of the two peers."""

from __future__ import annotations

import itertools
import logging
import random
from collections import deque
from collections.abc import Callable
from functools import partial

import trio

from p2pavg.base.errors import P2PAvgError
from p2pavg.net.transport import PeerId, StreamHandler
from p2pavg.testing.memory.machine import Machine
from p2pavg.testing.memory.stream import MemoryStream

# The links between the peers of a simulated network: their latencies, cuts and stops.


class Links:
    """Every link of one network.

    Args:
        seed: determines the latencies.
        latency: seconds that a frame takes one way, drawn evenly from this range.
    """

    def __init__(self, seed: int, latency: tuple[float, float]) -> None:
        low, high = latency
        if not 0.0 <= low <= high:
            raise ValueError(f"latency is a range of seconds, not {latency}")
        self._seed = seed
        self._latency = latency
        self._latencies: dict[tuple[PeerId, PeerId], random.Random] = {}
        self._delays: dict[PeerId, tuple[float, float]] = {}
        self._cut: set[frozenset[PeerId]] = set()
        self._stopped: set[PeerId] = set()
        self._changed = trio.Event()

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Deliver nothing between two peers, until :meth:`heal`."""
        self._cut.add(frozenset((a, b)))

    def heal(self, a: PeerId, b: PeerId) -> None:
        """End a :meth:`cut`."""
        self._cut.discard(frozenset((a, b)))
        self.notify()

    def stop(self, peer_id: PeerId) -> None:
        """Deliver nothing from or to a peer, until :meth:`resume`."""
        self._stopped.add(peer_id)

    def resume(self, peer_id: PeerId) -> None:
        """End a :meth:`stop`."""
        self._stopped.discard(peer_id)
        self.notify()

    def delay(self, peer_id: PeerId, latency: tuple[float, float] | None) -> None:
        """Set the latency of a peer's frames; ``None`` restores the network's."""
        if latency is None:
            self._delays.pop(peer_id, None)
        else:
            self._delays[peer_id] = latency

    def notify(self) -> None:
        """Wake the frames that wait for a link, so that they look at it again."""
        self._changed.set()
        self._changed = trio.Event()

    def is_silent(self, a: PeerId, b: PeerId) -> bool:
        """Return whether frames between two peers are held back now."""
        return frozenset((a, b)) in self._cut or a in self._stopped or b in self._stopped

    async def until_heard(self, a: PeerId, b: PeerId) -> None:
        """Wait until frames between two peers are delivered again."""
        while self.is_silent(a, b):
            await self._changed.wait()

    def draw_latency(self, sender: PeerId, receiver: PeerId) -> float:
        """Return the seconds that the next frame takes."""
        pair = (sender, receiver)
        if pair not in self._latencies:
            self._latencies[pair] = random.Random(f"{self._seed}/{sender}/{receiver}")
        drawn = self._latencies[pair].uniform(*self._latency)
        for end in pair:
            if end in self._delays:
                drawn = max(drawn, self._latencies[pair].uniform(*self._delays[end]))
        return drawn

    async def round_trip(self, a: PeerId, b: PeerId) -> None:
        """Wait for as long as one frame from ``a`` to ``b`` and its answer take."""
        for one, other in ((a, b), (b, a)):
            await trio.sleep(self.draw_latency(one, other))
            await self.until_heard(one, other)


# The addresses of the peers of a simulated network.


class Locations:
    """Gives each peer one address, at the first question about it, and keeps it."""

    def __init__(self) -> None:
        self._known: dict[PeerId, str] = {}
        self._peers: dict[str, PeerId] = {}

    def of(self, peer_id: PeerId) -> str:
        """Return the address of a peer, without its id."""
        if peer_id not in self._known:
            number = len(self._known) + 1
            location = f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4001"
            self._known[peer_id], self._peers[location] = location, peer_id
        return self._known[peer_id]

    def peer_at(self, location: str) -> PeerId | None:
        """Return the peer to which an address was given; ``None`` if no peer has it."""
        return self._peers.get(location)

    def host_of(self, peer_id: PeerId) -> str:
        """Return the IP address from which a peer's connections come."""
        return self.of(peer_id).split("/")[2]


logger = logging.getLogger(__name__)

# The header of yamux, and the limit of inbound streams that p2pavg.net.libp2p sets.
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
        first_stream_id: id of the first stream that this end opens; each further one has an id higher by 2.
        locations: the addresses of the network.
        on_close: called once, when this end closes.
        relay: the peer through which the connection leads; ``None`` if it is direct.
    """

    outgoing: Wire
    incoming: Wire
    other: End

    def __init__(
        self,
        machine: Machine,
        remote: PeerId,
        first_stream_id: int,
        locations: Locations,
        on_close: Callable[[End], None],
        relay: Machine | None = None,
    ) -> None:
        self.machine = machine
        self.remote = remote
        self._locations = locations
        self._on_close = on_close
        self._relay = relay
        self.streams: dict[int, MemoryStream] = {}
        self.inbound_streams = 0
        self.closed = False
        self._next_stream_id = first_stream_id

    @property
    def remote_host(self) -> str:
        """The IP address of the other peer, or of the relay."""
        return self._locations.host_of(self.remote if self._relay is None else self._relay.peer_id)

    @property
    def relayed(self) -> bool:
        """True if the connection leads through a relay."""
        return self._relay is not None

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
