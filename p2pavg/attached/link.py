"""The connection of an attached process to its peer, and its way back when the peer is started again."""

from __future__ import annotations

import array
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from p2pavg.attached.address import PREFIX, user_of
from p2pavg.attached.messages import MAX_DESCRIPTORS, TO_PROCESS, VERSION, Frames, frame, read
from p2pavg.base.errors import (
    AccumulateError,
    AttachError,
    BusyError,
    ClosedError,
    ConfigError,
    P2PAvgError,
    RemoteProtocolError,
)

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0
SEND_SECONDS = 10.0
"""A peer that takes no bytes for this long counts as gone."""
STOP_SECONDS = 10.0
_READ_BYTES = 2**18
DESCRIPTORS_WITH = {"declared": 2, "fetched": 1}
"""The number of descriptors with a message of the peer, by its kind."""
_ERRORS: dict[str, type[P2PAvgError]] = {
    error.__name__: error for error in (AccumulateError, BusyError, ClosedError, ConfigError)
}


def error_of(kind: str, reason: str) -> P2PAvgError:
    """Return the exception that the peer has named."""
    return _ERRORS.get(kind, AttachError)(reason)


class Listener(Protocol):
    """One averager's end of the connection; called in the connection's thread, with :attr:`Link.changed` held."""

    def attached(self) -> None: ...
    def lost(self, reason: str) -> None: ...
    def take(self, kind: str, fields: tuple[Any, ...], descriptors: Callable[[], int]) -> None: ...


