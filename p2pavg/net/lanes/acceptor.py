"""Both ends of a TLS connection between two peers: accept a peer that has a ticket, dial a peer with its ticket."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import trio
from multiaddr import Multiaddr

from p2pavg.base.errors import AddressError, RemoteProtocolError, UnreachableError
from p2pavg.base.limits import GLANCE_SECONDS, REPLY_SECONDS
from p2pavg.net.lanes.certificates import OwnCertificate, listening_context
from p2pavg.net.lanes.tls_connection import TlsConnection
from p2pavg.net.limits.dial_gate import DialGate
from p2pavg.net.transport import PeerId

logger = logging.getLogger(__name__)

TICKET_BYTES = 16


class Visitor:
    """A peer that may connect once, with its ticket."""

    def __init__(self, peer_id: PeerId, certificate: bytes, context: ssl.SSLContext) -> None:
        self.peer_id = peer_id
        self.certificate = certificate
        self.context = context
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self.deadline = trio.current_time() + REPLY_SECONDS
        self.decided = trio.Event()
        self.reason = ""
        """The reason for which the peer has not connected; empty if it has."""
        self._connection: TlsConnection | None = None

    def come_in(self, connection: TlsConnection) -> None:
        """Hand over the peer's authenticated connection. If it comes too late, the connection is closed."""
        # The other side may have taken another way, or the wait has ended, while the handshake was under way.
        if self.decided.is_set():
            connection.close()
            return
        self._connection = connection
        self.decided.set()

    def stay_out(self, reason: str) -> None:
        """Give the peer up: note the reason, unless the peer has connected already."""
        if not self.decided.is_set():
            self.reason = reason
            self.decided.set()

    def take(self) -> TlsConnection | None:
        """Return the connection, which the caller owns from now on; ``None`` if there is none."""
        # One owner closes it. A second call finds nothing.
        connection, self._connection = self._connection, None
        return connection


