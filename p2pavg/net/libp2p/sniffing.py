"""One listening port for three protocols, which the first byte of a connection tells apart.

A TLS handshake begins with 0x16. libp2p's negotiation begins with the length of a line, 0x13 in every implementation.
A whoami probe begins with ``P`` (:mod:`p2pavg.net.nat.reach.whoami`).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable

import trio
from libp2p.abc import IRawConnection
from libp2p.custom_types import THandler
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.tcp.tcp import TCP, TCPListener
from multiaddr import Multiaddr

from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.keep_alive import keep_alive
from p2pavg.net.libp2p.speed import ReadAheadStream
from p2pavg.net.limits.entrance import Entrance

logger = logging.getLogger(__name__)


# The backlog: connections that the system has accepted and this process has not. trio's default of 128 fills quickly
# when many peers connect at once, and a peer that finds it full retries a second later.
BACKLOG = 1024

_TLS_HANDSHAKE = b"\x16"
_WHOAMI = b"P"
_LIBP2P_GREETING = b"\x13/multistream/1.0.0\n"

TakeOver = Callable[[socket.socket], Awaitable[None]]
"""Takes over an inbound connection with all bytes unread, and does what its protocol wants."""


async def _refuse(plain: socket.socket) -> None:
    plain.close()


class SniffingTCP(TCP):
    """libp2p's TCP transport. Its listeners pass TLS connections on, and hold no more connections than allowed."""

    def __init__(self, entrance: Entrance) -> None:
        super().__init__()
        self.on_tls: TakeOver = _refuse
        """Finishes the handshake of a TLS connection."""
        self.on_whoami: TakeOver = _refuse
        """Answers a whoami probe."""
        self._entrance = entrance
        self._undecided: dict[trio.socket.SocketType, trio.CancelScope] = {}

    @property
    def undecided(self) -> list[trio.socket.SocketType]:
        """Connections whose protocol is not known yet, the oldest first."""
        return list(self._undecided)

    def create_listener(self, handler_function: THandler) -> TCPListener:
        """Make a listener whose handler gets the libp2p connections."""

        async def sort(found: ReadWriteCloser) -> None:
            assert isinstance(found, TrioTCPStream)
            keep_alive(found.stream.socket)
            with self._entrance.arriving(_host_of(found.stream.socket)) as arrival:
                stream = await self._libp2p_stream(found)
                if stream is not None:
                    self._entrance.admission.speaks(arrival)
                    stream.arrival = arrival
                    await handler_function(stream)

        return TCPListener(sort)

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        """Dial as libp2p does, but with a stream that reads ahead."""
        connection = await super().dial(maddr)
        assert isinstance(connection, RawConnection)
        assert isinstance(connection.stream, TrioTCPStream)
        keep_alive(connection.stream.stream.socket)
        ReadAheadStream.of(connection.stream)
        return connection

    async def _libp2p_stream(self, found: TrioTCPStream) -> ReadAheadStream | None:
        """Return the stream if libp2p's greeting came on it.

        Otherwise return ``None``: the connection was passed on, or the listener must close it.
        """
        opened = found.stream.socket
        # The timeout of the first line, or of the whole TLS handshake: a few round trips. p2pavg.net.limits.admission
        # limits the number of connections that may be in this state.
        with trio.move_on_after(REPLY_SECONDS) as scope:
            self._undecided[opened] = scope
            try:
                first = await opened.recv(1, socket.MSG_PEEK)
                if first == _TLS_HANDSHAKE:
                    await self.on_tls(socket.socket(fileno=opened.detach()))
                elif first == _WHOAMI:
                    await self.on_whoami(socket.socket(fileno=opened.detach()))
                elif first:
                    stream = ReadAheadStream.of(found)
                    greeting = await stream.look_ahead(len(_LIBP2P_GREETING))
                    return stream if greeting == _LIBP2P_GREETING else None
            except (OSError, IOException) as error:
                logger.debug("an inbound connection ended before it began: %s", error)
            except Exception:
                logger.exception("an inbound connection of %s is dropped", _host_of(opened))
            finally:
                self._undecided.pop(opened, None)
        return None


def accept_more_at_once(listener: TCPListener) -> None:
    """Set the backlog of a listener to BACKLOG."""
    for opened in listener.listeners:
        opened.socket.listen(BACKLOG)


def _host_of(opened: trio.socket.SocketType) -> str:
    try:
        return str(opened.getpeername()[0])
    except OSError:  # the connection is gone already
        return ""
