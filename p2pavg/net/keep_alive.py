"""TCP connections as the system sees them: its checks of idle ones, and the acknowledgements of the other end."""

from __future__ import annotations

import socket
import struct
import sys
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


# Linux's struct tcp_info: 8 bytes, the first of them the state, then numbers of 32 bits, of which the 13th is
# tcpi_last_ack_recv, in milliseconds.
_TCP_INFO = struct.Struct("=B7x48xI")
_ESTABLISHED = 1


def is_acknowledged(opened: socket.socket | trio.socket.SocketType, seconds: float) -> bool:
    """Return whether the other system has acknowledged something in the last seconds. False where ours does not say."""
    if sys.platform != "linux":
        return False
    try:
        info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return False  # it is closed
    state, milliseconds = _TCP_INFO.unpack(info)
    return bool(state == _ESTABLISHED and milliseconds < 1000 * seconds)
