"""Connections of the monitor's server: how many there are, how long they may be silent, and how they end.

The server of HTTP sends under a shield, so a client that does not read would keep the program from ending. It also sets
no bound on the time of a request, and none on the number of connections. This module does all three.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import trio

from p2pavg.base.limits import REPLY_SECONDS, STALL_SECONDS
from p2pavg.net.limits.call_budget import CallBudget
from p2pavg.net.limits.sources import prefix_of

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
"""Four for each page that may look on; a browser opens up to six to a host, most of them for a moment."""
PIECE_BYTES = 64 * 1024
ANSWER_COST_SECONDS = 0.002
"""Processor time that a connection is charged for, before the overhead: 3 ms were measured for one with one answer."""
_ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 seconds: closing drops what is not sent, and tells the client so."""


class Connection:
    """A stream over TCP to a client that may neither send nor read.

    It has what the server of HTTP uses of :class:`trio.SocketStream`.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._pieces = 0

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket, for its addresses."""
        return self._stream.socket

    async def send_all(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            trio.BrokenResourceError: the client is gone, or takes nothing; the connection is closed then.
        """
        with memoryview(data) as view:
            for start in range(0, len(view), PIECE_BYTES):
                # The caller may hold a shield, but this deadline lies within it.
                with trio.move_on_after(REPLY_SECONDS) as sending:
                    await self._stream.send_all(view[start : start + PIECE_BYTES])
                if sending.cancelled_caught:
                    self.abort()
                    raise trio.BrokenResourceError(f"the client has read nothing for {REPLY_SECONDS:g} s")
                self._pieces += 1

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return the next bytes, empty at the end.

        Raises:
            trio.BrokenResourceError: the client is gone, or nothing was received or sent for 30 s.
        """
        while True:
            before = self._pieces
            with trio.move_on_after(STALL_SECONDS):
                return await self._stream.receive_some(max_bytes)
            if self._pieces == before:
                self.abort()
                raise trio.BrokenResourceError(f"nothing has moved for {STALL_SECONDS:g} s")

    async def send_eof(self) -> None:
        """Tell the client that nothing follows."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Close the connection at once, and wake the tasks that send or receive."""
        if self.socket.fileno() >= 0:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self.socket.close()


Answer = Callable[[Connection], Awaitable[None]]
"""Serves one connection until it ends."""


class _Connections:
    """The open connections."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._open: set[Connection] = set()
        self._budget = CallBudget()
        self._has_ended = False

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve a new connection, or close it if there are too many, or too many of its host."""
        connection = Connection(stream)
        if self._has_ended or len(self._open) >= MAX_CONNECTIONS or not self._may_come(connection):
            connection.abort()
            return
        self._open.add(connection)
        try:
            await self._answer(connection)
        except Exception:
            logger.exception("a connection to the monitor has failed")
        finally:
            self._open.discard(connection)
            connection.abort()

    def _may_come(self, connection: Connection) -> bool:
        """Return whether the host of a connection has budget left, and charge it for this one."""
        try:
            host = str(connection.socket.getpeername()[0])
        except OSError:  # the connection is gone already
            return False
        now, prefix = trio.current_time(), prefix_of(host)
        if self._budget.delay(now, host, prefix) != 0.0:
            return False
        self._budget.charge(now, host, prefix, seconds=ANSWER_COST_SECONDS, count=0)
        return True

    def end(self) -> None:
        """Close all connections at once, and take no more."""
        self._has_ended = True
        for connection in self._open:
            connection.abort()


@asynccontextmanager
async def serving(listener: socket.socket, answer: Answer) -> AsyncIterator[None]:
    """Accept connections for as long as the block runs; no client delays its end.

    Args:
        listener: a bound socket; it is closed at the end.
        answer: serves one connection.
    """
    listener.listen()
    connections = _Connections(answer)
    async with trio.open_nursery() as nursery:
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
        await nursery.start(partial(trio.serve_listeners, connections.handle, listeners))
        try:
            yield
        finally:
            connections.end()
            nursery.cancel_scope.cancel()
