"""The system's checks of idle TCP connections."""

from __future__ import annotations

import socket
from contextlib import suppress

import trio

_CHECKS = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""An idle connection is checked after 15 s, and ends 15 s later if the other end is gone. The packets also keep the
connection's mapping in routers, some of which forget one after 20 s without any."""


def keep_alive(opened: socket.socket | trio.socket.SocketType) -> None:
    """Let the system notice a dead connection within half a minute. Systems without these settings keep their own."""
    with suppress(OSError):  # the connection is gone already, or the system has no such setting
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _CHECKS.items():
            if (option := getattr(socket, name, None)) is not None:
                opened.setsockopt(socket.IPPROTO_TCP, option, value)
