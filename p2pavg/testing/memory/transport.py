"""The transport of one peer of the simulated network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import trio

from p2pavg.errors import AddressError, ClosedError, RefusedError, UnreachableError
from p2pavg.net.addresses import parse_address_of, parse_peer_address, with_peer_id
from p2pavg.net.dialling import Dialler
from p2pavg.net.transport import PeerId, Stream, StreamHandler, Transport
from p2pavg.testing.memory.connection import End, Wire

if TYPE_CHECKING:
    from p2pavg.testing.memory.network import MemoryNetwork

Inbound = Literal["accepted", "refused", "dropped"]
"""The fate of dials to a peer: accepted, refused at once, or never answered, as behind a home router."""


class MemoryTransport(Transport):
    """The transport of one simulated peer, made by :meth:`MemoryNetwork.transport`, which owns its tasks."""

    def __init__(
        self, network: MemoryNetwork, peer_id: PeerId, nursery: trio.Nursery, bandwidth: float | None
    ) -> None:
        self.peer_id = peer_id
        self.inbound: Inbound = "accepted"
        self.listens = True
        """True if the peer announces an address. If false, it cannot be dialled, like a peer with ``listen=[]``."""
        self.nursery = nursery
        self.handlers: dict[str, StreamHandler] = {}
        self._network = network
        self.bandwidth = bandwidth
        self._sending_until = 0.0
        self._ends: dict[PeerId, list[End]] = {}
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
        found = self._network.listener_at(location)
        if found is not None and found.inbound == "dropped":
            await trio.sleep_forever()
        listener = found.peer_id if found is not None else location
        await self._network.links.round_trip(self.peer_id, listener)  # of TCP
        self._taking_dials(peer_id, location)
        await self._network.links.round_trip(self.peer_id, listener)  # of Noise
        answering = self._taking_dials(peer_id, location)
        if answering.peer_id != peer_id:
            raise UnreachableError(f"another peer answered: {answering.peer_id}")
        self._connect(answering)

    def _taking_dials(self, peer_id: PeerId, location: str) -> MemoryTransport:
        try:
            return self._network.taking_dials(location)
        except RefusedError as error:
            if peer_id in self._met:
                raise
            raise UnreachableError(str(error)) from None

    def _connect(self, listener: MemoryTransport) -> None:
        near, far = End(self, listener.peer_id, 1), End(listener, self.peer_id, 2)
        near.other, far.other = far, near
        near.outgoing = far.incoming = Wire(self._network.links, self, listener)
        near.incoming = far.outgoing = Wire(self._network.links, listener, self)
        for end in (near, far):
            end.owner._met.add(end.remote)
            end.owner._ends.setdefault(end.remote, []).append(end)
            end.owner.nursery.start_soon(end.incoming.run)
            end.owner._dialler.something_changed()

    def host_of(self, peer_id: PeerId) -> str:
        """Return the IP address from which a peer's connections come."""
        return self._network._location(peer_id).split("/")[2]

    def forget(self, end: End) -> None:
        """Forget a connection whose end has closed."""
        self._ends[end.remote].remove(end)
        if not self._ends[end.remote]:
            del self._ends[end.remote]

    def time_to_send(self, size: int) -> float:
        """Return the moment at which ``size`` more bytes have left this peer."""
        start = max(self._sending_until, trio.current_time())
        self._sending_until = start + (size / self.bandwidth if self.bandwidth is not None else 0.0)
        return self._sending_until

    def start_soon(self, work: Callable[[], object]) -> None:
        """Start a task of this peer, unless the peer has left."""
        if not self.closed:
            self.nursery.start_soon(work)  # type: ignore[arg-type]

    @contextmanager
    def among_served(self, scope: trio.CancelScope) -> Iterator[None]:
        """Let a crash cancel ``scope`` for as long as the block runs."""
        self._served.add(scope)
        try:
            yield
        finally:
            self._served.discard(scope)

    def ends(self, peer_id: PeerId) -> list[End]:
        """Return this peer's ends of its connections with another peer."""
        return self._ends.get(peer_id, [])

    def _all_ends(self) -> list[End]:
        return [end for ends in self._ends.values() for end in ends]

    def close(self) -> None:
        """Leave the network: close every connection."""
        self.closed = True
        for end in self._all_ends():
            end.hang_up()

    def crash(self) -> None:
        """Break every connection and cancel every handler, as the kill of a process does."""
        self.crashed.set()
        for scope in self._served:
            scope.cancel()
        for end in self._all_ends():
            end.close("this peer has crashed")
            broken = partial(end.other.close, f"{self.peer_id} is gone")
            if self._network.links.is_silent(self.peer_id, end.remote):
                end.outgoing.failure = broken
                end.outgoing.send(0, broken)
            else:
                broken()
