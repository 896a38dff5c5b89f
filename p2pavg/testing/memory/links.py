"""The links between the peers of a simulated network: their latencies, cuts and stops."""

from __future__ import annotations

import random

import trio

from p2pavg.net.transport import PeerId


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
