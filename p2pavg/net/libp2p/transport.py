"""The transport over py-libp2p: TCP, Noise, yamux.

The only module that touches libp2p's host and network (with :mod:`p2pavg.net.libp2p.guards` beside it).
"""

from __future__ import annotations

import logging
import math
import os
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import trio
from libp2p.crypto.ed25519 import create_new_key_pair as ed25519_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import IOException
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.tools.anyio_service import background_trio_service
from libp2p.transport.tcp.tcp import TCPListener
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from p2pavg.errors import (
    AddressError,
    ClosedError,
    ListenError,
    RefusedError,
    StreamBrokenError,
    UnreachableError,
)
from p2pavg.net.addresses import (
    parse_listen_address,
    parse_peer_address,
    reachable_hosts,
    with_peer_id,
)
from p2pavg.net.dialling import Dialler
from p2pavg.net.lanes.acceptor import Doorway
from p2pavg.net.lanes.limits import MAX_IDLE, MAX_INBOUND
from p2pavg.net.lanes.pool import LaneKeeper
from p2pavg.net.libp2p.guards import (
    GuardedHost,
    GuardedMuxerMultistream,
    GuardedSwarm,
    GuardedYamux,
    install,
    is_of_the_network,
)
from p2pavg.net.libp2p.sniffing import SniffingTCP, accept_more_at_once
from p2pavg.net.libp2p.speed import EagerMultiselectClient, OneAnswerMultiselect
from p2pavg.net.libp2p.speed import install as install_speed
from p2pavg.net.limits.admission import Acquaintances, Admission, Arrival, ConnectionLimits, Standing
from p2pavg.net.limits.dial_gate import DialGate
from p2pavg.net.limits.entrance import Entrance
from p2pavg.net.limits.memory_budget import MemoryBudget
from p2pavg.net.limits.open_files import raise_file_limit, share_of_files
from p2pavg.net.transport import (
    Buffer,
    DirectLane,
    DirectLaneHandler,
    PeerId,
    Stream,
    StreamHandler,
    Transport,
)
from p2pavg.threads.exceptions import bare_exceptions

logger = logging.getLogger(__name__)

# libp2p's own limit, which drops connections by no rule of ours, is never met.
_LIBP2P_MAX_CONNECTIONS = 1_000_000

# A write is cut into pieces, each of which is finished even when its caller is gone: half a frame would poison the
# connection for every stream on it. Small pieces keep other streams' turns short.
WRITE_PIECE_BYTES = 32 * 1024

# How long one piece may wait for the other side. A link of 10 kbit/s moves a piece in 26 s.
STALL_SECONDS = 30.0

_CLOSE_SECONDS = 1.0
_NEGOTIATE_SECONDS = 10.0

# How long a stream that this process has closed waits for the other side to close its half.
_LINGER_SECONDS = 30.0
_DRAIN_BYTES = 64 * 1024
_READ_AHEAD_BYTES = 16 * 1024


