"""One direct lane: a TLS connection on which worker threads block, and which any thread can end."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.lanes.tls_connection import PIECE_BYTES, TlsConnection
from p2pavg.net.transport import Buffer, DirectLane, PeerId

if sys.platform != "win32":
    import fcntl
    import termios

_ACKNOWLEDGEMENT = b"\x06"


class TlsLane(DirectLane):
    """A lane over a connection whose handshake is done.

    It counts the users of the connection, so that the last one closes its descriptor. Every running call and every task
    that watches the socket is a user. If the descriptor were closed under a blocked reader, the system might give its
    number to another connection, and the reader would read from that one.
    """

    def __init__(self, connection: TlsConnection, remote: PeerId) -> None:
        self.remote = remote
        self.bytes_sent = 0
        """Bytes handed to the kernel so far; see :meth:`unsent`."""
        self.bytes_received = 0
        self.is_local = connection.is_local()
        self._connection = connection
        self._lock = threading.Lock()
        self._users = 0
        self.aborted = False
        """True if this end has dropped the connection, or found it broken."""
        # The sender has sent everything; the receiver has answered. Both are used from trio only.
        self._finished = trio.Event()
        self._answered = trio.Event()
        self.owed = False
        """True if something was sent that is not acknowledged."""

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Guard a blocking call. Any exception ends the lane, because the number of bytes moved is unknown then."""
        with self._user():
            try:
                yield
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                why = "this process dropped it" if self.aborted else str(error) or type(error).__name__
                self.abort()
                raise StreamBrokenError(f"the direct lane with {self.remote} broke: {why}") from None
            except BaseException:
                self.abort()
                raise

    @contextmanager
    def _user(self) -> Iterator[None]:
        """Count one more user while the block runs. Raises StreamBrokenError if the connection was aborted before."""
        with self._lock:
            if self.aborted:
                raise StreamBrokenError(f"the direct lane with {self.remote} was dropped by this process")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.aborted and self._users == 0:
            self._connection.close()

    def keep_unsent_below(self, count: int) -> None:
        with self._using():
            self._connection.keep_unsent_below(count)

    def wait_for_room(self) -> None:
        with self._using():
            self._connection.wait_for_room()

    def send(self, data: Buffer) -> None:
        self.owed = True
        with self._using(), memoryview(data).cast("B") as view:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                self._connection.send(piece)
                self.bytes_sent += len(piece)

    def receive_into(self, buffer: memoryview) -> None:
        with self._using(), buffer.cast("B") as view:
            filled, wanted, receive = 0, len(view), self._connection.receive_into
            while filled < wanted:
                count = receive(view[filled:])
                if count == 0:
                    raise StreamBrokenError(
                        f"the direct lane of {self.remote} ended {len(view) - filled} bytes early"
                    )
                filled += count
                self.bytes_received += count

    async def receive_some(self, count: int) -> bytes:
        while True:
            with self._using():
                found = self._connection.receive_nowait(count)
            if found is None:
                await self.wait_readable(ours_to_read=False)
                continue
            if not found:
                raise StreamBrokenError(f"the direct lane of {self.remote} ended {count} bytes early")
            self.bytes_received += len(found)
            return found

    async def send_from_loop(self, data: Buffer) -> None:
        self.owed = True
        with memoryview(data).cast("B") as view:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                await self._send_from_loop(piece)
                self.bytes_sent += len(piece)

    async def acknowledge_from_loop(self) -> None:
        await self._send_from_loop(_ACKNOWLEDGEMENT)

    async def _send_from_loop(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        with self._using():
            left = self._connection.send_nowait(data)
        while left:
            with self._using():  # if this is cancelled, half a record was sent
                await trio.lowlevel.wait_writable(self._connection.fileno())
                left = self._connection.send_rest(left)

    def acknowledge(self) -> None:
        with self._using():
            self._connection.send(_ACKNOWLEDGEMENT)

    def finish(self) -> None:
        """Note that no thread sends any more, so that the acknowledgement may be read. Call it from trio."""
        self._finished.set()

    async def acknowledged(self) -> None:
        self.finish()
        answered = self._answered
        await answered.wait()
        if self.owed:
            raise StreamBrokenError(f"the direct lane to {self.remote} ended unacknowledged")

    async def watch(self) -> None:
        """Receive acknowledgements, as the sender, until the lane has ended.

        A receiver sends nothing else. An acknowledgement may arrive before the last write has returned. It is read only
        after :meth:`finish`, because OpenSSL must not be used by two threads at once.
        """
        try:
            while True:
                await self.wait_readable(ours_to_read=False)
                if self.has_ended():
                    return
                if (
                    not self._finished.is_set()
                ):  # for an event that is set, trio would make a turn of the event loop
                    await self._finished.wait()
                if self._take_acknowledgement():
                    self.owed = False
                    self._finished = trio.Event()
                    self._answered.set()
                    self._answered = trio.Event()
        finally:
            self._answered.set()

    def _take_acknowledgement(self) -> bool:
        """Read an acknowledgement. Return false if its record is incomplete."""
        with self._using():
            answer = self._connection.receive_nowait(1)
            if answer is None:
                return False
            if answer != _ACKNOWLEDGEMENT:
                raise StreamBrokenError(f"{self.remote} acknowledged with {answer!r}")
            return True

    def abort(self) -> None:
        with self._lock:
            if not self.aborted:
                self.aborted = True
                self._connection.shut_down()
                self._close_if_unused()

    async def wait_readable(self, *, ours_to_read: bool) -> None:
        """Wait until bytes or the end have arrived.

        Args:
            ours_to_read: no other thread uses the lane, so OpenSSL may be asked for bytes that it holds already.

        Raises:
            StreamBrokenError: the lane was aborted before.
        """
        with self._user():
            if not (ours_to_read and self._connection.holds_bytes()):
                await trio.lowlevel.wait_readable(self._connection.fileno())

    def has_ended(self) -> bool:
        """Return whether the other side has closed and nothing is left to read. Never blocks; for idle lanes."""
        try:
            with self._user():
                return self._connection.has_ended()
        except (OSError, StreamBrokenError):
            return True

    def is_readable(self) -> bool:
        """Return whether bytes or the end have arrived. Reads nothing."""
        try:
            with self._user():
                return self._connection.is_readable()
        except (OSError, ValueError, StreamBrokenError):
            return True

    def unsent(self) -> int:
        """Return the bytes in the kernel that the other side has not confirmed; 0 where the kernel cannot tell."""
        if sys.platform == "win32":
            return 0
        try:
            with self._user():
                (queued,) = struct.unpack(
                    "i", fcntl.ioctl(self._connection.fileno(), termios.TIOCOUTQ, bytes(4))
                )
        except (OSError, StreamBrokenError):
            return 0
        return int(queued)

    def detach(self) -> int:
        """Detach the descriptor and return it.

        For a forked child, where the lock may stay locked, so it is not taken.
        """
        return self._connection.detach()
