"""One direct lane: a TLS connection that worker threads block on, and that any thread can end."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import trio

from p2pavg.errors import StreamBrokenError
from p2pavg.net.certificates import check_connection
from p2pavg.net.transport import Buffer, DirectLane, PeerId

if sys.platform != "win32":
    import fcntl
    import termios

# What is written between two looks at the counter: a thread gives up the GIL as often.
_PIECE_BYTES = 256 * 1024

_ACKNOWLEDGEMENT = b"\x06"

_UNSENT_BYTES = 128 * 1024

# A silent peer that has gone is noticed after 60 s, and a router on the way does not forget the connection.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class TlsLane(DirectLane):
    """A connection whose handshake is done.

    Whoever is in a call, and whoever watches the socket, is counted as a user: the last one closes the descriptor.
    One that is closed under a reader may be another connection's the moment after.
    """

    def __init__(self, connection: ssl.SSLSocket, remote: PeerId) -> None:
        self.remote = remote
        self.bytes_sent = 0
        """Handed to the kernel, which :meth:`unsent` says more of."""
        self.bytes_received = 0
        self._connection = connection
        self._lock = threading.Lock()
        self._users = 0
        self._aborted = False
        # The sender's: has it sent all of what it wanted, and has the receiver said so. Touched in trio only.
        self._finished = trio.Event()
        self._answered = trio.Event()
        self.owed = False
        """Whether something was sent that is not acknowledged."""

    @property
    def aborted(self) -> bool:
        """Whether this end has dropped the connection, or found it broken."""
        return self._aborted

    def send(self, data: Buffer) -> None:
        self.owed = True
        with self._using(), memoryview(data).cast("B") as view:
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                self._connection.sendall(piece)
                self.bytes_sent += len(piece)

    def receive_into(self, buffer: memoryview) -> None:
        with self._using(), buffer.cast("B") as view:
            filled, wanted, read = 0, len(view), self._connection.read
            while filled < wanted:
                # One record at most. Not recv_into(), which is the same with one more call around it.
                count = int(read(wanted - filled, view[filled:]))
                if count == 0:
                    raise StreamBrokenError(
                        f"the direct lane of {self.remote} ended {len(view) - filled} bytes early"
                    )
                filled += count
                self.bytes_received += count

    def acknowledge(self) -> None:
        with self._using():
            self._connection.sendall(_ACKNOWLEDGEMENT)

    def finish(self) -> None:
        """Nobody sends any more, so that the acknowledgement may be read. From trio."""
        self._finished.set()

    async def acknowledged(self) -> None:
        self.finish()
        answered = self._answered
        await answered.wait()
        if self.owed:
            raise StreamBrokenError(f"the direct lane to {self.remote} ended unacknowledged")

    async def watch(self) -> None:
        """The sender's, for as long as the lane lives: take acknowledgements. Returns when the lane has ended.

        A receiver sends nothing else. An acknowledgement may come while the last write has not returned yet, and
        OpenSSL is not to be asked about it before.
        """
        try:
            while True:
                await self.wait_readable(ours_to_read=False)
                if self.has_ended():
                    return
                await self._finished.wait()
                if self._take_acknowledgement():
                    self.owed = False
                    self._finished = trio.Event()
                    self._answered.set()
                    self._answered = trio.Event()
        finally:
            self._answered.set()

    def _take_acknowledgement(self) -> bool:
        """False when a piece of its record is missing."""
        with self._using():
            self._connection.setblocking(False)
            try:
                answer = self._connection.recv(1)
            except ssl.SSLWantReadError:
                return False
            finally:
                self._connection.setblocking(True)
            if answer != _ACKNOWLEDGEMENT:
                raise StreamBrokenError(f"{self.remote} acknowledged with {answer!r}")
            return True

    @contextmanager
    def _using(self) -> Iterator[None]:
        """A call that blocks. Whatever goes wrong in it ends the lane: how much has passed is unknown."""
        with self._user():
            try:
                yield
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                raise StreamBrokenError(self._why(error)) from None
            except BaseException:
                self.abort()
                raise

    def _why(self, error: Exception) -> str:
        why = "this process dropped it" if self._aborted else str(error) or type(error).__name__
        self.abort()
        return f"the direct lane with {self.remote} broke: {why}"

    @contextmanager
    def _user(self) -> Iterator[None]:
        with self._lock:
            if self._aborted:
                raise StreamBrokenError(f"the direct lane with {self.remote} was dropped by this process")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._close_if_unused()

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            # The plain socket's: SSLSocket.shutdown() would let go of the SSL object under a thread that uses it.
            with suppress(OSError):  # the other side was faster
                socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._aborted and self._users == 0:
            self._connection.close()

    async def wait_readable(self, *, ours_to_read: bool) -> None:
        """Return once there is something to read, or nothing ever will be.

        Args:
            ours_to_read: no other thread uses the lane, so that OpenSSL may be asked what it has decrypted already.

        Raises:
            StreamBrokenError: the lane was aborted before.
        """
        with self._user():
            if not (ours_to_read and self._connection.pending()):
                await trio.lowlevel.wait_readable(self._connection.fileno())

    def has_ended(self) -> bool:
        """Whether the other side has closed and nothing is left to read. Blocks for nothing; for an idle lane."""
        try:
            with self._user():
                if self._connection.pending():
                    return False
                return not socket.socket.recv(self._connection, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (OSError, StreamBrokenError):
            return True

    def is_readable(self) -> bool:
        """Whether anything has arrived, be it the end. Reads nothing."""
        try:
            with self._user():
                poll = select.poll()
                poll.register(self._connection, select.POLLIN)
                return bool(poll.poll(0))
        except (OSError, ValueError, StreamBrokenError):
            return True

    def unsent(self) -> int:
        """How many bytes the kernel holds that the other side has not confirmed; 0 where that cannot be asked."""
        if sys.platform == "win32":
            return 0
        try:
            with self._user():
                (queued,) = struct.unpack("i", fcntl.ioctl(self._connection, termios.TIOCOUTQ, bytes(4)))
        except (OSError, StreamBrokenError):
            return 0
        return int(queued)

    def detach(self) -> int:
        """The descriptor, which this lane forgets; in a forked child, where its lock may be held for ever."""
        return self._connection.detach()


def wrap(context: ssl.SSLContext, plain: socket.socket, *, server_name: str | None = None) -> ssl.SSLSocket:
    """A connection before its handshake; a client's when there is a ``server_name``. Takes over ``plain``.

    Raises:
        OSError: the other side has gone already.
    """
    try:
        _tune(plain)
        plain.setblocking(False)
        return context.wrap_socket(
            plain,
            server_side=server_name is None,
            server_hostname=server_name,
            do_handshake_on_connect=False,
        )
    except ValueError as error:
        plain.close()
        raise OSError(str(error)) from None
    except BaseException:
        plain.close()
        raise


async def shake_hands(connection: ssl.SSLSocket, trusted: Callable[[], bytes]) -> None:
    """Finish the handshake, and leave the connection in blocking mode; closed, if that fails or is cancelled.

    It waits in trio, not in a thread: strangers that begin and then say nothing would occupy one each. What is
    computed between two waits takes a millisecond.

    Args:
        connection: as :func:`wrap` makes it.
        trusted: the certificate that the other side must have shown, asked for at the end.

    Raises:
        OSError: the other side is gone, or is not the one that the context trusts.
    """
    try:
        while True:
            try:
                connection.do_handshake()
                break
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(connection.fileno())
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(connection.fileno())
        check_connection(connection, trusted())
        connection.setblocking(True)  # with a timeout instead, Python would poll before each read
    except ValueError as error:  # the other side was gone before it began
        connection.close()
        raise OSError(str(error)) from None
    except BaseException:
        connection.close()
        raise


def _tune(plain: socket.socket) -> None:
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    # What the kernel holds cannot be overtaken: by what is more urgent, or by other members' turns.
    if hasattr(trio.socket, "TCP_NOTSENT_LOWAT"):
        plain.setsockopt(socket.IPPROTO_TCP, trio.socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