class Libp2pStream(Stream):
    """One yamux stream. Its writes run in the transport's nursery, so that cancelling the caller tears no frame."""

    def __init__(self, net_stream: NetStream, transport: Libp2pTransport) -> None:
        self._muxed = cast(GuardedYamux, net_stream.muxed_conn)
        self.remote = str(self._muxed.peer_id)
        self.remote_host = self._muxed.remote_host
        self._stream_id: int = net_stream.muxed_stream.stream_id  # type: ignore[attr-defined]
        self._net_stream = net_stream
        self._transport = transport
        self._closed = False
        self._unreadable: str | None = None
        self._unwritable: str | None = None
        self._ahead = memoryview(b"")

    def _check(self, broken: str | None) -> None:
        if self._closed or self._transport.closed:
            raise ClosedError(f"the stream to {self.remote} was closed by this process")
        if broken is not None:
            raise StreamBrokenError(broken)

    async def send_all(self, data: Buffer) -> None:
        view = memoryview(data)
        self._check(self._unwritable)
        for start in range(0, len(view), WRITE_PIECE_BYTES):
            done = trio.Event()
            self._transport.nursery.start_soon(
                self._write_piece, bytes(view[start : start + WRITE_PIECE_BYTES]), done
            )
            try:
                await done.wait()
            except trio.Cancelled:
                self._unwritable = f"a write to {self.remote} was cancelled half-way"
                raise
            self._check(self._unwritable)

    async def _write_piece(self, piece: bytes, done: trio.Event) -> None:
        try:
            with trio.move_on_after(STALL_SECONDS) as scope:
                await self._net_stream.write(piece)
            if scope.cancelled_caught:
                self._unwritable = f"{self.remote} took no data for {STALL_SECONDS:.0f} s"
                await cast(GuardedYamux, self._net_stream.muxed_conn).abort()
        except (IOException, MuxedStreamError, ValueError) as error:
            self._unwritable = f"the stream to {self.remote} broke: {_text(error)}"
        except Exception as error:
            logger.exception("a write to %s failed", self.remote)
            self._unwritable = f"the stream to {self.remote} broke: {_text(error)}"
        finally:
            done.set()

    async def receive_some(self, max_bytes: int) -> bytes:
        self._check(self._unreadable)
        try:
            return await self._read(max_bytes)
        except trio.Cancelled:
            self._unreadable = f"a read from {self.remote} was cancelled half-way"
            raise
        except (IOException, MuxedStreamError, ValueError, KeyError) as error:
            self._unreadable = f"the stream of {self.remote} broke: {_text(error)}"
            raise StreamBrokenError(self._unreadable) from None

    def hold(self, count: int) -> None:
        if count and not self._muxed.is_reset(self._stream_id):
            self._muxed.assembling[self._stream_id] = count
        else:
            self._muxed.assembling.pop(self._stream_id, None)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._finish(reset=self._unwritable is not None)

    async def reset(self) -> None:
        if not self._closed:
            self._closed = True
            await self._finish(reset=True)

    async def _finish(self, *, reset: bool) -> None:
        """In the transport's nursery: a frame that cannot be sent must hold up nobody."""
        if self._transport.closed:
            return
        done = trio.Event()
        self._transport.nursery.start_soon(self._send_last_frame, reset, done)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_SECONDS):
            await done.wait()

    async def _send_last_frame(self, reset: bool, done: trio.Event) -> None:
        try:
            with trio.move_on_after(STALL_SECONDS) as scope:
                await (self._net_stream.reset() if reset else self._net_stream.close())
            if scope.cancelled_caught:
                await cast(GuardedYamux, self._net_stream.muxed_conn).abort()
            done.set()
            if not reset and not await self._drain():
                await self._net_stream.reset()
        except (IOException, MuxedStreamError, ValueError) as error:
            logger.debug("closing a stream to %s: %s", self.remote, _text(error))
        except Exception:
            logger.exception("closing a stream to %s failed", self.remote)
        finally:
            done.set()

    async def _drain(self) -> bool:
        """Take what still comes, until the other side closes its half as well; whether it did.

        A sender whose window stays empty would give up the whole connection.
        """
        with trio.move_on_after(_LINGER_SECONDS):
            try:
                while await self._read(_DRAIN_BYTES):
                    pass
                return True
            except (IOException, MuxedStreamError) as error:
                logger.debug("a closed stream to %s broke: %s", self.remote, _text(error))
        return False

    async def _read(self, max_bytes: int) -> bytes:
        """More than was asked for is kept: a message is read as its length and the rest."""
        if not self._ahead:
            try:
                self._ahead = memoryview(await self._net_stream.read(max(max_bytes, _READ_AHEAD_BYTES)))
            except StreamEOF:
                return b""
        taken = bytes(self._ahead[:max_bytes])
        self._ahead = self._ahead[max_bytes:]
        return taken


