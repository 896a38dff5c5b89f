"""The libp2p connections of one transport: dialling, admission, the streams over them, and their end."""

from __future__ import annotations

import logging
import socket
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address
from typing import Protocol, cast

import trio
from libp2p.abc import INetConn
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.transport.tcp.tcp import TCPListener
from multiaddr import Multiaddr

from p2pavg.base.errors import AddressError, RefusedError, UnreachableError
from p2pavg.base.limits import FAREWELL_SECONDS, REPLY_SECONDS
from p2pavg.net.addresses import is_circuit, parse_circuit_address
from p2pavg.net.dialling import Dialler
from p2pavg.net.keep_alive import keep_alive
from p2pavg.net.libp2p.carriers import Carrier, RelayedStream
from p2pavg.net.libp2p.guarded_swarm import GuardedSwarm
from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.libp2p.host import GuardedHost, Places
from p2pavg.net.libp2p.speed import ReadAheadStream
from p2pavg.net.libp2p.stream import Libp2pStream, Lifetime, error_text, is_refusal
from p2pavg.net.limits.admission import ConnectionArrival, TrustClass
from p2pavg.net.limits.dial_gate import DialGate
from p2pavg.net.limits.memory_budget import MemoryBudget
from p2pavg.net.nat.reach.facts import Endpoint, Neighbour
from p2pavg.net.nat.relay.choice import RelayRecord
from p2pavg.net.nat.relay.service import CIRCUIT_SECONDS, open_circuit
from p2pavg.net.transport import PeerId, Stream, Transport

logger = logging.getLogger(__name__)

MAX_FOUND = 1024  # addresses, so that invented peers take no memory; at an older one, a refusal proves no end
NOTICE_SECONDS = 0.1


class ConnectionObserver(Protocol):
    """Follows the connections of a transport."""

    def connected(self, muxed: GuardedYamux) -> None:
        """Note a new connection."""

    def lost(self) -> None:
        """Note that a connection has ended."""


