"""The transport over py-libp2p: TCP, Noise and yamux, with direct TLS lanes beside them on the same port.

Theory of operation
===================

What it guarantees:

* A stream's ``remote`` is an identity that the other side has proved in the Noise handshake.
* A fault of one peer costs that peer's stream or connection. It never ends the host, blocks other peers, or takes
  unbounded memory.
* A caller may be cancelled at any moment. Its stream may become unusable, the connection under it does not.
* Opening, writing and closing are bounded: by the caller's timeout, or by a constant of these modules. A read waits for
  as long as the connection lives.

What can happen, and the answer:

* **A caller is cancelled while a frame is being written.** Half a frame would corrupt the connection for all of its
  streams. So writes, closes and negotiations run in the transport's nursery, and the caller only waits for them. A
  write is cut into pieces, so that a cancelled caller leaves little work behind.
* **A peer stops reading.** yamux blocks that stream's writer when the window is full; other streams go on. If a piece
  cannot be written within 30 s, the transport gives the peer up and closes the connection's socket.
* **A peer answers no negotiation.** After 10 s a watchdog closes the socket. Cancelling the negotiation is not enough:
  libp2p resets the stream inside a shield, and the reset needs the stuck socket.
* **Two peers dial each other at once.** Both connections are kept. If each peer gave up its own dial in favour of the
  other's, both would be lost.
* **Strangers connect in great number.** ``admission`` finds a place for each connection or drops another one. The place
  is taken when the socket is accepted, before the handshake, and returned when the connection ends.
* **Peers announce harmful addresses.** Every dial passes the dial gate. It refuses reserved networks and private ones
  that this machine is not in, and it bounds the failed dials of each host.
* **The process forks**, for example for the workers of a DataLoader. The child closes its copies of the sockets.
  Otherwise connections that the parent closes would stay open.

Why this way:

* py-libp2p is a young implementation. We replace what is wrong instead of working around it at every call: the guards
  are subclasses and a few replaced functions, each with a test that fails without it.
* Connections are opened with libp2p's ``dial_addr``. Its ``dial_peer`` adds 0.25 s to a dial, and blacklists a peer for
  a minute after a failure. Our own dialler decides about retries.
* libp2p's identify and ping protocols are not served. Identify would write a stranger's claims into the peer store.

This module joins the parts: ``host`` builds libp2p's host, ``connections`` dials, admits and opens streams, ``stream``
carries bytes, and ``lanes`` (outside this folder) moves tensors.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager

import trio
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from p2pavg.base.errors import AddressError, ListenError, RefusedError, UnreachableError
from p2pavg.base.limits import FAREWELL_SECONDS
from p2pavg.base.threads.processor import wait_of_this_thread
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.addresses import is_circuit, parse_circuit_address, parse_listen_address, parse_peer_address
from p2pavg.net.dialling import timed_out
from p2pavg.net.keep_alive import is_acknowledged
from p2pavg.net.lanes.acceptor import TlsAcceptor
from p2pavg.net.lanes.pool import LaneKeeper
from p2pavg.net.libp2p.connections import Connections, host_of, listeners_of
from p2pavg.net.libp2p.guarded_swarm import GuardedSwarm
from p2pavg.net.libp2p.host import GuardedHost, Places, install, new_host
from p2pavg.net.libp2p.reaching import Reaching
from p2pavg.net.libp2p.sniffing import SniffingTCP, accept_more_at_once
from p2pavg.net.libp2p.speed import install as install_speed
from p2pavg.net.libp2p.stream import Libp2pStream, Lifetime, is_of_the_network
from p2pavg.net.limits.admission import ConnectionLimits
from p2pavg.net.nat.reach.options import ReachOptions
from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.net.transport import DirectLane, LaneHost, PeerId, Stream, StreamHandler, Transport


def check_free(address: Multiaddr) -> None:
    """Raise ListenError if another socket listens at an address.

    libp2p listens with SO_REUSEPORT. On a port that another of its hosts holds, each of the two would get half of the
    peers.
    """
    family = socket.AF_INET if "ip4" in address else socket.AF_INET6
    port = int(str(address.value_for_protocol("tcp")))
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host_of(address), port))
            probe.listen(1)
        except OSError as error:
            raise ListenError(f"cannot listen on {address}: {error.strerror}") from None


logger = logging.getLogger(__name__)


class Libp2pTransport(Transport):
    """The transport over libp2p, made by :func:`open_libp2p_transport`, which owns its tasks."""

    def __init__(
        self,
        host: GuardedHost,
        swarm: GuardedSwarm,
        tcp: SniffingTCP,
        nursery: trio.Nursery,
        places: Places,
        options: ReachOptions,
    ) -> None:
        self._host = host
        self._swarm = swarm
        self._tcp = tcp
        self._lifetime = Lifetime(nursery)
        self.peer_id = str(host.get_id())
        self._connections = Connections(self, host, swarm, self._lifetime, places)
        # Before anything can dial: a peer that averages only with processes of this machine must dial no other one.
        self._connections.gate.policy.only_here = options.only_here
        doorway = TlsAcceptor(self.peer_id, self._connections.gate)
        # Set before the port is open, since strangers may connect at once.
        tcp.on_tls = doorway.accept
        self._reaching = Reaching(self, self._connections, nursery, options)
        tcp.on_whoami = self._reaching.whoami.answer
        self._lanes = LaneKeeper(
            self,
            nursery,
            doorway,
            self._connections.dialled_addresses,
            places.lanes,
            self._reaching.puncher,
            wait_of_this_thread(),
        )
        _transports.add(self)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._reaching.addresses

    @property
    def reachability(self) -> Reachability:
        return self._reaching.reachability

    @property
    def relayed_bytes(self) -> int:
        return self._reaching.relay.budget.carried

    async def settle(self) -> None:
        await self._reaching.settle()

    def path_to(self, peer_id: PeerId) -> str:
        """Return how streams to a peer travel now: ``direct``, ``punched``, ``relayed``, or empty if not at all."""
        return self._reaching.path_to(peer_id)

    def watching_connections(self, connected: Callable[[PeerId], None]) -> AbstractContextManager[None]:
        return self._connections.dialler.watching(connected)

    def remember_peer(self, peer_id: PeerId, *, companion: bool = False) -> None:
        self._connections.remember(peer_id, companion=companion)

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def serve_one(net_stream: NetStream) -> None:
            stream = Libp2pStream(net_stream, self._lifetime)
            try:
                await handler(stream)
            except Exception as error:
                # A peer that leaves, or sends nonsense, is no bug of this process, so it is not logged as one.
                if is_of_the_network(error):
                    raise
                logger.exception(
                    "serving %s to %s failed; only this stream of it is reset", protocol, stream.remote
                )
            finally:
                # Also after a handler that returned: whatever it has left open, the peer must not wait for it.
                await stream.reset()

        self._host.set_stream_handler(TProtocol(protocol), serve_one)  # type: ignore[arg-type]

    async def dial(self, address: str, *, timeout: float) -> PeerId:
        _, peer_id = parse_peer_address(address)
        if peer_id == self.peer_id:
            raise AddressError(f"{address} is this peer itself")
        self._lifetime.check()
        # The user named the relay's address, and not where the peer behind it is.
        dialled = parse_circuit_address(address).relay_address if is_circuit(address) else address
        self._connections.gate.trust_address(dialled)
        # Before the dial: the new connection gets its place by the standing of its peer.
        self.remember_peer(peer_id, companion=True)
        with trio.move_on_after(timeout):
            await self._connections.dialler.connect(peer_id, [address])
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
        self._lifetime.check()
        failed: list[str] = []
        with trio.move_on_after(timeout):
            ordered = self._connections.relays.ordered(addresses, trio.current_time())
            await self._connections.dialler.connect(
                peer_id, ordered, wait_inbound=wait_inbound, failed=failed
            )
            # Noted before the stream is opened, to tell afterwards whether one of these has just ended.
            used = self._connections.to(peer_id)
            try:
                return await self._connections.open_stream(peer_id, protocol)
            except UnreachableError as error:
                # A connection that still works has given the peer's answer, so a second try would give the same one.
                if not await self._connections.one_was_ended(used):
                    raise
                first = error
            # The other end has closed a connection just now. That says nothing of the peer: on a busy machine, it may
            # end a connection whose handshake took too long, when this end believes that it works already.
            logger.debug("connecting to %s once more: %s", peer_id, first)
            self._lifetime.check()
            try:
                await self._connections.dialler.connect(
                    peer_id, ordered, wait_inbound=wait_inbound, failed=failed
                )
            # Kept as it is: callers take it as proof that the peer's process has ended.
            except RefusedError:
                raise
            except UnreachableError as error:
                raise UnreachableError(f"{first}; then {error}") from None
            return await self._connections.open_stream(peer_id, protocol)
        raise timed_out(f"stream to {peer_id}", timeout, failed)

    def is_connected(self, peer_id: PeerId) -> bool:
        return self._connections.is_connected(peer_id)

    def answers(self, peer_id: PeerId, seconds: float) -> bool:
        sockets = [muxed.socket for muxed in self._connections.of(peer_id)]
        return any(each is not None and is_acknowledged(each, seconds) for each in sockets)

    async def disconnect(self, peer_id: PeerId) -> None:
        await self._connections.disconnect(peer_id)

    def serve_lanes(self, host: LaneHost) -> None:
        self._lanes.serve(host)

    async def open_lane(
        self, peer_id: PeerId, *, addresses: Sequence[str] = (), timeout: float
    ) -> DirectLane:
        return await self._lanes.open(peer_id, addresses, timeout)

    def keep_lane(self, lane: DirectLane) -> None:
        self._lanes.keep(lane)

    def sockets(self) -> list[trio.socket.SocketType]:
        """Return the sockets of the listeners and the connections, without those of lanes."""
        listeners = [found for opened in listeners_of(self._swarm) for found in opened.listeners]
        # Those whose first byte has not come yet belong to no connection so far, but are open.
        return [found.socket for found in listeners] + self._connections.sockets() + self._tcp.undecided

    def detach_all(self) -> list[int]:
        """Detach every socket from this copy of the transport, and return the descriptors."""
        found = [opened.detach() for opened in self.sockets()] + [lane.detach() for lane in self._lanes.lanes]
        return [descriptor for descriptor in found if descriptor >= 0]

    async def _listen(self, addresses: Sequence[Multiaddr]) -> None:
        await self._swarm.listen(*addresses)
        for address in addresses:
            # libp2p does not raise when it cannot bind. It leaves the address out.
            if str(address) not in self._swarm.listeners:
                raise ListenError(f"cannot listen on {address}: the system refused it")
            self._connections.gate.listens_at(host_of(address))
        for listener in listeners_of(self._swarm):
            accept_more_at_once(listener)
        self._connections.listens = True
        self._reaching.start()

    async def _close(self) -> None:
        # Nothing that makes connections may run while they are closed.
        await self._reaching.stop()
        self._lanes.close()
        await self._connections.close_all()
        with trio.move_on_after(FAREWELL_SECONDS):
            await self._host.close()


@asynccontextmanager
async def open_libp2p_transport(
    *,
    seed: bytes,
    listen: Sequence[str],
    limits: ConnectionLimits | None = None,
    options: ReachOptions | None = None,
) -> AsyncIterator[Libp2pTransport]:
    """Listen on ``listen`` and connect to other peers for as long as the block runs.

    Args:
        seed: the 32 bytes of an Ed25519 private key.
        listen: addresses such as ``/ip4/0.0.0.0/tcp/0``; an empty list makes a peer that only dials.
        limits: the limits of connections, which are reduced if the operating system lets this process open few files.
        options: how the peer is reached, and what it does for others.

    Raises:
        AddressError: a text in ``listen`` is not an address to listen on.
        ListenError: an address cannot be listened on; the message says which and why.
    """
    wanted = [parse_listen_address(text) for text in listen]
    # libp2p would share a port that another process holds, and each of the two would get half of the peers.
    for address in wanted:
        check_free(address)
    install()
    install_speed()
    places = Places(limits or ConnectionLimits())
    tcp = SniffingTCP(places.entrance)
    host, swarm = new_host(seed, tcp)
    with bare_exceptions():
        async with background_trio_service(swarm), trio.open_nursery() as nursery:
            transport = Libp2pTransport(host, swarm, tcp, nursery, places, options or ReachOptions())
            try:
                await transport._listen(wanted)
                yield transport
            finally:
                # Other peers have to see the end of the connections, also if the
                # program was cancelled. Each step has a bound.
                with trio.CancelScope(shield=True):
                    await transport._close()
                # Last: writes and closes run in this nursery.
                transport._lifetime.end()


_transports: weakref.WeakSet[Libp2pTransport] = weakref.WeakSet()


def _close_sockets_after_fork() -> None:
    """Close the sockets that a forked child has inherited, e.g. a worker of a DataLoader.

    The child's copies would keep open what the parent closes.
    """
    for transport in _transports:
        # Only the descriptors are closed. The objects belong to a trio run, and to
        # locks of threads, that the child does not have.
        for descriptor in transport.detach_all():
            os.close(descriptor)
    _transports.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_sockets_after_fork)
