"""One direct lane: a TLS connection that worker threads block on, and that any thread can end."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from p2pavg.errors import StreamBrokenError
from p2pavg.net.lanes.tls_connection import PIECE_BYTES, TlsConnection
from p2pavg.net.transport import Buffer, DirectLane, PeerId

if sys.platform != "win32":
    import fcntl
    import termios

_ACKNOWLEDGEMENT = b"\x06"


class TlsLane(DirectLane):
    """A connection whose handshake is done.

    Whoever is in a call, and whoever watches the socket, is counted as a user: the last one closes the descriptor.
    One that is closed under a reader may be another connection's the moment after.
    """

    def __init__(self, connection: TlsConnection, remote: PeerId) -> None:
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

    async def receive_exactly(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            with self._using():
                found = self._connection.receive_nowait(count - len(received))
            if found is None:
                await self.wait_readable(ours_to_read=False)
            elif not found:
                raise StreamBrokenError(
                    f"the direct lane of {self.remote} ended {count - len(received)} bytes early"
                )
            else:
                received += found
                self.bytes_received += len(found)
        return received

    def acknowledge(self) -> None:
        with self._using():
            self._connection.send(_ACKNOWLEDGEMENT)

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
            answer = self._connection.receive_nowait(1)
            if answer is None:
                return False
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
            self._connection.shut_down()
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
            if not (ours_to_read and self._connection.holds_bytes()):
                await trio.lowlevel.wait_readable(self._connection.fileno())

    def has_ended(self) -> bool:
        """Whether the other side has closed and nothing is left to read. Blocks for nothing; for an idle lane."""
        try:
            with self._user():
                return self._connection.has_ended()
        except (OSError, StreamBrokenError):
            return True

    def is_readable(self) -> bool:
        """Whether anything has arrived, be it the end. Reads nothing."""
        try:
            with self._user():
                return self._connection.is_readable()
        except (OSError, ValueError, StreamBrokenError):
            return True

    def unsent(self) -> int:
        """How many bytes the kernel holds that the other side has not confirmed; 0 where that cannot be asked."""
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
        """The descriptor, which this lane forgets; in a forked child, where its lock may be held for ever."""
        return self._connection.detach()