class TlsAcceptor:
    """The maker of TLS connections with peers that have named their certificates."""

    def __init__(self, peer_id: PeerId, gate: DialGate) -> None:
        self._peer_id = peer_id
        self.gate = gate
        self._expected: dict[str, Visitor] = {}
        self._entering: dict[object, Visitor] = {}
        self._listening = listening_context(self._choose)

    @cached_property
    def own(self) -> OwnCertificate:
        """The certificate of this process, made at its first use."""
        # Peers that never use a lane make no key.
        return OwnCertificate(self._peer_id)

    def visitor(self, peer_id: PeerId, certificate: bytes) -> Visitor:
        """Return a peer that may connect once it is expected. This takes 2 ms of processor time, for OpenSSL's context.

        Raises:
            RemoteProtocolError: OpenSSL does not take the certificate.
            UnreachableError: this process cannot make a context now.
        """
        try:
            context = self.own.server_context(certificate)
        except ssl.SSLError as error:
            # Certificates are checked when they are decoded, and that reads some which OpenSSL does not.
            raise RemoteProtocolError(f"OpenSSL does not take the peer's certificate: {error}") from None
        except OSError as error:  # such as no file left to open
            raise UnreachableError(f"no context of TLS can be made: {error}") from None
        return Visitor(peer_id, certificate, context)

    @contextmanager
    def expecting(self, visitor: Visitor) -> Iterator[Visitor]:
        """Accept one connection of the peer, while the block runs and the ticket is valid."""
        self._expected[visitor.ticket.hex()] = visitor
        try:
            yield visitor
        finally:
            # A ticket is worth nothing after the block, even if its time is not over.
            self._expected.pop(visitor.ticket.hex(), None)
            visitor.stay_out("the wait for it has ended")
            # The block may have been cancelled after the connection came, and before its owner took it.
            if (unclaimed := visitor.take()) is not None:
                unclaimed.close()

    def _choose(self, tls: object, name: str | None) -> ssl.SSLContext | None:
        # Popped, so that a ticket is good for one connection: every router on the way can read it.
        visitor = self._expected.pop(name or "", None)
        if visitor is None or visitor.deadline <= trio.current_time():
            return None
        # OpenSSL calls this during the handshake. `accept` finds the visitor again by the connection's TLS object.
        self._entering[tls] = visitor
        return visitor.context

    async def accept(self, plain: socket.socket) -> None:
        """Finish an inbound handshake and hand the connection to its visitor.

        Any failure costs this connection only.
        """
        try:
            connection = TlsConnection(self._listening, plain)
        except OSError as error:
            logger.debug("a TLS connection ended before it began: %s", error)
            return
        try:
            # A connection without a valid ticket has failed by the time at which this function is called.
            await connection.shake_hands(lambda: self._entering[connection.tls].certificate)
            self._entering[connection.tls].come_in(connection)
        except OSError as error:
            logger.debug("a TLS connection was refused: %s", error)
            if connection.tls in self._entering:
                self._entering[connection.tls].stay_out(f"the handshake failed: {error}")
        finally:
            self._entering.pop(connection.tls, None)

    async def dial(
        self, peer_id: PeerId, certificate: bytes, ticket: bytes, addresses: Sequence[str]
    ) -> TlsConnection:
        """Connect to the first address at which the peer answers. Each address is tried 0.25 s after the one before.

        Raises:
            UnreachableError: no address answered; the message has the reason of each.
            OSError: OpenSSL does not take the certificate.
        """
        context = self.own.client_context(certificate)
        reasons: list[str] = []
        made: list[TlsConnection] = []

        async def attempt(address: str, failed: trio.Event) -> None:
            try:
                connection = await self._dial_at(address, peer_id, certificate, ticket, context)
            except (AddressError, UnreachableError, OSError) as error:
                reasons.append(f"{address}: {error}")
                failed.set()
                return
            # Two addresses may have answered in the same turn of the event loop.
            if made:
                connection.close()
                return
            made.append(connection)
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    failed = trio.Event()
                    nursery.start_soon(attempt, address, failed)
                    # The next address is tried at once if this one has failed, and otherwise after a moment.
                    with trio.move_on_after(GLANCE_SECONDS):
                        await failed.wait()
        # Cancelled just after one of the dials had succeeded: its connection has no other owner.
        except BaseException:
            for connection in made:
                connection.close()
            raise
        if not made:
            raise UnreachableError("; ".join(reasons) or "no address is known")
        return made[0]

    async def _dial_at(
        self, text: str, peer_id: PeerId, certificate: bytes, ticket: bytes, context: ssl.SSLContext
    ) -> TlsConnection:
        """Connect to a peer at one address, which may be a name of several hosts."""
        reasons = []
        for address in await self.gate.candidates(peer_id, text):
            try:
                # The peer has named this address, so it may be that of a victim. The
                # gate bounds what such dials cost.
                async with self.gate.dialling(peer_id, text, address):
                    plain = await _connect(address)
                    connection = TlsConnection(context, plain, server_name=ticket.hex())
                    await connection.shake_hands(lambda: certificate)
                return connection
            except OSError as error:
                reasons.append(error.strerror or str(error))
        raise UnreachableError("; ".join(reasons))

    async def greet(self, certificate: bytes, ticket: bytes, plain: socket.socket) -> TlsConnection:
        """Do the client's handshake on a connection that is made already. The socket is taken over.

        Raises:
            OSError: the other side is gone, or has shown another certificate.
        """
        return await self._secured(certificate, plain, ticket.hex())

    async def welcome(self, certificate: bytes, plain: socket.socket) -> TlsConnection:
        """Do the server's handshake on a connection whose other end must have this certificate.

        No ticket is needed, since the peer at the other end is known. The socket is taken over.

        Raises:
            OSError: the other side is gone, or has shown another certificate.
        """
        return await self._secured(certificate, plain, None)

    async def _secured(self, certificate: bytes, plain: socket.socket, name: str | None) -> TlsConnection:
        """Do the handshake of the client if there is a name, or else of the server."""
        try:
            make = self.own.server_context if name is None else self.own.client_context
            connection = TlsConnection(make(certificate), plain, server_name=name)
        except BaseException:
            # Making the context may fail before anything else owns the socket.
            plain.close()
            raise
        await connection.shake_hands(lambda: certificate)
        return connection


async def _connect(address: Multiaddr) -> socket.socket:
    family, version = (socket.AF_INET, "ip4") if "ip4" in address else (socket.AF_INET6, "ip6")
    host, port = str(address.value_for_protocol(version)), int(str(address.value_for_protocol("tcp")))
    opened = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        await opened.connect((host, port))
    except BaseException:
        opened.close()
        raise
    # The lane's threads need a plain socket. trio's own must not close it any more.
    return socket.socket(fileno=opened.detach())