class Link:
    """Keeps a process attached to the peer at a path, in a thread of its own.

    Args:
        path: of the peer's socket.
        name: of this process.
    """

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name
        self.changed = threading.Condition(threading.RLock())
        """Guards everything that the connection's thread and the callers share."""
        self.peer_id = ""
        self.addresses: tuple[str, ...] = ()
        self.listeners: dict[int, Listener] = {}
        self._process = os.getpid()
        self._socket: socket.socket | None = None
        self._descriptors: deque[int] = deque()
        self._frames = Frames()
        self._early: list[bytes] = []  # messages that came with the peer's first one
        self._refusal: P2PAvgError | None = None
        self._refused = False  # for good
        self._reason = "no connection yet"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="p2pavg-attached", daemon=True)

    @property
    def is_up(self) -> bool:
        """True while the peer is there."""
        return self._socket is not None

    @property
    def why_down(self) -> str:
        """The reason why this process is not attached at present, and the remedy."""
        return (
            f"the peer at {PREFIX}{self.path} is not there ({self._reason}); start it again with the same identity"
            " file: this process goes on by itself"
        )

    def start(self, timeout: float) -> None:
        """Attach for the first time.

        Raises:
            AttachError: no peer of this user has answered within ``timeout`` seconds.
            BusyError, ConfigError: the peer refuses this process.
        """
        self._thread.start()
        with self.changed:
            self.changed.wait_for(lambda: self.is_up or self._refused, timeout)
            if self.is_up:
                return
        self.stop()
        raise self._refusal or AttachError(
            f"no peer answers at {PREFIX}{self.path} ({self._reason})",
            remedy=f"start one as the same user: `p2pavg peer --attach {self.path}`",
        )

    def stop(self) -> None:
        """Leave the peer."""
        if os.getpid() != self._process:
            return
        self._closing.set()
        with self.changed:
            if self._socket is not None:
                self._shut()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("the thread of the attachment did not end within %.0f s", STOP_SECONDS)

    def check(self) -> None:
        """Raise ClosedError if this process has left, or is a fork of the one that attached."""
        if os.getpid() != self._process:
            raise ClosedError(
                f"this averager belongs to process {self._process} and cannot be used after a fork"
            )
        if self._closing.is_set():
            raise ClosedError("this process has left its peer")

    def send(self, *fields: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message, with :attr:`changed` held; do nothing if the peer is not there.

        Args:
            descriptors: of files to pass with it.
        """
        if self._socket is None:
            return
        try:
            data = memoryview(frame(*fields))
            if descriptors:
                data = data[socket.send_fds(self._socket, [data], list(descriptors)) :]
            self._socket.sendall(data)
        except OSError as error:
            self._reason = f"it took no message: {error}"
            self._shut()

    def _shut(self) -> None:
        assert self._socket is not None
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        except OSError as error:
            logger.debug("the connection is gone already: %s", error)

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._closing.is_set():
            try:
                with self._connected() as connection:
                    pause = FIRST_PAUSE_SECONDS
                    self._serve(connection)
            except (OSError, RemoteProtocolError, AttachError) as error:
                self._reason = str(error)
            except P2PAvgError as error:
                self._reason = str(error)
                # The peer may not have noticed yet that the last process of this name, or this one's last connection,
                # is gone.
                if not self.peer_id:
                    self._refusal = error
                    if not isinstance(error, BusyError):
                        with self.changed:
                            self._refused = True
                            self.changed.notify_all()
                        return
            self._closing.wait(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _connected(self) -> socket.socket:
        """Return a connection to a peer that has taken this process in."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(SEND_SECONDS)
            connection.connect(self.path)
            self._attach(connection)
        except BaseException:
            connection.close()
            raise
        seconds = int(SEND_SECONDS)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
        return connection

    def _attach(self, connection: socket.socket) -> None:
        if user_of(connection) != os.geteuid():
            raise AttachError("another user's process serves the socket")
        connection.sendall(frame("attach", VERSION, self.name))
        self._early = self._answer(connection)

    def _answer(self, connection: socket.socket) -> list[bytes]:
        self._frames = Frames()
        messages: list[bytes] = []
        while not messages:
            messages = self._frames.feed(self._receive(connection))
        kind, fields = read(messages[0], TO_PROCESS)
        if kind == "refused":
            raise error_of(*fields[1:])
        if kind != "attached" or fields[0] != VERSION or not all(type(text) is str for text in fields[2]):
            raise RemoteProtocolError(f"the peer began with {kind}")
        if self.peer_id and self.peer_id != fields[1]:
            logger.warning(
                "the peer at %s%s has another identity than before: give it an identity file",
                PREFIX,
                self.path,
            )
        self.peer_id, self.addresses = fields[1], fields[2]
        return messages[1:]

    def _serve(self, connection: socket.socket) -> None:
        """Handle the peer's messages until the connection ends."""
        with self.changed:
            self._socket = connection
            for listener in tuple(self.listeners.values()):
                listener.attached()
            self.changed.notify_all()
        messages = self._early
        try:
            while not self._closing.is_set():
                for message in messages:
                    self._take(message)
                messages = self._frames.feed(self._receive(connection))
        except (OSError, RemoteProtocolError) as error:
            self._reason = str(error)
        finally:
            with self.changed:
                self._socket = None
                while self._descriptors:
                    os.close(self._descriptors.popleft())
                if not self._closing.is_set():
                    logger.warning("%s", self.why_down)
                for listener in tuple(self.listeners.values()):
                    listener.lost(self.why_down)
                self.changed.notify_all()

    def _receive(self, connection: socket.socket) -> bytes:
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, _, _ = connection.recvmsg(_READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
                self._descriptors.extend(found)
        if not data:
            raise ConnectionResetError("it has closed the connection")
        return data

    def _take(self, message: bytes) -> None:
        kind, fields = read(message, TO_PROCESS)
        with self.changed:
            listener = self.listeners.get(fields[0])
            if listener is not None:  # else it was closed while the message was on its way
                listener.take(kind, fields[1:], self._descriptor)
            else:
                for _ in range(DESCRIPTORS_WITH.get(kind, 0)):
                    os.close(self._descriptor())
            self.changed.notify_all()

    def _descriptor(self) -> int:
        if not self._descriptors:
            raise RemoteProtocolError("a segment without a descriptor")
        return self._descriptors.popleft()


def wait_until(link: Link, ready: Callable[[], bool], timeout: float) -> bool:
    """Wait until ``ready()`` or until the peer is gone; return whether it is ready.

    Call it with :attr:`Link.changed` held.
    """
    end = time.monotonic() + timeout
    while not ready() and link.is_up:
        left = end - time.monotonic()
        if left <= 0:
            break
        link.changed.wait(left)
    return ready()
