"""The address of this machine's router, from the routing table of Linux."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

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
