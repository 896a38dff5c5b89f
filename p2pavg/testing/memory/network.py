"""The simulated network: its peers, and the faults that a test causes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.group.milestones import Milestone
from p2pavg.net.nat.reach.reachability import Kind
from p2pavg.net.transport import PeerId
from p2pavg.testing.memory.connection import Links, Locations
from p2pavg.testing.memory.machine import Machine
from p2pavg.testing.memory.transport import Inbound, MemoryTransport
from p2pavg_dht import Signer, public_key_of

RELAYING = 10e6 / 8
"""Bytes/s that a peer relays for others: 10 Mbit/s, as in the real network."""


class MemoryNetwork:
    """Peers in one process, and the links between them.

    Every fault is a plain call, valid at any moment and from any task of the same trio run: :meth:`cut` and
    :meth:`heal`, :meth:`stop` and :meth:`resume`, :meth:`crash`, :meth:`disconnect`, :meth:`limit`, :meth:`delay`, and
    ``transport.inbound``. :class:`~p2pavg.testing.FaultPlan` calls them according to a plan.

    Args:
        seed: determines the latencies.
        latency: seconds that a frame takes one way, drawn evenly from this range.
        bandwidth: bytes/s that a peer sends, over all its connections together; ``None`` is without limit.
        download: bytes/s that a peer receives, over all its connections together; ``None`` is without limit.
        relaying: bytes/s that a peer relays for others, in both directions together; ``None`` is without limit.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        latency: tuple[float, float] = (0.01, 0.05),
        bandwidth: float | None = None,
        download: float | None = None,
        relaying: float | None = RELAYING,
    ) -> None:
        self.links = Links(seed, latency)
        for name, limit in (("bandwidth", bandwidth), ("download", download), ("relaying", relaying)):
            if limit is not None and not limit > 0.0:
                raise ValueError(f"{name} is bytes per second, not {limit}")
        self._bandwidth = bandwidth
        self._download = download
        self._relaying = relaying
        self._peers: dict[PeerId, MemoryTransport] = {}
        self._locations = Locations()
        self.watchers: list[Callable[[PeerId, Milestone], None]] = []
        """Functions that are called when a simulated peer of this network reaches a milestone of its round."""

    @asynccontextmanager
    async def transport(
        self,
        peer: PeerId | Signer,
        *,
        bandwidth: float | None = None,
        download: float | None = None,
        inbound: Inbound = "accepted",
        kind: Kind = Kind.UNKNOWN,
        relays: Sequence[PeerId] = (),
    ) -> AsyncIterator[MemoryTransport]:
        """Add a peer to the network for as long as the block runs. A peer that returns keeps its address.

        Args:
            peer: its id, or a signer that holds the id.
            bandwidth: bytes/s that this peer sends; ``None`` takes the network's.
            download: bytes/s that this peer receives; ``None`` takes the network's.
            inbound: the fate of dials to this peer; it can be set on the transport later.
            kind: its reachability. Peers that are punchable or relayed announce the addresses of their relays, and
                dials to their own address are never answered. Two of them connect through a relay, unless both are
                punchable.
            relays: the peers that relay for it, while they are in the network.

        Raises:
            ValueError: the peer is in the network already, or the text is not a peer id.
        """
        peer_id = peer if isinstance(peer, str) else peer.peer_id
        public_key_of(peer_id)
        if peer_id in self._peers:
            raise ValueError(f"{peer_id} is in the network already")
        with bare_exceptions():
            async with trio.open_nursery() as nursery:
                machine = Machine(
                    peer_id, nursery, bandwidth or self._bandwidth, download or self._download, self._relaying
                )
                transport = MemoryTransport(
                    machine, self.links, self._locations, self._listener_at, kind=kind, relays=relays
                )
                transport.inbound = inbound
                self._peers[peer_id] = transport
                try:
                    yield transport
                finally:
                    self._leave(transport)
                    nursery.cancel_scope.cancel()

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Cut the link between two peers, like a pulled cable: nothing arrives, and neither peer is told.

        Senders block once their windows are full. Frames on their way, and frames sent during the cut, arrive in
        order after :meth:`heal`, because TCP would retransmit them.
        """
        self.links.cut(a, b)

    def heal(self, a: PeerId, b: PeerId) -> None:
        """End a :meth:`cut`."""
        self.links.heal(a, b)

    def stop(self, peer_id: PeerId) -> None:
        """Freeze a peer's traffic, like SIGSTOP: it sends and receives nothing until :meth:`resume`.

        Other peers are not told. The peer's tasks run on, but they neither observe nor change the network.
        """
        self.links.stop(peer_id)

    def resume(self, peer_id: PeerId) -> None:
        """End a :meth:`stop`; frames that were held back arrive."""
        self.links.resume(peer_id)

    def has(self, peer_id: PeerId) -> bool:
        """Return whether a peer is in the network and has not crashed."""
        return peer_id in self._peers

    def refuse_circuits(self, peer_id: PeerId) -> None:
        """Let a peer relay no further connections, like a relay that is full. Those that it relays stay."""
        self._peers[peer_id].circuits.full = True

    def bytes_relayed(self, peer_id: PeerId) -> int:
        """Return the bytes that a peer has relayed for others."""
        return self._peers[peer_id].machine.bytes_relayed

    def disconnect(self, a: PeerId, b: PeerId) -> None:
        """Break every connection between two peers at once. They may make a new one."""
        for end in list(self._peers[a].ends(b)):
            end.close("the connection was lost")
            end.other.close("the connection was lost")

    def limit(self, peer_id: PeerId, bandwidth: float | None) -> None:
        """Set the bytes/s that a peer sends from now on; ``None`` restores the network's limit."""
        self._peers[peer_id].machine.bandwidth = bandwidth or self._bandwidth

    def delay(self, peer_id: PeerId, latency: tuple[float, float] | None) -> None:
        """Set the latency of frames from and to a peer, drawn evenly; ``None`` restores the network's."""
        self.links.delay(peer_id, latency)

    def reached(self, peer_id: PeerId, milestone: Milestone) -> None:
        """Tell :attr:`watchers` that a peer has reached a milestone of its round."""
        if peer_id in self._peers:
            for watcher in self.watchers.copy():
                watcher(peer_id, milestone)

    def crash(self, peer_id: PeerId) -> None:
        """Kill a peer, like SIGKILL: its connections break, its handlers are cancelled, dials to it are refused.

        A peer behind a :meth:`cut` learns of the crash at :meth:`heal`. The crashed peer's own calls raise from now on;
        the test should end it. The same id may join again with a new transport.
        """
        transport = self._peers.pop(peer_id)
        self.links.resume(peer_id)
        transport.crash()
        self.links.notify()

    def _location(self, peer_id: PeerId) -> str:
        return self._locations.of(peer_id)

    def _listener_at(self, location: str) -> MemoryTransport | None:
        """Return the peer at an address, if one is in the network."""
        peer_id = self._locations.peer_at(location)
        return None if peer_id is None else self._peers.get(peer_id)

    def _leave(self, transport: MemoryTransport) -> None:
        if self._peers.get(transport.peer_id) is transport:
            del self._peers[transport.peer_id]
        transport.close()
