"""A TLS connection through memory buffers: OpenSSL encrypts between buffers, and this class moves them over a socket.

If OpenSSL used the socket itself, it would make two system calls for each record of 16 KiB that it reads, and one for
each that it writes. Moving many records at once saves a quarter of the processor time.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property

import trio

from p2pavg.base.hosts import parse_host
from p2pavg.net.keep_alive import keep_alive
from p2pavg.net.lanes.certificates import check_connection
from p2pavg.net.transport import Buffer

# The bytes that are encrypted and then handed to the system at once. A lane's thread releases the GIL once per piece.
PIECE_BYTES = 256 * 1024

_READ_BYTES = 256 * 1024
_HANDSHAKE_READ_BYTES = 16 * 1024


class TlsConnection:
    """One end of a TLS connection: the client's if there is a ``server_name``.

    It takes over the socket ``plain``. Two threads must not use it at once.

    Raises:
        OSError: the other side has gone already.
    """

    def __init__(
        self, context: ssl.SSLContext, plain: socket.socket, *, server_name: str | None = None
    ) -> None:
        self._socket = plain
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(plain)
            plain.setblocking(False)
            self.tls = context.wrap_bio(
                self._received, self._to_send, server_side=server_name is None, server_hostname=server_name
            )
        except BaseException:
            plain.close()
            raise

    async def shake_hands(self, trusted: Callable[[], bytes]) -> None:
        """Finish the handshake and switch to blocking mode. If that fails or is cancelled, close the connection.

        The handshake waits in trio and not in a thread, because each silent stranger would occupy a thread. The
        computation between two waits takes about a millisecond.

        Args:
            trusted: returns the certificate that the other side must have shown; called at the end.

        Raises:
            OSError: the other side is gone, or has shown a certificate that the context does not trust.
        """
        try:
            while not self._has_shaken_hands():
                await self._send_what_waits()
                await trio.lowlevel.wait_readable(self._socket.fileno())
                if not self._receive_without_waiting():
                    raise OSError("the other side ended the connection")  # noqa: TRY301 - as any other end
            await self._send_what_waits()
            check_connection(self.tls, trusted())
            self._socket.setblocking(True)  # with a socket timeout, Python would poll before each read
        except BaseException as error:
            if isinstance(error, ssl.SSLError):
                with suppress(OSError):  # the alert that tells the other side why; it may be gone
                    self._socket.send(self._to_send.read())
            self._socket.close()
            raise

    def _has_shaken_hands(self) -> bool:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    async def _send_what_waits(self) -> None:
        left = memoryview(self._to_send.read())
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket.fileno())

    def _receive_without_waiting(self) -> bool:
        """Receive what has arrived. Return false if the other side has ended the connection."""
        try:
            found = self._socket.recv(_HANDSHAKE_READ_BYTES, _DONT_WAIT)
        except BlockingIOError:
            return True
        self._received.write(found)
        return bool(found)

    # -- blocking, once the handshake is done

    def keep_unsent_below(self, count: int) -> None:
        """Let :meth:`send` block while the system holds ``count`` unsent bytes, where the system supports that."""
        if hasattr(trio.socket, "TCP_NOTSENT_LOWAT"):
            self._socket.setsockopt(socket.IPPROTO_TCP, trio.socket.TCP_NOTSENT_LOWAT, count)

    def wait_for_room(self) -> None:
        """Block until the system accepts more bytes, or the connection has ended."""
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            poll.poll()
        else:
            select.select([], [self._socket], [])

    def send(self, data: Buffer) -> None:
        """Send all of ``data``, at most PIECE_BYTES. Raises OSError."""
        left = memoryview(data)
        while left:
            left = left[self.tls.write(left) :]
        self._socket.sendall(self._to_send.read())

    def receive_into(self, view: memoryview) -> int:
        """Receive at least one byte and at most one record. Return the count; 0 at the end. Raises OSError."""
        while True:
            try:
                return int(self.tls.read(len(view), view))
            except ssl.SSLWantReadError:
                count = self._socket.recv_into(self._room)
                if count == 0:
                    return 0
                self._received.write(self._room[:count])

    @cached_property
    def _room(self) -> memoryview:
        return memoryview(bytearray(_READ_BYTES))

    # -- without waiting

    def send_nowait(self, data: Buffer) -> memoryview:
        """Encrypt all of ``data``, send what the system accepts now, and return the rest. Raises OSError."""
        left = memoryview(data)
        while left:
            left = left[self.tls.write(left) :]
        return self.send_rest(memoryview(self._to_send.read()))

    def send_rest(self, encrypted: memoryview) -> memoryview:
        """Send what the system accepts now of the rest of :meth:`send_nowait`; return what is left. Raises OSError."""
        if not (_DONT_WAIT or select.select([], [self._socket], [], 0)[1]):
            return encrypted
        try:
            return encrypted[self._socket.send(encrypted, _DONT_WAIT) :]
        except BlockingIOError:
            return encrypted

    def receive_nowait(self, count: int) -> bytes | None:
        """Return up to ``count`` bytes; ``None`` if no record is complete; empty at the end. Raises OSError."""
        found = self._read_what_is_here(count)
        if found is None:
            found = self._read_what_is_here(count) if self._receive_without_waiting() else b""
        return found

    def _read_what_is_here(self, count: int) -> bytes | None:
        try:
            return self.tls.read(count)
        except ssl.SSLWantReadError:
            return None

    def holds_bytes(self) -> bool:
        """Return whether bytes were received from the system that are not read yet."""
        return bool(self.tls.pending() or self._received.pending)

    def is_readable(self) -> bool:
        """Return whether bytes or the end have arrived. Raises OSError or ValueError once it is closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return self.holds_bytes() or bool(poll.poll(0))

    def has_ended(self) -> bool:
        """Return whether the other side has closed and nothing is left to read. Raises OSError."""
        if self.holds_bytes():
            return False
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | _DONT_WAIT)
        except BlockingIOError:
            return False

    # -- from any thread

    def is_local(self) -> bool:
        """Return whether the other end has a loopback address; False if it has gone already."""
        try:
            address = parse_host(self._socket.getpeername()[0])
        except OSError:
            return False
        return address is not None and address.is_loopback

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def shut_down(self) -> None:
        """End both directions. Calls that are blocked at either end return."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor. No thread may be using it."""
        self._socket.close()

    def detach(self) -> int:
        """Detach the descriptor from this connection and return it."""
        return self._socket.detach()


# Windows has no such flag. There, callers always poll for readiness before.
_DONT_WAIT = getattr(socket, "MSG_DONTWAIT", 0)
