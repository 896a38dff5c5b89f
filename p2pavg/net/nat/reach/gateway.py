"""The address of this machine's router, from the routing table of Linux."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from p2pavg.base.errors import RemoteProtocolError, UnreachableError

_TABLE = Path("/proc/net/route")
_MAX_TABLE_CHARS = 1 << 20
_IS_UP, _IS_GATEWAY = 0x1, 0x2


def default_gateway(table: Path = _TABLE) -> str | None:
    """Return the IPv4 address of the default router; ``None`` if there is none, or the system is not Linux."""
    try:
        with table.open(encoding="ascii") as file:
            return gateway_in(file.read(_MAX_TABLE_CHARS), sys.byteorder == "little")
    except (OSError, UnicodeDecodeError):
        return None


def gateway_in(text: str, little_endian: bool) -> str | None:
    """Return the router of the default route with the lowest metric, in a table such as ``/proc/net/route``.

    Args:
        little_endian: the byte order of the machine that wrote the table.
    """
    found: list[tuple[int, str]] = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        try:
            destination, gateway, flags, mask = (int(fields[place], 16) for place in (1, 2, 3, 7))
            metric = int(fields[6])
        except ValueError:
            continue
        if destination == mask == 0 and flags & _IS_UP and flags & _IS_GATEWAY and gateway < 1 << 32:
            packed = gateway.to_bytes(4, "little" if little_endian else "big")
            found.append((metric, str(ipaddress.IPv4Address(packed))))
    return min(found)[1] if found else None


# Requests to this machine's router over UDP, as NAT-PMP and PCP send them.

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
