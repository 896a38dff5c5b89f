"""The links between simulated peers; and the machine of one peer: its tasks, its bandwidth, the protocols it serves."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from p2pavg.net.transport import PeerId, StreamHandler

UNSENT_BYTES = 64 * 1024
"""Bytes that a machine with a limited link buffers before senders of more have to wait. Direct lanes ask real systems
to buffer as little, and drop what they have not sent when a round begins anew."""
SMALL_BYTES = 4 * 1024
"""A smaller frame does not wait for room. Real links carry many connections side by side, and a message does not wait
until another connection has sent all that it has."""


class Links:
    """Every link of one network, with its latency, cuts and stops, and the addresses of its peers.

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
        self._locations: dict[PeerId, str] = {}
        self._owners: dict[str, PeerId] = {}

    def location_of(self, peer_id: PeerId) -> str:
        """Return the address of a peer, without its id. It gets one at the first question, and keeps it."""
        if peer_id not in self._locations:
            number = len(self._locations) + 1
            location = f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/4001"
            self._locations[peer_id], self._owners[location] = location, peer_id
        return self._locations[peer_id]

    def host_of(self, peer_id: PeerId) -> str:
        """Return the IP address from which a peer's connections come."""
        return self.location_of(peer_id).split("/")[2]

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Cut the link between two peers, like a pulled cable: nothing arrives, and neither peer is told.

        Senders block once their windows are full. Frames on their way, and frames sent during the cut, arrive in
        order after :meth:`heal`, because TCP would retransmit them.
        """
        self._cut.add(frozenset((a, b)))

    def heal(self, a: PeerId, b: PeerId) -> None:
        """End a :meth:`cut`."""
        self._cut.discard(frozenset((a, b)))
        self.notify()

    def stop(self, peer_id: PeerId) -> None:
        """Freeze a peer's traffic, like SIGSTOP: it sends and receives nothing until :meth:`resume`.

        Other peers are not told. The peer's tasks run on, but they neither observe nor change the network.
        """
        self._stopped.add(peer_id)

    def resume(self, peer_id: PeerId) -> None:
        """End a :meth:`stop`; frames that were held back arrive."""
        self._stopped.discard(peer_id)
        self.notify()

    def delay(self, peer_id: PeerId, latency: tuple[float, float] | None) -> None:
        """Set the latency of frames from and to a peer, drawn evenly; ``None`` restores the network's."""
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


class Machine:
    """Shared by a peer's transport and the connections of the peer.

    Args:
        nursery: runs the peer's tasks.
        bandwidth: bytes/s that the peer sends, over all its connections together; ``None`` is without limit.
        download: bytes/s that it receives, likewise.
        relaying: bytes/s that it relays for others, in both directions together.
    """

    def __init__(
        self,
        peer_id: PeerId,
        nursery: trio.Nursery,
        bandwidth: float | None,
        download: float | None = None,
        relaying: float | None = None,
    ) -> None:
        self.peer_id = peer_id
        self.nursery = nursery
        self.bandwidth = bandwidth
        self.download = download
        self.relaying = relaying
        self.bytes_relayed = 0
        self.handlers: dict[str, StreamHandler] = {}
        self.has_left = False
        self._sending_until = 0.0
        self._sending = trio.Lock()  # waiting senders take turns, frame by frame
        self._receiving_until = 0.0
        self._relaying_until = 0.0
        self._served: set[trio.CancelScope] = set()

    def time_to_send(self, size: int) -> float:
        """Return the moment at which ``size`` more bytes have left this peer."""
        start = max(self._sending_until, trio.current_time())
        self._sending_until = start + (size / self.bandwidth if self.bandwidth is not None else 0.0)
        return self._sending_until

    def time_to_relay(self, size: int, arrival: float) -> float:
        """Return the moment at which ``size`` bytes of others that arrive at a time have left this peer again."""
        self.bytes_relayed += size
        start = max(self._relaying_until, arrival)
        self._relaying_until = start + (size / self.relaying if self.relaying is not None else 0.0)
        return self._relaying_until

    @asynccontextmanager
    async def room_to_send(self, size: int) -> AsyncIterator[None]:
        """Wait until a frame of ``size`` bytes may be sent, in the block."""
        if self.bandwidth is None or size < SMALL_BYTES:
            yield
            return
        async with self._sending:
            await trio.sleep_until(self._sending_until - UNSENT_BYTES / self.bandwidth)
            yield

    async def receive(self, size: int) -> None:
        """Wait until ``size`` bytes that are at this peer's link have come through it.

        Frames come through in the order in which they arrive, whichever connection they belong to.
        """
        if self.download is not None:
            start = max(self._receiving_until, trio.current_time())
            self._receiving_until = start + size / self.download
            await trio.sleep_until(self._receiving_until)

    def start_soon(self, work: Callable[[], object]) -> None:
        """Start a task of this peer, unless the peer has left."""
        if not self.has_left:
            self.nursery.start_soon(work)  # type: ignore[arg-type]

    @contextmanager
    def among_served(self, scope: trio.CancelScope) -> Iterator[None]:
        """Let :meth:`stop_serving` cancel ``scope`` for as long as the block runs."""
        self._served.add(scope)
        try:
            yield
        finally:
            self._served.discard(scope)

    def stop_serving(self) -> None:
        """Cancel every handler that runs now."""
        for scope in self._served:
            scope.cancel()