class Connections:
    """Every libp2p connection of one transport.

    Args:
        transport: opens circuits through relays.
        lifetime: the nursery of the transport.
        places: the limits of connections, and the known peers.
    """

    def __init__(
        self, transport: Transport, host: GuardedHost, swarm: GuardedSwarm, lifetime: Lifetime, places: Places
    ) -> None:
        self._transport = transport
        self._host = host
        self._swarm = swarm
        self._lifetime = lifetime
        self._nursery = lifetime.nursery
        self.observer: ConnectionObserver
        """Set before anything can connect."""
        self.dialler = Dialler(self._nursery, self)
        self.relays = RelayRecord()
        """The relays over which connections have failed lately."""
        self.listens = False
        """True once the listeners are open."""
        self._acquaintances = places.acquaintances
        self.entrance = places.entrance
        self.gate = DialGate(places.acquaintances)
        self._found: OrderedDict[tuple[PeerId, str], None] = OrderedDict()
        """Peers, and addresses at which dials have reached them."""
        self._arrivals: dict[GuardedYamux, ConnectionArrival] = {}
        self.memory = MemoryBudget(self._arrivals.keys(), self._acquaintances)
        swarm.owner = self

    def remember(self, peer_id: PeerId, *, companion: bool) -> None:
        """Note that a peer is not a stranger."""
        self._acquaintances.remember(peer_id, TrustClass.COMPANION if companion else TrustClass.ANSWERED)

    # -- what the swarm tells its owner

    def admit(self, muxed: GuardedYamux) -> None:
        """Find a place for a new connection. Raises NoPlaceError."""
        # An inbound connection counts since it was accepted; one that this process dialled counts from now on.
        arrival, peer_id = muxed.carrier.arrival, str(muxed.peer_id)
        if arrival is not None:
            self.entrance.admit(arrival, peer_id)
        else:
            # The limits drop a connection without waiting, in the midst of another one's admission.
            drop = partial(self._nursery.start_soon, muxed.abort)
            arrival = self.entrance.dialled(muxed.remote_host, peer_id, drop)
        self._arrivals[muxed] = arrival
        muxed.arrived = self.memory.arrived

    def connected(self, connection: SwarmConn) -> None:
        """Note a new connection, and at which host its peer is."""
        muxed = _muxer(connection)
        # The host of a relayed connection is the relay's: it says nothing about where the peer is.
        if not muxed.relay:
            self._acquaintances.met(str(muxed.peer_id), muxed.remote_host)
        self.observer.connected(muxed)
        self.dialler.connected(str(muxed.peer_id))

    def ended(self, muxed: GuardedYamux) -> None:
        """Give the place of a connection back, and remember which relay has failed."""
        if (arrival := self._arrivals.pop(muxed, None)) is not None:
            self.entrance.left(arrival)
        # Dials through this relay come last for a while. An end that this process chose is not the relay's fault.
        if muxed.relay and not muxed.dropped_here:
            self.relays.failed(muxed.relay, trio.current_time())
        self.observer.lost()

    # -- dialling

    async def dial_one(self, peer_id: PeerId, address: str) -> None:
        """Connect to a peer at one address, through the dial gate.

        libp2p's own ``dial_peer`` takes 0.25 s even when the only address answers at once, and it blacklists a failed
        peer for a minute. Its ``dial_addr`` does neither.

        Raises:
            AddressError: the text is not an address of this peer.
            RefusedError: the operating system at the other end refused, at an address where the peer was before.
            UnreachableError: any other failure; the message holds the reason of each IP address.
        """
        if is_circuit(address):
            await self._dial_through_relay(peer_id, address)
            return
        candidates = await self.gate.candidates(peer_id, address)
        reasons = [] if candidates else [f"{address} resolves to no IP address"]
        refused = bool(candidates)  # a refusal is taken as proof that the peer's process has ended
        for found in candidates:
            try:
                async with self.gate.dialling(peer_id, address, found):
                    await self._swarm.dial_addr(found, ID.from_string(peer_id))
                self._found[peer_id, str(found)] = None
                if len(self._found) > MAX_FOUND:
                    self._found.popitem(last=False)
                return
            except SwarmException as error:
                reasons.append(error_text(error))
                refused &= is_refusal(error) and self._proves_end(peer_id, found)
        raise (RefusedError if refused else UnreachableError)("; ".join(reasons))

    async def _dial_through_relay(self, peer_id: PeerId, text: str) -> None:
        circuit = parse_circuit_address(text)
        # Records may name any address: the circuit must lead to the peer that is wanted.
        if circuit.target != peer_id:
            raise AddressError(f"{text!r} is not an address of {peer_id}")
        if circuit.relay == str(self._swarm.get_peer_id()):
            raise UnreachableError("this peer is the relay itself, and is not connected to the peer")
        if self.gate.policy.only_here:  # the relay may be here, and the peer behind it anywhere
            raise UnreachableError("a peer that averages only with processes of this machine uses no relay")
        try:
            stream = await open_circuit(self._transport, circuit)
        except RefusedError as error:  # the relay's process has ended, and the peer's may live
            raise UnreachableError(str(error)) from None
        try:
            await self.adopt(RelayedStream(stream), peer_id, initiator=True)
        except UnreachableError:
            # The relay opened a circuit, and no peer of this id answered: it may have answered itself.
            self.relays.failed(circuit.relay, trio.current_time())
            raise

    async def adopt(
        self, carrier: Carrier, peer_id: PeerId, *, initiator: bool, works: trio.Event | None = None
    ) -> None:
        """Make a connection over a circuit or a punched socket; see :meth:`GuardedSwarm.adopt`.

        Raises:
            UnreachableError: the handshake failed, another peer is there, or there is no place for the connection.
        """
        identity, works = ID.from_string(peer_id), trio.Event() if works is None else works
        try:
            if initiator:
                with trio.fail_after(CIRCUIT_SECONDS):
                    await self._swarm.adopt(carrier, identity, works, initiator=True)
                return
            # It was not accepted by a listener, but costs as much, so it counts like any inbound connection.
            with self.entrance.arriving(carrier.remote_endpoint[0]) as arrival:
                self.entrance.admission.speaks(arrival)
                carrier.arrival = arrival
                await self._swarm.adopt(carrier, identity, works, initiator=False)
            # The block above ends without an error if the limits have dropped the connection.
            if not works.is_set():
                raise UnreachableError("no connection was made: it gives way to others")
        except (SwarmException, trio.TooSlowError) as error:
            raise UnreachableError(f"no connection was made: {error_text(error)}") from None

    async def host_circuit(self, stream: Stream, peer_id: PeerId) -> None:
        """Make a connection over a circuit, as the side that was asked. The call lives as long as the connection.

        Raises:
            UnreachableError: as :meth:`adopt`.
        """
        await self.adopt(RelayedStream(stream), peer_id, initiator=False)

    async def adopt_socket(self, plain: socket.socket, peer_id: PeerId, *, initiator: bool) -> None:
        """Make a connection over a connected socket, which this call takes over. It returns when the connection works.

        Raises:
            UnreachableError: as :meth:`adopt`.
        """
        keep_alive(plain)
        carrier = ReadAheadStream.of(TrioTCPStream(trio.SocketStream(trio.socket.from_stdlib_socket(plain))))
        carrier.punched = True
        if initiator:
            await self.adopt(carrier, peer_id, initiator=True)
            return
        outcome = _Outcome()
        # The inbound side's call lives as long as the connection, and the caller waits for the handshake only.
        self._nursery.start_soon(self._host_punched, carrier, peer_id, outcome)
        try:
            await outcome.known.wait()
        except trio.Cancelled:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_SECONDS):
                await carrier.close()
            raise
        if outcome.reason:
            raise UnreachableError(outcome.reason)

    async def _host_punched(self, carrier: Carrier, peer_id: PeerId, outcome: _Outcome) -> None:
        try:
            await self.adopt(carrier, peer_id, initiator=False, works=outcome.known)
        except UnreachableError as error:
            outcome.reason = str(error)
        except Exception as error:  # a bug, or an error of libp2p that has no common type
            logger.exception("a punched connection of %s is dropped", peer_id)
            outcome.reason = error_text(error)
        finally:
            outcome.known.set()

    def _proves_end(self, peer_id: PeerId, address: Multiaddr) -> bool:
        hosts = [str(address.value_for_protocol(name)) for name in ("ip4", "ip6") if name in address]
        dialled = (peer_id, str(address)) in self._found
        return bool(hosts) and proves_end(
            hosts[0], dialled=dialled, met=self._acquaintances.has_met(peer_id, hosts[0])
        )

    # -- streams

    async def open_stream(self, peer_id: PeerId, protocol: str) -> Libp2pStream:
        """Open a stream over a connection that exists, and negotiate its protocol.

        The negotiation runs in the transport's nursery, because a cancelled one leaves half a frame behind.

        Raises:
            UnreachableError: the peer does not serve the protocol, does not answer, or the connection broke.
        """
        attempt = _Negotiation()
        self._nursery.start_soon(self._negotiate, attempt, peer_id, protocol)
        try:
            await attempt.done.wait()
        except trio.Cancelled:
            attempt.abandoned = True
            if attempt.stream is not None:
                await attempt.stream.reset()
            raise
        if attempt.stream is None:
            raise UnreachableError(f"{peer_id} opened no stream of {protocol}: {attempt.reason}")
        return attempt.stream

    async def _negotiate(self, attempt: _Negotiation, peer_id: PeerId, protocol: str) -> None:
        watchdog, found_open = trio.CancelScope(), self.of(peer_id)
        # One of the direct connections carries the stream, if there are any.
        used = [muxed for muxed in found_open if not muxed.relay] or found_open
        self._nursery.start_soon(_abort_if_silent, watchdog, peer_id, used)
        try:
            found = await self._host.new_stream(ID.from_string(peer_id), [TProtocol(protocol)])
            attempt.stream = Libp2pStream(cast(NetStream, found), self._lifetime)
        except (SwarmException, StreamFailure, IOException, MuxedStreamError, ValueError) as error:
            attempt.reason = error_text(error)
        except Exception as error:
            logger.exception("opening a stream to %s failed", peer_id)
            attempt.reason = error_text(error)
        finally:
            watchdog.cancel()
            attempt.done.set()
        if attempt.abandoned and attempt.stream is not None:
            await attempt.stream.reset()

    # -- connections that exist

    def is_connected(self, peer_id: PeerId) -> bool:
        """Return whether a connection to the peer is open now."""
        return bool(self.to(peer_id))

    def dialled_addresses(self, peer_id: PeerId) -> list[str]:
        """Return the remote addresses of the open direct connections that this process has dialled.

        A punched connection has none: the port at its other end accepts no other connection.
        """
        return [
            text
            for muxed in self.of(peer_id)
            if muxed.is_initiator and muxed.socket is not None and not muxed.punched
            for text in _address_of(muxed.socket, peer_id)
        ]

    def neighbours(self) -> list[Neighbour]:
        """Return the peers with direct connections, once for each connection."""
        return [
            Neighbour(
                peer_id=str(muxed.peer_id),
                host=muxed.remote_endpoint[0],
                # The port of an outbound connection is one at which the peer listens, so that probes can be sent there.
                port=muxed.remote_endpoint[1] if muxed.is_initiator and not muxed.punched else 0,
                arrived=not muxed.is_initiator and not muxed.punched,
            )
            for muxed in self.all()
            if not muxed.relay and muxed.remote_endpoint[0]
        ]

    def listening(self) -> list[Endpoint]:
        """Return the hosts and ports at which the listeners are bound; a host may be a wildcard."""
        if not self.listens:
            return []
        bound = [address for listener in listeners_of(self._swarm) for address in listener.get_addrs()]
        return [(host_of(address), int(str(address.value_for_protocol("tcp")))) for address in bound]

    def to(self, peer_id: PeerId) -> list[SwarmConn]:
        """Return the open connections to a peer, as libp2p has them."""
        found = self._swarm.get_connections(ID.from_string(peer_id))
        return [cast(SwarmConn, each) for each in found if not each.is_closed]

    def of(self, peer_id: PeerId) -> list[GuardedYamux]:
        """Return the open connections to a peer."""
        return [_muxer(each) for each in self.to(peer_id)]

    async def one_was_ended(self, connections: Sequence[SwarmConn]) -> bool:
        """Return whether one of these connections has ended, and not by this process; then libp2p lists it no more.

        A write over a connection that ends may fail before its reader has noticed the end, so this waits a moment for
        it. Until libp2p has taken the connection off its list, on which a busy machine works for long, a new stream
        would get it again. The caller bounds the wait for that.
        """
        with trio.move_on_after(NOTICE_SECONDS):
            async with trio.open_nursery() as nursery:
                for connection in connections:
                    nursery.start_soon(_until_ending, connection, nursery.cancel_scope)
        ended = [
            each
            for each in connections
            if (each.is_closed or _muxer(each).event_shutting_down.is_set()) and not _muxer(each).dropped_here
        ]
        for connection in ended:
            await connection.event_closed.wait()
        return bool(ended)

    def all(self) -> list[GuardedYamux]:
        """Return every open connection."""
        return [_muxer(found) for found in self._swarm.get_connections() if not found.is_closed]

    def sockets(self) -> list[trio.socket.SocketType]:
        """Return the socket of every direct connection."""
        found = [_muxer(found).socket for found in self._swarm.get_connections()]
        return [opened for opened in found if opened is not None]

    async def disconnect(self, peer_id: PeerId) -> None:
        """Close every connection to a peer, politely at first."""
        with trio.move_on_after(FAREWELL_SECONDS):
            await self._swarm.close_peer(ID.from_string(peer_id))
        # A peer that does not answer the polite end may be stopped, or hostile.
        await self.abort(peer_id)

    async def abort(self, peer_id: PeerId) -> None:
        """Close the socket of every connection to a peer."""
        for connection in self._swarm.get_connections(ID.from_string(peer_id)):
            await _muxer(connection).abort()

    async def close_all(self) -> None:
        """Close every connection, those through relays first, because they need the connections to the relays.

        Those of one kind are closed at once: libp2p closes one after another and sleeps 0.2 s for each.
        """
        found = self._swarm.get_connections()
        relayed = [each for each in found if _muxer(each).relay]
        for some in (relayed, found):
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.deadline = trio.current_time() + FAREWELL_SECONDS
                for connection in some:
                    nursery.start_soon(_close_delivered, connection)
        for connection in self._swarm.get_connections():
            await _muxer(connection).abort()


