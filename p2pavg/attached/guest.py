"""One connection of a process that is attached to this peer: what it is sent, and why it is ended."""

from __future__ import annotations

import array
import logging
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import trio

from p2pavg.attached.messages import MAX_DESCRIPTORS, frame

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 32 * 2**20
"""A process that does not read so much is dropped. A board of 1024 peers is 4 MiB."""


class Guest:
    """A process that is attached to this peer.

    Args:
        stream: its socket.
        name: unique among the attached processes.
    """

    def __init__(self, stream: trio.socket.SocketType, name: str) -> None:
        self.name = name
        self._socket = stream
        self._queue: deque[tuple[bytes, Sequence[int]]] = deque()
        self._queued = 0
        self._filled = trio.Event()
        self.scope = trio.CancelScope()
        """Ends the connection when it is cancelled."""

    def send(self, *fields: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message soon, in order.

        Args:
            descriptors: of files to pass with it. They may be closed when this returns.

        Raises:
            OSError: no further descriptor can be opened.
        """
        data = frame(*fields)
        self._queue.append((data, _copies(descriptors)))
        self._queued += len(data)
        if self._queued > MAX_QUEUED_BYTES:
            self.drop("it does not read its messages")
        self._filled.set()

    def drop(self, reason: str) -> None:
        """End the connection."""
        if not self.scope.cancel_called:
            logger.warning("the attached process %s is dropped: %s", self.name, reason)
            self.scope.cancel()

    async def write(self) -> None:
        """Send what is queued, until cancelled or until the process has closed its end."""
        try:
            while True:
                await self._filled.wait()
                self._filled = trio.Event()
                while self._queue:
                    data, descriptors = self._queue.popleft()
                    try:
                        await self._send(data, descriptors)
                    finally:
                        _close(descriptors)
                    self._queued -= len(data)
        except OSError as error:
            logger.debug("the process %s takes no more messages: %s", self.name, error)
            self.scope.cancel()

    def close(self) -> None:
        """Forget what is queued, when the connection has ended."""
        while self._queue:
            _close(self._queue.popleft()[1])

    async def _send(self, data: bytes, descriptors: Sequence[int]) -> None:
        rest = memoryview(data)
        if descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())
            rest = rest[await self._socket.sendmsg([rest], [rights]) :]
        while rest:
            rest = rest[await self._socket.send(rest) :]


async def receive_with_files(connection: trio.socket.SocketType, max_bytes: int) -> tuple[bytes, list[int]]:
    """Return the next bytes of a connection, and the descriptors that came with them; no bytes at its end."""
    found = array.array("i")
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * found.itemsize)
    data, ancillary, _, _ = await connection.recvmsg(max_bytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return data, found.tolist()


def _copies(descriptors: Iterable[int]) -> list[int]:
    """Return descriptors of the same files that are this connection's alone."""
    found: list[int] = []
    try:
        for descriptor in descriptors:
            found.append(os.dup(descriptor))
    except OSError:
        _close(found)
        raise
    return found


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