class _Negotiation:
    """A stream that is being opened, and whether somebody still wants it."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.stream: Libp2pStream | None = None
        self.reason = "the transport is closing"
        self.abandoned = False


class Libp2pTransport(Transport):
    """Made by :func:`open_libp2p_transport`, which owns the tasks."""

    def __init__(
        self,
        host: GuardedHost,
        swarm: GuardedSwarm,
        tcp: SniffingTCP,
        nursery: trio.Nursery,
        places: _Places,
    ) -> None:
        self._host = host
        self._swarm = swarm
        self.nursery = nursery
        self.closed = False
        self._addresses: tuple[str, ...] = ()
        self._dialler = Dialler(nursery, self.is_connected, self._dial_one)
        self.peer_id = str(host.get_id())
        self._acquaintances = places.acquaintances
        self._entrance = places.entrance
        self._arrivals: dict[GuardedYamux, Arrival] = {}
        self._memory = MemoryBudget(lambda: self._arrivals, self._is_companion)
        self._gate = DialGate(places.acquaintances)
        swarm.admit = self._admit
        swarm.on_connection = self._connected
        swarm.on_end = self._ended
        self._tcp = tcp
        doorway = Doorway(self.peer_id, self._gate)
        tcp.on_tls = doorway.accept
        self._lanes = LaneKeeper(self, nursery, doorway, self._dialled_addresses, places.lanes)
        _transports.add(self)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    def remember_peer(self, peer_id: PeerId, *, companion: bool = False) -> None:
        self._acquaintances.remember(peer_id, Standing.COMPANION if companion else Standing.ANSWERED)

    def _is_companion(self, peer_id: PeerId) -> bool:
        return self._acquaintances.standing_of(peer_id) is Standing.COMPANION

    def _admit(self, muxed: GuardedYamux) -> None:
        """There is to be one more connection. Raises NoPlaceError."""
        arrival, peer_id = muxed.tcp_stream.arrival, str(muxed.peer_id)
        if arrival is not None:
            self._entrance.admit(arrival, peer_id)
        else:
            drop = partial(self.nursery.start_soon, muxed.abort)
            arrival = self._entrance.dialled(muxed.remote_host, peer_id, drop)
        self._arrivals[muxed] = arrival
        muxed.arrived = self._memory.arrived

    def _connected(self, connection: SwarmConn) -> None:
        """There is one more connection: remember at which host the peer is."""
        muxed = cast(GuardedYamux, connection.muxed_conn)
        self._acquaintances.met(str(muxed.peer_id), muxed.remote_host)
        self._dialler.something_changed()

    def _ended(self, muxed: GuardedYamux) -> None:
        if (arrival := self._arrivals.pop(muxed, None)) is not None:
            self._entrance.left(arrival)

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def serve_one(net_stream: NetStream) -> None:
            stream = Libp2pStream(net_stream, self)
            try:
                await handler(stream)
            except Exception as error:
                if is_of_the_network(error):
                    raise
                logger.exception(
                    "serving %s to %s failed; only this stream of it is reset", protocol, stream.remote
                )
            finally:
                await stream.reset()

        self._host.set_stream_handler(TProtocol(protocol), serve_one)  # type: ignore[arg-type]

    async def dial(self, address: str, *, timeout: float) -> PeerId:
        _, peer_id = parse_peer_address(address)
        if peer_id == self.peer_id:
            raise AddressError(f"{address} is this peer itself")
        self._check_open()
        self._gate.told_by_user(address)
        self.remember_peer(peer_id, companion=True)
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
            return await self._negotiate(peer_id, protocol)
        raise UnreachableError(f"no stream to {peer_id} within {timeout:.1f} s")

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the transport is closed")

    async def _negotiate(self, peer_id: PeerId, protocol: str) -> Stream:
        """In the nursery, since a cancelled negotiation leaves half a frame behind."""
        attempt = _Negotiation()
        self.nursery.start_soon(self._run_negotiation, attempt, peer_id, protocol)
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

    async def _run_negotiation(self, attempt: _Negotiation, peer_id: PeerId, protocol: str) -> None:
        watchdog = trio.CancelScope()
        self.nursery.start_soon(self._abort_if_silent, watchdog, peer_id)
        try:
            found = await self._host.new_stream(ID.from_string(peer_id), [TProtocol(protocol)])
            attempt.stream = Libp2pStream(cast(NetStream, found), self)
        except (SwarmException, StreamFailure, IOException, MuxedStreamError, ValueError) as error:
            attempt.reason = _text(error)
        except Exception as error:
            logger.exception("opening a stream to %s failed", peer_id)
            attempt.reason = _text(error)
        finally:
            watchdog.cancel()
            attempt.done.set()
        if attempt.abandoned and attempt.stream is not None:
            await attempt.stream.reset()

    async def _abort_if_silent(self, watchdog: trio.CancelScope, peer_id: PeerId) -> None:
        """A negotiation that is cancelled resets its stream in a shield: only closing the socket ends it for sure."""
        with watchdog:
            await trio.sleep(_NEGOTIATE_SECONDS)
            logger.info("%s answered nothing for %.0f s", peer_id, _NEGOTIATE_SECONDS)
            await self._abort(peer_id)

    async def _dial_one(self, peer_id: PeerId, text: str) -> None:
        """libp2p's own ``dial_peer`` takes 0.25 s when the only address answers at once, and blacklists for a minute.

        Its ``dial_addr`` does neither.
        """
        reasons, refused = [], True
        for address in await self._gate.candidates(peer_id, text):
            try:
                async with self._gate.dialling(peer_id, text, address):
                    await self._swarm.dial_addr(address, ID.from_string(peer_id))
                return
            except SwarmException as error:
                reasons.append(_text(error))
                refused &= _is_refusal(error) and self._has_met(peer_id, address)
        raise (RefusedError if refused else UnreachableError)("; ".join(reasons))

    def _has_met(self, peer_id: PeerId, address: Multiaddr) -> bool:
        """Whether the peer was seen at that host: behind a home router it may name addresses that are others' here."""
        hosts = [str(address.value_for_protocol(name)) for name in ("ip4", "ip6") if name in address]
        return bool(hosts) and self._acquaintances.has_met(peer_id, hosts[0])

    def is_connected(self, peer_id: PeerId) -> bool:
        return any(
            not connection.is_closed for connection in self._swarm.get_connections(ID.from_string(peer_id))
        )

    async def disconnect(self, peer_id: PeerId) -> None:
        with trio.move_on_after(_CLOSE_SECONDS):
            await self._swarm.close_peer(ID.from_string(peer_id))
        await self._abort(peer_id)

    async def _abort(self, peer_id: PeerId) -> None:
        for connection in self._swarm.get_connections(ID.from_string(peer_id)):
            await cast(GuardedYamux, connection.muxed_conn).abort()

    def serve_lanes(
        self, handler: DirectLaneHandler, *, wanted: Callable[[PeerId], bool] | None = None
    ) -> None:
        self._lanes.serve(handler, wanted)

    async def open_lane(
        self, peer_id: PeerId, *, addresses: Sequence[str] = (), timeout: float
    ) -> DirectLane:
        return await self._lanes.open(peer_id, addresses, timeout)

    def keep_lane(self, lane: DirectLane) -> None:
        self._lanes.keep(lane)

    def _dialled_addresses(self, peer_id: PeerId) -> list[str]:
        """Where the open connections lead that this process made to the peer."""
        found = self._swarm.get_connections(ID.from_string(peer_id))
        muxed = [cast(GuardedYamux, connection.muxed_conn) for connection in found]
        return [text for each in muxed if each.is_initiator for text in _address_of(each.socket, peer_id)]

    def _listeners(self) -> list[TCPListener]:
        return [cast(TCPListener, listener) for listener in self._swarm.listeners.values()]

    def sockets(self) -> list[trio.socket.SocketType]:
        """Every socket of this transport but its lanes': of its listeners and its connections."""
        listeners = [found for opened in self._listeners() for found in opened.listeners]
        connections = [cast(GuardedYamux, found.muxed_conn) for found in self._swarm.get_connections()]
        opened = [found.socket for found in listeners] + [found.socket for found in connections]
        return opened + self._tcp.undecided

    def detach_all(self) -> list[int]:
        """The descriptors of every socket, which this copy of the transport forgets."""
        found = [opened.detach() for opened in self.sockets()] + [lane.detach() for lane in self._lanes.lanes]
        return [descriptor for descriptor in found if descriptor >= 0]

    def _take_addresses(self) -> None:
        bound = [address for listener in self._listeners() for address in listener.get_addrs()]
        found: list[str] = []
        for address in bound:
            version = _version_of(address)
            port = address.value_for_protocol("tcp")
            hosts = reachable_hosts(str(address.value_for_protocol(version)))
            found += [f"/{version}/{host}/tcp/{port}" for host in hosts]
        self._addresses = with_peer_id(found, self.peer_id)

    async def _close(self) -> None:
        """Every connection at once: libp2p closes one after another and sleeps 0.2 s for each."""
        self._lanes.close()
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + _CLOSE_SECONDS
            for connection in self._swarm.get_connections():
                nursery.start_soon(connection.close)
        for connection in self._swarm.get_connections():
            await cast(GuardedYamux, connection.muxed_conn).abort()
        with trio.move_on_after(_CLOSE_SECONDS):
            await self._host.close()