class _Negotiation:
    """A stream that is being opened, and a note if its caller has given up."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.stream: Libp2pStream | None = None
        self.reason = "the transport is closing"
        self.abandoned = False


async def _abort_if_silent(watchdog: trio.CancelScope, peer_id: PeerId, used: Sequence[GuardedYamux]) -> None:
    """Close the connections that may be in use if the peer does not answer in time.

    Cancelling the negotiation would not end it for sure: libp2p then resets the stream inside a shield. A direct
    connection that was made meanwhile goes on when a relay is what keeps silent.
    """
    with watchdog:
        await trio.sleep(REPLY_SECONDS)
        logger.debug("%s did not answer within %.0f s", peer_id, REPLY_SECONDS)
        for muxed in used:
            await muxed.abort()


class _Outcome:
    """The outcome of a handshake that another task does."""

    def __init__(self) -> None:
        self.known = trio.Event()
        self.reason = ""


def proves_end(host: str, *, dialled: bool, met: bool) -> bool:
    """Return whether a refusal at an address of a peer proves that the peer's process has ended.

    It does where a dial has reached the peer before. Where only the peer has connected, a router may refuse in its
    place, except within one network. A peer behind a home router may announce private addresses that belong to other
    machines in this network: a refusal there says nothing about the peer.

    Args:
        dialled: whether a dial has reached the peer at that address.
        met: whether the peer was connected at that host, whichever side had dialled.
    """
    return dialled or (met and not ip_address(host).is_global)


async def _until_ending(connection: SwarmConn, then: trio.CancelScope) -> None:
    await _muxer(connection).event_shutting_down.wait()
    then.cancel()


def _muxer(connection: INetConn) -> GuardedYamux:
    return cast(GuardedYamux, connection.muxed_conn)


async def _close_delivered(connection: INetConn) -> None:
    """Close a connection. What was written through a relay is lost if the connection to the relay closes too soon."""
    carrier = _muxer(connection).carrier
    await connection.close()
    if isinstance(carrier, RelayedStream):
        await carrier.wait_delivered()


def host_of(address: Multiaddr) -> str:
    """Return the IP address in a multiaddress."""
    return str(address.value_for_protocol("ip4" if "ip4" in address else "ip6"))


def listeners_of(swarm: GuardedSwarm) -> list[TCPListener]:
    """Return the listeners of a swarm."""
    return [cast(TCPListener, listener) for listener in swarm.listeners.values()]


def _address_of(opened: trio.socket.SocketType, peer_id: PeerId) -> list[str]:
    try:
        host, port, *_ = opened.getpeername()
    except OSError:  # the connection is gone already
        return []
    return [f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}/p2p/{peer_id}"]
