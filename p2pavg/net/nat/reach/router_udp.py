"""Requests to this machine's router over UDP, as NAT-PMP and PCP send them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

from p2pavg.base.errors import RemoteProtocolError, UnreachableError

Answer = TypeVar("Answer")

PORT = 5351

# RFC 6886 sends nine times, beginning with a pause of 250 ms which doubles each time. A router of the local network
# answers within milliseconds, or it does not speak the protocol.
PAUSES = (0.25, 0.5, 1.0)

_MAX_BYTES = 1100  # the longest packet of PCP; the system cuts longer ones


class OtherVersionError(UnreachableError):
    """The router speaks another version of the protocol."""


@dataclass(frozen=True, slots=True)
class Granted:
    """A mapping that the router has made."""

    outer_port: int
    lease: int
    """Seconds."""


async def ask_router(
    gateway: str | None, port: int, request: Callable[[str], bytes], read: Callable[[bytes], Answer]
) -> Answer:
    """Send a request until a valid answer comes; packets that are none are dropped.

    Args:
        gateway: the router's IPv4 address; ``None`` if none is known.
        request: returns the request, given this machine's address towards the router.
        read: returns the content of an answer, raises RemoteProtocolError for a packet that is none, or
            UnreachableError for a refusal.

    Raises:
        UnreachableError: no valid answer came, or the router refused.
    """
    if gateway is None:
        raise UnreachableError("no router is known")
    try:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
            await opened.connect((gateway, port))
            packet = request(opened.getsockname()[0])
            for pause in PAUSES:
                await opened.send(packet)
                with trio.move_on_after(pause):
                    return await _receive(opened, read)
    except OSError as error:
        raise UnreachableError(f"{gateway}: {error.strerror}") from None
    raise UnreachableError(f"the router {gateway} does not answer")


async def _receive(opened: trio.socket.SocketType, read: Callable[[bytes], Answer]) -> Answer:
    while True:
        try:
            return read(await opened.recv(_MAX_BYTES))
        except RemoteProtocolError:
            continue