@asynccontextmanager
async def open_libp2p_transport(
    *, seed: bytes, listen: Sequence[str], limits: ConnectionLimits | None = None
) -> AsyncIterator[Libp2pTransport]:
    """Listen on ``listen`` and speak to others for as long as the block runs.

    Args:
        seed: the 32 bytes of an Ed25519 private key.
        listen: addresses such as ``/ip4/0.0.0.0/tcp/0``; none at all makes a peer that only dials.
        limits: how many connections there may be; fewer, where the system lets this process open few files.

    Raises:
        AddressError: a text in ``listen`` is no address to listen on.
        ListenError: an address cannot be listened on; the message says which and why.
    """
    wanted = [parse_listen_address(text) for text in listen]
    for address in wanted:
        _check_free(address)
    install()
    install_speed()
    places = _Places(limits or ConnectionLimits())
    tcp = SniffingTCP(places.entrance)
    host, swarm = _new_host(seed, tcp)
    with bare_exceptions():
        async with background_trio_service(swarm), trio.open_nursery() as nursery:
            transport = Libp2pTransport(host, swarm, tcp, nursery, places)
            try:
                await swarm.listen(*wanted)
                for address in wanted:
                    if str(address) not in swarm.listeners:
                        raise ListenError(f"cannot listen on {address}: the system refused it")
                    transport._gate.listens_at(str(address.value_for_protocol(_version_of(address))))
                for listener in transport._listeners():
                    accept_more_at_once(listener)
                transport._take_addresses()
                yield transport
            finally:
                with trio.CancelScope(shield=True):
                    await transport._close()
                transport.closed = True
                nursery.cancel_scope.cancel()


