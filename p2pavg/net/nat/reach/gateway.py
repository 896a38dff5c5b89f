"""This machine's router: its address, and NAT-PMP and PCP, by which it passes a TCP port on to this machine.

The packages for NAT-PMP (RFC 6886) on PyPI have had no release since 2021 and 2023. The protocol has two requests. Only
the router's own address is heard, since the socket is connected to it, and every field of an answer is checked. A
machine of the local network that forges the router's address can still lie: other peers dial back before the address is
announced.

A router that speaks PCP (RFC 6887, MAP for TCP over IPv4) answers a request of NAT-PMP, at the same port, that it
speaks another version (RFC 6887, section 9). So PCP is asked only then, and a router that is silent is waited for once.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import trio

from p2pavg.base.errors import RemoteProtocolError, UnreachableError
from p2pavg.base.hosts import parse_host

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


# Requests to the router over UDP, as NAT-PMP and PCP send them.

Answer = TypeVar("Answer", covariant=True)

PORT = 5351
_IS_ANSWER, _OTHER_VERSION = 128, 1  # in both protocols

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


class RouterRequest(Protocol[Answer]):
    """A request to the router, which also reads the answer to it."""

    def packet(self, own_host: str) -> bytes:
        """Return its bytes, given this machine's address towards the router."""

    def read(self, answer: bytes) -> Answer:
        """Return the content of an answer.

        Raises:
            RemoteProtocolError: the bytes are no answer to this request.
            UnreachableError: the router refused; the message says why.
        """


# NAT-PMP

_ADDRESS, _MAP_TCP = 0, 2
_NATPMP_RESULTS = {
    2: "the router's settings forbid it",
    3: "the router has no connection",
    4: "the router has no room for more",
    5: "the router does not know the request",
}


@dataclass(frozen=True, slots=True)
class NatPmpMap:
    """The request to map a TCP port; with a lease of 0, to remove the mapping.

    The answer has the router's clock in seconds, and the mapping, for no more than the lease.
    """

    port: int
    outer_port: int
    lease: int

    def packet(self, own_host: str) -> bytes:  # noqa: ARG002 - PCP's needs it
        """See :class:`RouterRequest`."""
        ports = self.port.to_bytes(2, "big") + self.outer_port.to_bytes(2, "big")
        return bytes([0, _MAP_TCP, 0, 0]) + ports + self.lease.to_bytes(4, "big")

    def read(self, answer: bytes) -> tuple[int, Granted]:
        """See :class:`RouterRequest`."""
        clock = _read_natpmp_head(answer, _MAP_TCP, 16)
        inner, outer = int.from_bytes(answer[8:10], "big"), int.from_bytes(answer[10:12], "big")
        granted = int.from_bytes(answer[12:16], "big")
        if inner != self.port or (self.lease and not (outer and granted)):
            raise RemoteProtocolError("an answer for another port, or without a port or a lease")
        return clock, Granted(outer, min(granted, self.lease))


class NatPmpAddress:
    """The request for the router's outer address. The answer has the router's clock in seconds, and the address."""

    def packet(self, own_host: str) -> bytes:  # noqa: ARG002 - PCP's needs it
        """See :class:`RouterRequest`."""
        return bytes([0, _ADDRESS])

    def read(self, answer: bytes) -> tuple[int, str]:
        """See :class:`RouterRequest`."""
        clock = _read_natpmp_head(answer, _ADDRESS, 12)
        host = ipaddress.IPv4Address(answer[8:12])
        if host.is_unspecified:
            raise UnreachableError("the router has no outer address")
        return clock, str(host)


def _read_natpmp_head(answer: bytes, request: int, length: int) -> int:
    if len(answer) < 4 or answer[1] != _IS_ANSWER + request:
        raise RemoteProtocolError(f"{len(answer)} bytes that are no answer to request {request}")
    result = int.from_bytes(answer[2:4], "big")
    if answer[0] != 0 or result == _OTHER_VERSION:
        raise OtherVersionError("the router speaks another version")
    if result:
        raise UnreachableError(_NATPMP_RESULTS.get(result, f"the router refused with the number {result}"))
    if len(answer) != length:
        raise RemoteProtocolError(f"an answer of {len(answer)} bytes instead of {length}")
    return int.from_bytes(answer[4:8], "big")


