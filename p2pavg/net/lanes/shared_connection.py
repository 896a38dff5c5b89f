"""A TLS connection that threads and tasks share, and that any of them can end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.lanes.tls_connection import TlsConnection
from p2pavg.net.transport import PeerId


class SharedConnection:
    """Counts the users of a connection, so that the last one closes its descriptor.

    Every running call and every task that watches the socket is a user. If the descriptor were closed under a blocked
    reader, the system might give its number to another connection, and the reader would read from that one.
    """

    def __init__(self, connection: TlsConnection, remote: PeerId) -> None:
        self._connection = connection
        self._remote = remote
        self._lock = threading.Lock()
        self.aborted = False
        self.users = 0

    @contextmanager
    def using(self) -> Iterator[None]:
        """Guard a blocking call. Any exception ends the lane, because the number of bytes moved is unknown then."""
        with self.user():
            try:
                yield
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                raise StreamBrokenError(self._why(error)) from None
            except BaseException:
                self.abort()
                raise

    def _why(self, error: Exception) -> str:
        why = "this process dropped it" if self.aborted else str(error) or type(error).__name__
        self.abort()
        return f"the direct lane with {self._remote} broke: {why}"

    @contextmanager
    def user(self) -> Iterator[None]:
        """Count one more user while the block runs. Raises StreamBrokenError if the connection was aborted before."""
        with self._lock:
            if self.aborted:
                raise StreamBrokenError(f"the direct lane with {self._remote} was dropped by this process")
            self.users += 1
        try:
            yield
        finally:
            with self._lock:
                self.users -= 1
                self._close_if_unused()

    def abort(self) -> None:
        """End the connection. Blocked calls of other threads raise StreamBrokenError."""
        with self._lock:
            if self.aborted:
                return
            self.aborted = True
            self._connection.shut_down()
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.aborted and self.users == 0:
            self._connection.close()
