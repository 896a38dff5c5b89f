"""A client of NAT-PMP (RFC 6886): ask the router to pass a TCP port on to this machine.

The packages for it on PyPI have had no release since 2021 and 2023. The protocol has two requests. Only the router's
own address is heard, since the socket is connected to it, and every field of an answer is checked. A machine of the
local network that forges the router's address can still lie: other peers dial back before the address is announced.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import TypeVar

import trio

from p2pavg.base.errors import RemoteProtocolError, UnreachableError
from p2pavg.net.nat.reach.gateway import PORT, Granted, OtherVersionError, ask_router, default_gateway

Answer = TypeVar("Answer")

_ADDRESS, _MAP_TCP, _IS_ANSWER = 0, 2, 128
_OTHER_VERSION = 1
_RESULTS = {
    2: "the router's settings forbid it",
    3: "the router has no connection",
    4: "the router has no room for more",
    5: "the router does not know the request",
}


def encode_map(port: int, outer_port: int, lease: int) -> bytes:
    """Return the request to map a TCP port; with a lease of 0, to remove the mapping."""
    head = bytes([0, _MAP_TCP, 0, 0])
    return head + port.to_bytes(2, "big") + outer_port.to_bytes(2, "big") + lease.to_bytes(4, "big")


def read_map(answer: bytes, port: int, *, lease: int) -> tuple[int, Granted]:
    """Return the router's clock in seconds, and the mapping in an answer.

    Args:
        lease: the seconds that were asked for; the router may grant less, not more.

    Raises:
        RemoteProtocolError: the bytes are no answer to a request for ``port``.
        UnreachableError: the router refused; the message says why.
    """
    clock = _read_head(answer, _MAP_TCP, 16)
    inner, outer = int.from_bytes(answer[8:10], "big"), int.from_bytes(answer[10:12], "big")
    granted = int.from_bytes(answer[12:16], "big")
    if inner != port or (lease and not (outer and granted)):
        raise RemoteProtocolError("an answer for another port, or without a port or a lease")
    return clock, Granted(outer, min(granted, lease))


def read_address(answer: bytes) -> tuple[int, str]:
    """Return the router's clock in seconds, and its outer address.

    Raises:
        RemoteProtocolError: the bytes are no answer to a request for the address.
        UnreachableError: the router refused; the message says why.
    """
    clock = _read_head(answer, _ADDRESS, 12)
    host = ipaddress.IPv4Address(answer[8:12])
    if host.is_unspecified:
        raise UnreachableError("the router has no outer address")
    return clock, str(host)


def _read_head(answer: bytes, request: int, length: int) -> int:
    if len(answer) < 4 or answer[1] != _IS_ANSWER + request:
        raise RemoteProtocolError(f"{len(answer)} bytes that are no answer to request {request}")
    result = int.from_bytes(answer[2:4], "big")
    if answer[0] != 0 or result == _OTHER_VERSION:
        raise OtherVersionError("the router speaks another version")
    if result:
        raise UnreachableError(_RESULTS.get(result, f"the router refused with the number {result}"))
    if len(answer) != length:
        raise RemoteProtocolError(f"an answer of {len(answer)} bytes instead of {length}")
    return int.from_bytes(answer[4:8], "big")


class NatPmp:
    """The mapping of one port by NAT-PMP."""

    name = "NAT-PMP"

    def __init__(self, gateway: Callable[[], str | None] = default_gateway, port: int = PORT) -> None:
        self._gateway = gateway
        self._port = port
        self.other_version = False
        """True if the router has answered that it speaks another version, which is PCP's."""
        self._clock: tuple[float, int] | None = None
        """The moment of the last answer, and the router's clock in it."""

    async def add(self, port: int, outer_port: int, lease: int) -> tuple[str, Granted]:
        """Map a TCP port, or renew its mapping. Return the router's outer address with what was granted.

        Args:
            outer_port: the port that is asked for; the router may choose another one.
            lease: seconds.

        Raises:
            UnreachableError: there is no router, or it did not answer, or it refused.
        """
        _, host = await self._ask(bytes([0, _ADDRESS]), read_address)
        request = encode_map(port, outer_port, lease)
        clock, granted = await self._ask(request, lambda answer: read_map(answer, port, lease=lease))
        self._clock = (trio.current_time(), clock)
        return host, granted

    async def still_has(self, port: int, host: str, granted: Granted) -> bool:  # noqa: ARG002 - UPnP's needs them
        """Return whether the router has kept its mappings and its outer address.

        A router that has lost its mappings begins its clock anew (RFC 6886, section 3.6).

        Raises:
            UnreachableError: it did not answer, or it refused.
        """
        clock, now_host = await self._ask(bytes([0, _ADDRESS]), read_address)
        now, before = trio.current_time(), self._clock
        self._clock = (now, clock)
        has_restarted = before is not None and clock < before[1] + (now - before[0]) * 7 / 8 - 2
        # The router's clock went on while this machine slept, and so did the lease.
        has_slept = before is not None and clock - before[1] > now - before[0] + granted.lease / 2
        return now_host == host and not (has_restarted or has_slept)

    async def remove(self, port: int, granted: Granted) -> None:  # noqa: ARG002 - UPnP's needs both
        """Remove the mapping of a port. Raises UnreachableError."""
        await self._ask(encode_map(port, 0, 0), lambda answer: read_map(answer, port, lease=0))

    async def _ask(self, request: bytes, read: Callable[[bytes], Answer]) -> Answer:
        """Send a request until a valid answer comes. Raises UnreachableError."""
        try:
            return await ask_router(self._gateway(), self._port, lambda _: request, read)
        except OtherVersionError:
            self.other_version = True
            raise
