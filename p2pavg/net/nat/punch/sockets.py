"""TCP simultaneous open: two peers connect to each other's port at the same time, and one connection results.

Both peers send a SYN. A router that has seen the SYN from inside lets the other one in. RFC 9293, section 3.5, allows a
connection whose two SYNs cross.

A listener at the same port, for the time of the punch, makes one connection of the two in the other cases as well:

* **Nothing drops the first SYN**, because a router does not filter, or because there is none. The system would refuse
  it, as long as this peer has not begun. The listener accepts it instead.
* **A router refuses a SYN.** The connection is tried again from the same port, after pauses of varying length. With
  equal pauses at both ends, a SYN that comes too early once would come too early each time.

Only a connection from exactly the expected endpoint is returned. It proves no identity: the handshake above it does.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
from contextlib import suppress

import trio

from p2pavg.base.errors import UnreachableError
from p2pavg.base.hosts import parse_host
from p2pavg.net.nat.punch import plan
from p2pavg.net.nat.punch.plan import Endpoint
from p2pavg.net.nat.reach.whoami import bound_socket

logger = logging.getLogger(__name__)

# The connects of one punch that are refused at once. The number bounds the packets that a hostile peer can make this
# process send to a third party.
MOST_CONNECTS = 10
_PAUSE_SECONDS = (0.05, 0.35)

# Connections that wait to be accepted. More than one comes only from strangers, and is closed.
_BACKLOG = 4


class FreshPort:
    """A local TCP port that no other socket uses, for one punch. It has no listener; its owner closes it.

    A probe may connect from the same port if its socket has SO_REUSEADDR and SO_REUSEPORT.

    Args:
        version: 4 or 6, the version of IP.

    Raises:
        OSError: there is no such port, or no IPv6 on this machine.
    """

    def __init__(self, version: int = 4) -> None:
        self.version = version
        self._holder = bound_socket(version)
        self.port: int = self._holder.getsockname()[1]

    def another(self) -> socket.socket:
        """Return one more non-blocking socket that is bound to the port. The caller closes it. Raises OSError."""
        return bound_socket(self.version, self.port)

    def close(self) -> None:
        """Give the port back. Connections that were made from it stay open."""
        self._holder.close()

    def __enter__(self) -> FreshPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def punch(
    port: FreshPort, remote: Endpoint, at: float, *, within: float | None = None
) -> socket.socket:
    """Connect a fresh port with the port of a peer that does the same.

    Args:
        remote: the endpoint at which the other peer's router shows its port.
        at: the time of trio's clock at which to begin.
        within: seconds after ``at`` in which there must be a connection; ``None`` takes PUNCH_SECONDS.

    Returns:
        The connected, non-blocking socket, which the caller owns.

    Raises:
        UnreachableError: there was no connection in time; the message says why.
    """
    within = plan.PUNCH_SECONDS if within is None else within
    crossing = _Crossing(port, remote)
    try:
        with trio.CancelScope(deadline=at + within):
            await crossing.run(at)
    except BaseException:
        crossing.close()
        raise
    if crossing.connection is None:
        raise UnreachableError(
            f"no connection from port {port.port} with port {remote.port} of {remote.host} within {within:.1f} s: "
            f"{crossing.reason}"
        )
    return crossing.connection


class _Crossing:
    """One punch: a listener and a connecting socket at one port, of which the first that succeeds wins."""

    def __init__(self, port: FreshPort, remote: Endpoint) -> None:
        self._port = port
        self._remote = remote
        self.connection: socket.socket | None = None
        self.reason = "no answer"

    async def run(self, at: float) -> None:
        """Return when there is a connection. If there is none, go on until the caller's deadline."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._accept, nursery.cancel_scope)
            nursery.start_soon(self._connect, at, nursery.cancel_scope)

    def close(self) -> None:
        """Close the connection that was made, if there is one."""
        if self.connection is not None:
            self.connection.close()

    def _take(self, found: socket.socket, all_of_it: trio.CancelScope) -> None:
        if self.connection is not None:
            found.close()
            return
        self.connection = found
        all_of_it.cancel()

    async def _accept(self, all_of_it: trio.CancelScope) -> None:
        try:
            with self._port.another() as listening:
                listening.listen(_BACKLOG)
                while self.connection is None:
                    await trio.lowlevel.wait_readable(listening.fileno())
                    try:
                        found, (host, port, *_) = listening.accept()
                    except (BlockingIOError, ConnectionAbortedError):
                        continue
                    if (str(parse_host(host)), port) == (self._remote.host, self._remote.port):
                        found.setblocking(False)
                        self._take(found, all_of_it)
                    else:
                        logger.debug("a connection from port %d of %s came to a port for a punch", port, host)
                        found.close()
        except OSError as error:
            logger.debug("no listener at port %d: %s", self._port.port, error)

    async def _connect(self, at: float, all_of_it: trio.CancelScope) -> None:
        await trio.sleep_until(at)
        for _ in range(MOST_CONNECTS):
            try:
                self._take(await self._connected(), all_of_it)
                return
            except OSError as error:
                # If the other SYN was accepted meanwhile, the system has no more room for this connection.
                if error.errno != errno.EADDRNOTAVAIL:
                    self.reason = error.strerror or str(error)
            await trio.sleep(random.uniform(*_PAUSE_SECONDS))

    async def _connected(self) -> socket.socket:
        opened = self._port.another()
        try:
            with suppress(BlockingIOError):
                opened.connect((self._remote.host, self._remote.port))
            await trio.lowlevel.wait_writable(opened.fileno())
            if code := opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))  # noqa: TRY301 - as the other errors of a connect
        except BaseException:
            opened.close()
            raise
        return opened
