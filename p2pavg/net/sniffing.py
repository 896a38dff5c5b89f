"""One listening port for two protocols: the first byte of a connection says which.

A TLS handshake begins with 0x16. libp2p's negotiation begins with the length of a line, 0x13 in every implementation.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable

import trio
from libp2p.abc import IRawConnection
from libp2p.custom_types import THandler
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.tcp.tcp import TCP, TCPListener
from multiaddr import Multiaddr

from p2pavg.net.libp2p_speed import ReadAheadStream

logger = logging.getLogger(__name__)

# Connections that have said nothing yet, or have not finished their TLS handshake. Who means it does so within a few
# round trips: the oldest gives way to one more.
MAX_UNDECIDED = 128
UNDECIDED_SECONDS = 10.0

_TLS_HANDSHAKE = b"\x16"

OnTls = Callable[[socket.socket], Awaitable[None]]
"""Takes over an inbound connection whose first byte, still unread, begins a TLS handshake; and finishes that."""


async def _refuse(plain: socket.socket) -> None:
    plain.close()


class SniffingTCP(TCP):
    """libp2p's TCP, whose listeners pass on what is TLS."""

    def __init__(self) -> None:
        super().__init__()
        self.on_tls: OnTls = _refuse
        self._undecided: dict[trio.socket.SocketType, trio.CancelScope] = {}

    @property
    def undecided(self) -> list[trio.socket.SocketType]:
        """Connections that neither protocol has taken yet, the oldest first."""
        return list(self._undecided)

    def create_listener(self, handler_function: THandler) -> TCPListener:
        """A listener whose handler gets what is not TLS."""

        async def sort(found: ReadWriteCloser) -> None:
            assert isinstance(found, TrioTCPStream)
            if await self._is_libp2p(found.stream.socket):
                await handler_function(ReadAheadStream.of(found))

        return TCPListener(sort)

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        """libp2p's, with a stream that reads ahead."""
        connection = await super().dial(maddr)
        assert isinstance(connection, RawConnection)
        assert isinstance(connection.stream, TrioTCPStream)
        ReadAheadStream.of(connection.stream)
        return connection

    async def _is_libp2p(self, opened: trio.socket.SocketType) -> bool:
        """Otherwise it is done with: passed on, or given up, for the listener to close."""
        if len(self._undecided) >= MAX_UNDECIDED:
            self._undecided.pop(next(iter(self._undecided))).cancel()
        with trio.move_on_after(UNDECIDED_SECONDS) as scope:
            self._undecided[opened] = scope
            try:
                first = await opened.recv(1, socket.MSG_PEEK)
                if first != _TLS_HANDSHAKE:
                    return bool(first)
                await self.on_tls(socket.socket(fileno=opened.detach()))
            except OSError as error:
                logger.debug("an inbound connection ended before it began: %s", error)
            finally:
                self._undecided.pop(opened, None)
        return False