class NatPmp:
    """The mapping of one port by NAT-PMP.

    Args:
        gateway: the router's IPv4 address; ``None`` takes that of the default router at each request.
        port: the port at which the router hears requests.
    """

    name = "NAT-PMP"

    def __init__(self, gateway: str | None = None, port: int = PORT) -> None:
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
        _, host = await self.ask(NatPmpAddress())
        clock, granted = await self.ask(NatPmpMap(port, outer_port, lease))
        self._clock = (trio.current_time(), clock)
        return host, granted

    async def still_has(self, port: int, host: str, granted: Granted) -> bool:  # noqa: ARG002 - UPnP's needs them
        """Return whether the router has kept its mappings and its outer address.

        A router that has lost its mappings begins its clock anew (RFC 6886, section 3.6).

        Raises:
            UnreachableError: it did not answer, or it refused.
        """
        clock, now_host = await self.ask(NatPmpAddress())
        now, before = trio.current_time(), self._clock
        self._clock = (now, clock)
        has_restarted = before is not None and clock < before[1] + (now - before[0]) * 7 / 8 - 2
        # The router's clock went on while this machine slept, and so did the lease.
        has_slept = before is not None and clock - before[1] > now - before[0] + granted.lease / 2
        return now_host == host and not (has_restarted or has_slept)

    async def remove(self, port: int, granted: Granted) -> None:  # noqa: ARG002 - UPnP's needs both
        """Remove the mapping of a port. Raises UnreachableError."""
        await self.ask(NatPmpMap(port, 0, 0))

    async def ask(self, request: RouterRequest[Answer]) -> Answer:
        """Send a request until a valid answer comes; packets that are none are dropped.

        Raises:
            UnreachableError: no router is known, no valid answer came, or the router refused.
        """
        gateway = self._gateway or default_gateway()
        if gateway is None:
            raise UnreachableError("no router is known")
        try:
            with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
                await opened.connect((gateway, self._port))
                packet = request.packet(opened.getsockname()[0])
                for pause in PAUSES:
                    await opened.send(packet)
                    with trio.move_on_after(pause):
                        while True:
                            answer = await opened.recv(_MAX_BYTES)
                            with suppress(RemoteProtocolError):
                                return request.read(answer)
        except OtherVersionError:
            self.other_version = True
            raise
        except OSError as error:
            raise UnreachableError(f"{gateway}: {error.strerror}") from None
        raise UnreachableError(f"the router {gateway} does not answer")


# PCP

NONCE_BYTES = 12

_PCP_VERSION, _MAP, _TCP = 2, 1, 6
_PCP_ANSWER_BYTES = 60
_PCP_RESULTS = {
    2: "the router's settings forbid it",
    4: "the router does not know the request",
    7: "the router has no connection",
    8: "the router has no room for more",
    11: "the router cannot give that port",
    12: "another router is between",
}


@dataclass(frozen=True, slots=True)
class PcpMap:
    """The request to map a TCP port; with a lease of 0, to remove the mapping.

    The answer has the router's outer address, and the mapping, for no more than the lease.
    """

    nonce: bytes
    """NONCE_BYTES random bytes, the same for all requests about one mapping."""
    port: int
    outer_port: int
    lease: int

    def packet(self, own_host: str) -> bytes:
        """See :class:`RouterRequest`."""
        own, none = (ipaddress.IPv6Address(f"::ffff:{host}").packed for host in (own_host, "0.0.0.0"))
        head = bytes([_PCP_VERSION, _MAP, 0, 0]) + self.lease.to_bytes(4, "big") + own
        ports = self.port.to_bytes(2, "big") + self.outer_port.to_bytes(2, "big")
        return head + self.nonce + bytes([_TCP, 0, 0, 0]) + ports + none

    def read(self, answer: bytes) -> tuple[str, Granted]:
        """See :class:`RouterRequest`."""
        if len(answer) < 4 or answer[1] != _IS_ANSWER + _MAP:
            raise RemoteProtocolError(f"{len(answer)} bytes that are no answer")
        result = answer[3]
        if answer[0] != _PCP_VERSION or result == _OTHER_VERSION:
            raise OtherVersionError("the router speaks another version")
        if len(answer) != _PCP_ANSWER_BYTES or answer[24:36] != self.nonce or answer[36] != _TCP:
            raise RemoteProtocolError("an answer to another request")
        if result:
            raise UnreachableError(_PCP_RESULTS.get(result, f"the router refused with the number {result}"))
        inner, outer = int.from_bytes(answer[40:42], "big"), int.from_bytes(answer[42:44], "big")
        granted = int.from_bytes(answer[4:8], "big")
        if inner != self.port or (self.lease and not (outer and granted)):
            raise RemoteProtocolError("an answer for another port, or without a port or a lease")
        host = parse_host(str(ipaddress.IPv6Address(answer[44:60])))
        known = host is not None and not host.is_unspecified
        return str(host) if known else "", Granted(outer, min(granted, self.lease))


class Pcp:
    """The mapping of one port by PCP.

    Args:
        natpmp: has asked the same router before, at the same port.
    """

    name = "PCP"

    def __init__(self, natpmp: NatPmp) -> None:
        self._natpmp = natpmp
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    async def add(self, port: int, outer_port: int, lease: int) -> tuple[str, Granted]:
        """Map a TCP port, or renew its mapping. Return the router's outer address (or ``""``) with what was granted.

        Args:
            outer_port: the port that is asked for; the router may choose another one.
            lease: seconds.

        Raises:
            UnreachableError: the router does not speak PCP, or it did not answer, or it refused.
        """
        if not self._natpmp.other_version:
            raise UnreachableError("not spoken here")
        return await self._natpmp.ask(PcpMap(self._nonce, port, outer_port, lease))

    async def still_has(self, port: int, host: str, granted: Granted) -> bool:
        """Renew the mapping, and return whether it is the same as before. Raises UnreachableError."""
        now_host, renewed = await self.add(port, granted.outer_port, granted.lease)
        return (now_host, renewed.outer_port) == (host, granted.outer_port)

    async def remove(self, port: int, granted: Granted) -> None:
        """Remove the mapping. Raises UnreachableError."""
        await self.add(port, granted.outer_port, 0)