class _Places:
    """How many connections and lanes one transport may have, and who has them."""

    def __init__(self, limits: ConnectionLimits) -> None:
        wanted = limits.connections + limits.unfinished + MAX_INBOUND + 2 * MAX_IDLE
        limit = raise_file_limit()
        share = share_of_files(limit, wanted)
        if share < 1.0:
            limits = limits.scaled(share)
            logger.warning(
                "this process may open %s files only: it holds at most %d connections and %d lanes of others; "
                "raise the limit with `ulimit -n` for more",
                limit,
                limits.connections,
                int(MAX_INBOUND * share),
            )
        self.lanes = share
        """The part of the usual number of lanes."""
        self.acquaintances = Acquaintances()
        self.entrance = Entrance(
            Admission(limits, self.acquaintances.standing_of, self.acquaintances.standing_at)
        )


def _version_of(address: Multiaddr) -> str:
    return "ip4" if "ip4" in address else "ip6"


_transports: weakref.WeakSet[Libp2pTransport] = weakref.WeakSet()


def _close_sockets_after_fork() -> None:
    """In a forked child, e.g. a worker of a DataLoader: its copies would keep open what the parent closes."""
    for transport in _transports:
        for descriptor in transport.detach_all():
            os.close(descriptor)
    _transports.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_sockets_after_fork)


def _new_host(seed: bytes, tcp: SniffingTCP) -> tuple[GuardedHost, GuardedSwarm]:
    """``libp2p.new_host`` with our classes, Noise alone (it also offers plaintext, where identity is a claim)."""
    keys = ed25519_key_pair(seed)
    peer_id = ID.from_pubkey(keys.public_key)
    peerstore = PeerStore()
    peerstore.add_key_pair(peer_id, keys)
    upgrader = TransportUpgrader({NOISE_ID: Noise(keys, noise_privkey=x25519_key_pair().private_key)}, {})
    upgrader.muxer_multistream = GuardedMuxerMultistream({TProtocol(YAMUX_ID): GuardedYamux})
    swarm = GuardedSwarm(
        peer_id,
        peerstore,
        upgrader,
        transports=[tcp],
        retry_config=RetryConfig(max_retries=0),
        connection_config=ConnectionConfig(
            max_connections=_LIBP2P_MAX_CONNECTIONS,
            max_connections_per_peer=3,
            high_watermark=_LIBP2P_MAX_CONNECTIONS,
            min_connections=0,
            low_watermark=0,
        ),
    )
    # Who is let in is for p2pavg.net.limits.admission to say; this would keep everybody out once it is used up.
    swarm._inbound_limiter.total_tokens = math.inf
    host = GuardedHost(swarm)
    host.multiselect_client = EagerMultiselectClient()
    # Without libp2p's own protocols: identify writes into our peerstore what a stranger says; ping we do not use.
    host.multiselect = OneAnswerMultiselect()
    return host, swarm


def _address_of(opened: trio.socket.SocketType, peer_id: PeerId) -> list[str]:
    try:
        host, port, *_ = opened.getpeername()
    except OSError:  # it is gone already
        return []
    return [f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}/p2p/{peer_id}"]


def _check_free(address: Multiaddr) -> None:
    """libp2p listens with SO_REUSEPORT: on a port that another of its hosts holds, both would get half the peers."""
    family = socket.AF_INET if "ip4" in address else socket.AF_INET6
    host = str(address.value_for_protocol("ip4" if family == socket.AF_INET else "ip6"))
    port = int(str(address.value_for_protocol("tcp")))
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise ListenError(f"cannot listen on {address}: {error.strerror}") from None


def _is_refusal(error: BaseException) -> bool:
    """Whether the system at the other end says that nobody listens there."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ExceptionGroup):
        return all(_is_refusal(inner) for inner in error.exceptions)
    return isinstance(error, ConnectionRefusedError)


def _text(error: BaseException) -> str:
    """The words of what is at the bottom of an error, or its type's name: many of libp2p's come without any."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ExceptionGroup):  # trio's, with one error for each address of a host
        return "; ".join(_text(inner) for inner in error.exceptions)
    return str(error) or type(error).__name__
