"""Unix sockets for processes of one user: a socket that only its owner may use, and streams over it.

The socket is for its owner in two ways: by the modes of the file and its folder, and by the credentials that the kernel
states of each caller. Where a system states none (anything but Linux), the modes alone decide.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio

from p2pavg.base.errors import ClosedError, ControlError, P2PAvgError, StreamBrokenError, is_shortage
from p2pavg.base.files import locked
from p2pavg.base.limits import LOOK_SECONDS
from p2pavg.net.transport import Buffer, Stream

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64  # of a control socket, at once
MAX_PATH_BYTES = 107  # of the name in a socket's address on Linux; other systems allow 103
_BACKLOG = 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class UnixStream(Stream):
    """A stream to a process of this machine. ``remote`` names the process."""

    def __init__(self, stream: trio.SocketStream, remote: str) -> None:
        self.remote = remote
        self._stream = stream

    async def send_all(self, data: Buffer) -> None:
        """See :class:`~p2pavg.net.transport.Stream`."""
        with _own_errors():
            await self._stream.send_all(memoryview(data))

    async def receive_some(self, max_bytes: int) -> bytes:
        """See :class:`~p2pavg.net.transport.Stream`."""
        with _own_errors():
            return bytes(await self._stream.receive_some(max_bytes))

    async def aclose(self) -> None:
        """Close both directions; bytes that were sent still arrive."""
        await trio.aclose_forcefully(self._stream)

    async def reset(self) -> None:
        """Close both directions."""
        await trio.aclose_forcefully(self._stream)


Handler = Callable[[UnixStream], Awaitable[None]]
"""Serves one connection, which is closed when the handler returns."""


@asynccontextmanager
async def open_unix_listener(path: Path, *, backlog: int = _BACKLOG) -> AsyncIterator[trio.SocketListener]:
    """Listen on a Unix socket that only this user may use, until the end of the block, which removes it.

    A lock beside the socket belongs to this process until then. So a socket whose process was killed is replaced, and
    that of a living process is not.

    Args:
        backlog: connections that wait to be accepted. Another one fails.

    Raises:
        BusyError: another process listens there.
        ControlError: the folder is open to other users, or the socket cannot be made.
    """
    _check_folder(path.parent)
    # The lock decides who listens. The socket's file alone does not tell whether its process still lives.
    with locked(path.with_name(f"{path.name}.lock")):
        listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Under the lock, a file that is there belongs to a process that was killed.
            _remove(path)
            with short_name(path) as name:
                await listening.bind(name)
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)  # before anything can connect
            listening.listen(backlog)
        except OSError as error:
            listening.close()
            raise ControlError(f"cannot listen on {path}: {error.strerror or error}") from None
        async with trio.SocketListener(listening) as listener:
            try:
                yield listener
            finally:
                _remove(path)


async def serve_unix(listener: trio.SocketListener, handler: Handler, *, most: int = MAX_CONNECTIONS) -> None:
    """Serve connections of this user's processes until cancelled. One that fails costs itself only.

    Args:
        most: connections at once. Further ones are closed: a user's own program may be wrong too.
    """
    level = logging.WARNING
    async with trio.open_nursery() as nursery:
        while True:
            stream = await accept_unix(listener)
            # Each takes an open file, of which the peer's connections need many.
            if len(nursery.child_tasks) >= most:
                # Once: a program that goes on and on must not fill the log.
                logger.log(level, "more than %d connections on %s", most, listener.socket.getsockname())
                level = logging.DEBUG
                await trio.aclose_forcefully(stream)
                continue
            nursery.start_soon(_serve, stream, handler)


async def accept_unix(listener: trio.SocketListener) -> trio.SocketStream:
    """Take the next connection. While the machine has no room for one, for example no file to open, wait and log it."""
    while True:
        try:
            return await listener.accept()
        except OSError as error:  # trio takes the next one itself if this one was aborted
            if not is_shortage(error):
                raise
            logger.warning(
                "cannot take a connection at %s: %s", listener.socket.getsockname(), error.strerror
            )
            await trio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def connect_unix(path: Path) -> AsyncIterator[UnixStream]:
    """Connect to the socket of a process of this user, or of root.

    Raises:
        NotRunningError: no process listens there.
        ControlError: it is another user's.
    """
    stream = await dial_unix(path)
    try:
        yield stream
    finally:
        await stream.reset()


async def dial_unix(path: Path) -> UnixStream:
    """Connect as :func:`connect_unix` does; the caller closes the stream."""
    stream = await _connect(path)
    # Also by the side that connects: another user's process may listen under this name, to read what is sent.
    refusal = _refusal(stream.socket)
    if refusal is not None and os.geteuid() != 0:  # root may ask the daemon of any user
        await trio.aclose_forcefully(stream)
        raise ControlError(f"{path}: {refusal}")
    return UnixStream(stream, str(path))


class NotRunningError(ControlError):
    """No process listens on a control socket."""


async def _connect(path: Path) -> trio.SocketStream:
    connecting = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_name(path) as name:
            await connecting.connect(name)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        connecting.close()
        raise NotRunningError(f"no daemon listens on {path}") from None
    except OSError as error:
        connecting.close()
        raise ControlError(f"cannot connect to {path}: {error.strerror or error}") from None
    except BaseException:
        # Also when cancelled: trio owns the socket only once it is in a stream.
        connecting.close()
        raise
    return trio.SocketStream(connecting)


async def _serve(stream: trio.SocketStream, handler: Handler) -> None:
    found = _credentials(stream.socket)
    remote = "a local process" if found is None else f"process {found[0]}"
    try:
        refusal = _refusal(stream.socket)
        if refusal is not None:
            logger.warning("refused a connection on the control socket: %s", refusal)
            return
        await handler(UnixStream(stream, remote))
    except P2PAvgError as error:
        logger.debug("%s on the control socket: %s", remote, error)
    except Exception:
        logger.exception("an exception while %s was served on the control socket", remote)
    finally:
        await trio.aclose_forcefully(stream)


def _refusal(connected: trio.socket.SocketType) -> str | None:
    """Return why the process at the other end may not use the socket, or ``None``."""
    found = _credentials(connected)
    # Root can read this process' memory in any case.
    if found is None or found[1] in (0, os.geteuid()):
        return None
    return f"the process {found[0]} is of the user {found[1]}, and this one of {os.geteuid()}"


def _credentials(connected: trio.socket.SocketType) -> tuple[int, int] | None:
    """Return the process and the user at the other end; ``None`` where the system does not state them."""
    if sys.platform != "linux":
        return None
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return process, user


def _check_folder(folder: Path) -> None:
    try:
        found = folder.stat()
    except OSError as error:
        raise ControlError(f"cannot use the folder {folder}: {error.strerror}") from None
    # A user that can write to the folder can put a socket of its own in this one's place.
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise ControlError(f"other users can write to the folder {folder}; chmod 700 it, or choose another")


@contextmanager
def short_name(path: Path) -> Iterator[str]:
    """Give a name of a socket that fits into its address. Linux has one for every path."""
    if len(os.fsencode(path)) <= MAX_PATH_BYTES or not os.path.isdir("/proc/self/fd"):
        yield str(path)
        return
    # The socket is named by a descriptor of its folder, which is short however deep the folder is.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except trio.BrokenResourceError as error:
        raise StreamBrokenError(f"the other process is gone: {error.__cause__ or error}") from None
    except trio.ClosedResourceError:
        raise ClosedError("the stream was closed") from None
