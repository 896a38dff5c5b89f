"""The address of the socket at which processes attach to a peer."""

from __future__ import annotations

import os
import socket
import struct

import trio

from p2pavg.base.errors import ConfigError

PREFIX = "unix:"
MAX_PATH_BYTES = 107  # of a Unix socket's address
_CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end


def socket_path(address: str | os.PathLike[str]) -> str:
    """Return the path of ``unix:PATH`` or of a path; raise ConfigError if no socket can have it."""
    path = os.fspath(address).removeprefix(PREFIX)
    if not path or len(os.fsencode(path)) > MAX_PATH_BYTES or "\0" in path:
        raise ConfigError(f"a socket's path has 1 to {MAX_PATH_BYTES} bytes, got {os.fspath(address)!r}")
    return path


def user_of(connection: socket.socket | trio.socket.SocketType) -> int:
    """Return the id of the user whose process is at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return int(user)
