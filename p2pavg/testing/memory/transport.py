"""The transport of one peer of the simulated network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import trio

from p2pavg.base.errors import AddressError, ClosedError, RefusedError, UnreachableError
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
from p2pavg.testing.memory.connection import End, Links, Locations, Wire
from p2pavg.testing.memory.machine import Machine

# Circuits of a simulated network: the peers that relay for others, and the connections that break with them.

DIRECT_KINDS = frozenset(Kind) - {Kind.PUNCHABLE, Kind.RELAYED}
"""The kinds of peers that others can dial."""


def reach_of(kind: Kind) -> Reach:
    """Return the reach of a peer of some kind."""
    if kind in DIRECT_KINDS:
        return Reach.DIALABLE
    return Reach.PUNCHABLE if kind is Kind.PUNCHABLE else Reach.RELAYED


class Circuits:
    """The connections of others that one peer relays."""

    def __init__(self) -> None:
        self._ends: set[End] = set()  # one end of each
        self.full = False
        """True if this peer relays no more connections."""

    def add(self, end: End) -> None:
        """Relay a connection, and forget those that have closed."""
        self._ends = {known for known in self._ends if not known.closed} | {end}

    def break_all(self) -> None:
        """Break every connection that this peer relays, at both ends."""
        for end in self._ends:
            for each in (end, end.other):
                each.close("the relay has gone")
        self._ends.clear()


Inbound = Literal["accepted", "refused", "dropped"]
"""The fate of dials to a peer: accepted, refused at once, or never answered, as behind a home router."""


class MemoryTransport(Transport):
    """The transport of one simulated peer, made by :meth:`MemoryNetwork.transport`, which owns its tasks.

    Args:
        machine: the peer's machine.
        links: the links of the network.
        locations: its addresses.
        kind: its reachability.
        relays: the peers that relay for it, while they are in the network.
        listener_at: returns the peer at an address, if one is in the network.
    """

    def __init__(
        self,
        machine: Machine,
        links: Links,
        locations: Locations,
        listener_at: Callable[[str], MemoryTransport | None],
        *,
        kind: Kind = Kind.UNKNOWN,
        relays: Sequence[PeerId] = (),
    ) -> None:
        self.peer_id = machine.peer_id
        self.machine = machine
        self.inbound: Inbound = "accepted"
        self.listens = True
        """True if the peer announces an address. If false, it cannot be dialled, like a peer with ``listen=[]``."""
        self.kind = kind
        """The kind of reachability of this peer. It applies to the next dials."""
        self.relays = tuple(relays)
        """The peers that relay for this one."""
        self._links = links
        self._locations = locations
        self._listener_at = listener_at
        self._ends: dict[PeerId, list[End]] = {}
        self._met: set[PeerId] = set()
        self.circuits = Circuits()
        self._dialler = Dialler(machine.nursery, self.is_connected, self._dial_one)
        self.crashed = trio.Event()
        """Set by :meth:`MemoryNetwork.crash`."""

    @property
    def addresses(self) -> tuple[str, ...]:
        if self.reachability.dialable:
            return with_peer_id([self._locations.of(self.peer_id)] if self.listens else [], self.peer_id)
        return tuple(
            str(CircuitAddress(relay.addresses[0], relay.peer_id, self.peer_id)) for relay in self._relaying()
        )

    @property
    def reachability(self) -> Reachability:
        relays = tuple(relay.peer_id for relay in self._relaying())
        return Reachability(kind=self.kind, sentence=f"simulated: {self.kind}", relays=relays)

    def _relaying(self) -> list[MemoryTransport]:
        """Return the peers that relay for this one now."""
        found = (self._listener_at(self._locations.of(relay)) for relay in self.relays)
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

    def watch_connections(self, connected: Callable[[PeerId], None]) -> None:
        self._dialler.watchers.append(connected)

    def unwatch_connections(self, connected: Callable[[PeerId], None]) -> None:
        self._dialler.watchers.remove(connected)

    async def disconnect(self, peer_id: PeerId) -> None:
        for end in self._ends.get(peer_id, [])[:]:
            end.hang_up()

    def _check_open(self) -> None:
        if self.machine.has_left:
            raise ClosedError("the transport is closed")
        if self.crashed.is_set():
            raise UnreachableError("this peer has crashed")

    async def _dial_one(self, peer_id: PeerId, text: str) -> None:
        parse_address_of(peer_id, text)
        if is_circuit(text):
            await self._dial_through_relay(parse_circuit_address(text))
            return
        location = text.partition("/p2p/")[0]
        found = self._listener_at(location)
        if found is not None and (found.inbound == "dropped" or found.kind not in DIRECT_KINDS):
            await trio.sleep_forever()
        listener = found.peer_id if found is not None else location
        await self._links.round_trip(self.peer_id, listener)  # of TCP
        self._taking_dials(peer_id, location)
        await self._links.round_trip(self.peer_id, listener)  # of Noise
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
        found = self._listener_at(location)
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
            await self._links.round_trip(self.peer_id, circuit.relay)
        await self._links.round_trip(circuit.relay, circuit.target)
        relay, target = self._ends_of_circuit(circuit)
        if not (is_direct(reach_of(self.kind), reach_of(target.kind)) or relay is self):
            self._connect(target, relay)
            return
        await self._links.round_trip(self.peer_id, circuit.target)
        self._connect(self._ends_of_circuit(circuit)[1])

    def _ends_of_circuit(self, circuit: CircuitAddress) -> tuple[MemoryTransport, MemoryTransport]:
        relay = self._listener_at(circuit.relay_address.partition("/p2p/")[0])
        if relay is None or relay.peer_id != circuit.relay:
            raise UnreachableError(f"the relay {circuit.relay} was not reached")
        target = self._listener_at(self._locations.of(circuit.target))
        if target is None or relay not in target._relaying():
            raise UnreachableError("the relay gives no circuit: there is no reservation")
        if relay.circuits.full:
            raise UnreachableError("the relay gives no circuit: there are too many")
        return relay, target

    def _connect(self, listener: MemoryTransport, relay: MemoryTransport | None = None) -> None:
        through = None if relay is None else relay.machine
        near, far = self._end(listener.peer_id, 1, through), listener._end(self.peer_id, 2, through)
        near.other, far.other = far, near
        near.outgoing = far.incoming = Wire(self._links, self.machine, listener.machine, through)
        near.incoming = far.outgoing = Wire(self._links, listener.machine, self.machine, through)
        self._add(near)
        listener._add(far)
        if relay is not None:
            relay.circuits.add(near)

    def _end(self, remote: PeerId, first_stream_id: int, relay: Machine | None) -> End:
        return End(self.machine, remote, first_stream_id, self._locations, self._forget, relay)

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

    def close(self) -> None:
        """Leave the network: close every connection."""
        self.machine.has_left = True
        self.circuits.break_all()
        for end in self._all_ends():
            end.hang_up()

    def crash(self) -> None:
        """Break every connection and cancel every handler, as the kill of a process does."""
        self.crashed.set()
        self.machine.stop_serving()
        self.circuits.break_all()
        for end in self._all_ends():
            end.close("this peer has crashed")
            broken = partial(end.other.close, f"{self.peer_id} is gone")
            if end.outgoing.is_silent():
                end.outgoing.failure = broken
                end.outgoing.send(0, broken)
            else:
                broken()
