"""The simulated network: its peers, their transports, and the faults that a test causes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from typing import Literal

import trio

from p2pavg.base.errors import AddressError, ClosedError, RefusedError, UnreachableError
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.group.milestones import Milestone
from p2pavg.group.reach import Reach, is_direct
from p2pavg.net.addresses import (
    CircuitAddress,
    is_circuit,
    parse_address_of,
    parse_circuit_address,
    parse_peer_address,
    with_peer_id,
)
from p2pavg.net.dialling import Dialler, timed_out
from p2pavg.net.nat.reach.reachability import Kind, Reachability
from p2pavg.net.transport import PeerId, Stream, StreamHandler, Transport
from p2pavg.testing.memory.connection import End, Wire
from p2pavg.testing.memory.machine import Links, Machine
from p2pavg_dht import Signer, public_key_of

DIRECT_KINDS = frozenset(Kind) - {Kind.PUNCHABLE, Kind.RELAYED}
"""The kinds of peers that others can dial."""


def reach_of(kind: Kind) -> Reach:
    """Return the reach of a peer of some kind."""
    if kind in DIRECT_KINDS:
        return Reach.DIALABLE
    return Reach.PUNCHABLE if kind is Kind.PUNCHABLE else Reach.RELAYED


Inbound = Literal["accepted", "refused", "dropped"]
"""The fate of dials to a peer: accepted, refused at once, or never answered, as behind a home router."""


class MemoryTransport(Transport):
    """The transport of one simulated peer, made by :meth:`MemoryNetwork.transport`, which owns its tasks.

    Args:
        machine: the peer's machine.
        network: the network.
        inbound: the fate of dials to it.
        kind: its reachability.
        relays: the peers that relay for it, while they are in the network.
    """

    def __init__(
        self, machine: Machine, network: MemoryNetwork, inbound: Inbound, kind: Kind, relays: Sequence[PeerId]
    ) -> None:
        self.peer_id = machine.peer_id
        self.machine = machine
        self.inbound = inbound
        self.listens = True
        """True if the peer announces an address. If false, it cannot be dialled, like a peer with ``listen=[]``."""
        self.kind = kind
        """The kind of reachability of this peer. It applies to the next dials."""
        self.relays = tuple(relays)
        """The peers that relay for this one."""
        self.network = network
        self._ends: dict[PeerId, list[End]] = {}
        self._met: set[PeerId] = set()
        self._circuits: set[End] = set()
        """One end of each connection of others that this peer relays."""
        self.relays_no_more = False
        """True if this peer relays no further connections."""
        self._dialler = Dialler(machine.nursery, self)
        self.crashed = trio.Event()
        """Set by :meth:`MemoryNetwork.crash`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        if self.reachability.dialable:
            return with_peer_id(
                [self.network.location_of(self.peer_id)] if self.listens else [], self.peer_id
            )
        return tuple(
            str(CircuitAddress(relay.addresses[0], relay.peer_id, self.peer_id)) for relay in self._relaying()
        )

    @property
    def reachability(self) -> Reachability:
        relays = tuple(relay.peer_id for relay in self._relaying())
        return Reachability(kind=self.kind, sentence=f"simulated: {self.kind}", relays=relays)

    def _relaying(self) -> list[MemoryTransport]:
        """Return the peers that relay for this one now."""
        found = (self.network.listener_at(self.network.location_of(relay)) for relay in self.relays)
        return [
            relay for relay in found if relay is not None and relay.kind in DIRECT_KINDS and relay.listens
        ]

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        self.machine.handlers[protocol] = handler

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
        failed: list[str] = []
        with trio.move_on_after(timeout):
            await self._dialler.connect(peer_id, addresses, wait_inbound=wait_inbound, failed=failed)
            stream = self._ends[peer_id][0].open_stream(protocol)
            try:
                await stream.until_opened()
            except trio.Cancelled:
                await stream.reset()
                raise
            return stream
        raise timed_out(f"stream to {peer_id}", timeout, failed)

    def is_connected(self, peer_id: PeerId) -> bool:
        return peer_id in self._ends

    def watching_connections(self, connected: Callable[[PeerId], None]) -> AbstractContextManager[None]:
        return self._dialler.watching(connected)

    async def disconnect(self, peer_id: PeerId) -> None:
        for end in self._ends.get(peer_id, [])[:]:
            end.hang_up()

    def _check_open(self) -> None:
        if self.machine.has_left:
            raise ClosedError("the transport is closed")
        if self.crashed.is_set():
            raise UnreachableError("this peer has crashed")

    async def dial_one(self, peer_id: PeerId, address: str) -> None:
        parse_address_of(peer_id, address)
        if is_circuit(address):
            await self._dial_through_relay(parse_circuit_address(address))
            return
        location = address.partition("/p2p/")[0]
        found = self.network.listener_at(location)
        if found is not None and (found.inbound == "dropped" or found.kind not in DIRECT_KINDS):
            await trio.sleep_forever()
        listener = found.peer_id if found is not None else location
        await self.network.round_trip(self.peer_id, listener)  # of TCP
        self._taking_dials(peer_id, location)
        await self.network.round_trip(self.peer_id, listener)  # of Noise
        answering = self._taking_dials(peer_id, location)
        if answering.peer_id != peer_id:
            raise UnreachableError(f"another peer answered: {answering.peer_id}")
        self._connect(answering)

    def _taking_dials(self, peer_id: PeerId, location: str) -> MemoryTransport:
        """Return the peer that takes dials at an address.

        Raises:
            RefusedError: no peer listens there any more.
            UnreachableError: no peer listens there, or the peer's router refuses dials.
        """
        found = self.network.listener_at(location)
        if found is None or not found.listens:
            refusal = RefusedError if peer_id in self._met else UnreachableError
            raise refusal("connection refused")
        if found.inbound != "accepted":
            raise UnreachableError("connection refused by a router")
        return found

    async def _dial_through_relay(self, circuit: CircuitAddress) -> None:
        """Connect to a peer behind a relay.

        As on the real network, a pair that can connect directly does so when the relay has brought it together: the
        peer dials back, or both punch. Here this costs another round trip, and there is no relayed connection before.
        """
        if circuit.relay != self.peer_id:
            await self.network.round_trip(self.peer_id, circuit.relay)
        await self.network.round_trip(circuit.relay, circuit.target)
        relay, target = self._ends_of_circuit(circuit)
        if not (is_direct(reach_of(self.kind), reach_of(target.kind)) or relay is self):
            self._connect(target, relay)
            return
        await self.network.round_trip(self.peer_id, circuit.target)
        self._connect(self._ends_of_circuit(circuit)[1])

    def _ends_of_circuit(self, circuit: CircuitAddress) -> tuple[MemoryTransport, MemoryTransport]:
        relay = self.network.listener_at(circuit.relay_address.partition("/p2p/")[0])
        if relay is None or relay.peer_id != circuit.relay:
            raise UnreachableError(f"the relay {circuit.relay} was not reached")
        target = self.network.listener_at(self.network.location_of(circuit.target))
        if target is None or relay not in target._relaying():
            raise UnreachableError("the relay gives no circuit: there is no reservation")
        if relay.relays_no_more:
            raise UnreachableError("the relay gives no circuit: there are too many")
        return relay, target

    def _connect(self, listener: MemoryTransport, relay: MemoryTransport | None = None) -> None:
        through = None if relay is None else relay.machine
        near, far = self._end(listener.peer_id, 1, through), listener._end(self.peer_id, 2, through)
        near.other, far.other = far, near
        near.outgoing = far.incoming = Wire(self.network, self.machine, listener.machine, through)
        near.incoming = far.outgoing = Wire(self.network, listener.machine, self.machine, through)
        self._add(near)
        listener._add(far)
        if relay is not None:
            relay._circuits = {end for end in relay._circuits if not end.closed} | {near}

    def _end(self, remote: PeerId, first_stream_id: int, relay: Machine | None) -> End:
        host = self.network.host_of(remote if relay is None else relay.peer_id)
        return End(self.machine, remote, host, relay is not None, first_stream_id, self._forget)

    def _add(self, end: End) -> None:
        self._met.add(end.remote)
        self._ends.setdefault(end.remote, []).append(end)
        self.machine.nursery.start_soon(end.incoming.run)
        self._dialler.connected(end.remote)

    def _forget(self, end: End) -> None:
        self._ends[end.remote].remove(end)
        if not self._ends[end.remote]:
            del self._ends[end.remote]

    def ends(self, peer_id: PeerId) -> list[End]:
        """Return this peer's ends of its connections with another peer."""
        return self._ends.get(peer_id, [])

    def _all_ends(self) -> list[End]:
        return [end for ends in self._ends.values() for end in ends]

    def _break_circuits(self) -> None:
        """Break every connection that this peer relays, at both ends."""
        for end in self._circuits:
            for each in (end, end.other):
                each.close("the relay has gone")
        self._circuits.clear()

    def close(self) -> None:
        """Leave the network: close every connection."""
        self.machine.has_left = True
        self._break_circuits()
        for end in self._all_ends():
            end.hang_up()

    def crash(self) -> None:
        """Break every connection and cancel every handler, as the kill of a process does."""
        self.crashed.set()
        self.machine.stop_serving()
        self._break_circuits()
        for end in self._all_ends():
            end.close("this peer has crashed")
            broken = partial(end.other.close, f"{self.peer_id} is gone")
            if end.outgoing.is_silent():
                end.outgoing.failure = broken
                end.outgoing.send(0, broken)
            else:
                broken()


RELAYING = 10e6 / 8
"""Bytes/s that a peer relays for others: 10 Mbit/s, as in the real network."""


class MemoryNetwork(Links):
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
        super().__init__(seed, latency)
        for name, limit in (("bandwidth", bandwidth), ("download", download), ("relaying", relaying)):
            if limit is not None and not limit > 0.0:
                raise ValueError(f"{name} is bytes per second, not {limit}")
        self._bandwidth = bandwidth
        self._download = download
        self._relaying = relaying
        self._peers: dict[PeerId, MemoryTransport] = {}
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
                transport = MemoryTransport(machine, self, inbound, kind, relays)
                self._peers[peer_id] = transport
                try:
                    yield transport
                finally:
                    self._leave(transport)
                    nursery.cancel_scope.cancel()

    def has(self, peer_id: PeerId) -> bool:
        """Return whether a peer is in the network and has not crashed."""
        return peer_id in self._peers

    def refuse_circuits(self, peer_id: PeerId) -> None:
        """Let a peer relay no further connections, like a relay that is full. Those that it relays stay."""
        self._peers[peer_id].relays_no_more = True

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
        self.resume(peer_id)
        transport.crash()
        self.notify()

    def listener_at(self, location: str) -> MemoryTransport | None:
        """Return the peer at an address, if one is in the network."""
        return self._peers.get(self._owners.get(location, ""))

    def _leave(self, transport: MemoryTransport) -> None:
        if self._peers.get(transport.peer_id) is transport:
            del self._peers[transport.peer_id]
        transport.close()
