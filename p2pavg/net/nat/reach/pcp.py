"""A client of PCP (RFC 6887, MAP for TCP over IPv4), for routers that speak it and not NAT-PMP.

A router that speaks PCP answers a request of NAT-PMP, at the same port, that it speaks another version (RFC 6887,
section 9). So PCP is asked only then, and a router that is silent is waited for once.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable

from p2pavg.base.errors import RemoteProtocolError, UnreachableError
from p2pavg.net.limits.sources import parse_host
from p2pavg.net.nat.reach.gateway import PORT, Granted, OtherVersionError, ask_router, default_gateway

NONCE_BYTES = 12

_VERSION, _MAP, _IS_ANSWER, _TCP = 2, 1, 128, 6
_ANSWER_BYTES = 60
_OTHER_VERSION = 1
_RESULTS = {
    2: "the router's settings forbid it",
    4: "the router does not know the request",
    7: "the router has no connection",
    8: "the router has no room for more",
    11: "the router cannot give that port",
    12: "another router is between",
}


def encode_map(own_host: str, nonce: bytes, port: int, outer_port: int, lease: int) -> bytes:
    """Return the request to map a TCP port; with a lease of 0, to remove the mapping.

    Args:
        own_host: this machine's IPv4 address towards the router.
        nonce: NONCE_BYTES random bytes, the same for all requests about one mapping.
    """
    own, none = (ipaddress.IPv6Address(f"::ffff:{host}").packed for host in (own_host, "0.0.0.0"))
    head = bytes([_VERSION, _MAP, 0, 0]) + lease.to_bytes(4, "big") + own
    ports = port.to_bytes(2, "big") + outer_port.to_bytes(2, "big")
    return head + nonce + bytes([_TCP, 0, 0, 0]) + ports + none


def read_map(answer: bytes, nonce: bytes, port: int, *, lease: int) -> tuple[str, Granted]:
    """Return the router's outer address, and the mapping in an answer.

    Args:
        lease: the seconds that were asked for; 0 for a removal.

    Raises:
        RemoteProtocolError: the bytes are no answer to a request with this nonce, for ``port``.
        UnreachableError: the router refused; the message says why.
    """
    if len(answer) < 4 or answer[1] != _IS_ANSWER + _MAP:
        raise RemoteProtocolError(f"{len(answer)} bytes that are no answer")
    result = answer[3]
    if answer[0] != _VERSION or result == _OTHER_VERSION:
        raise OtherVersionError("the router speaks another version")
    if len(answer) != _ANSWER_BYTES or answer[24:36] != nonce or answer[36] != _TCP:
        raise RemoteProtocolError("an answer to another request")
    if result:
        raise UnreachableError(_RESULTS.get(result, f"the router refused with the number {result}"))
    inner, outer = int.from_bytes(answer[40:42], "big"), int.from_bytes(answer[42:44], "big")
    granted = int.from_bytes(answer[4:8], "big")
    if inner != port or (lease and not (outer and granted)):
        raise RemoteProtocolError("an answer for another port, or without a port or a lease")
    host = parse_host(str(ipaddress.IPv6Address(answer[44:60])))
    known = host is not None and not host.is_unspecified
    return str(host) if known else "", Granted(outer, min(granted, lease))


class Pcp:
    """The mapping of one port by PCP.

    Args:
        is_spoken: returns whether the router has said that it speaks another version than NAT-PMP's.
    """

    name = "PCP"

    def __init__(
        self,
        is_spoken: Callable[[], bool],
        gateway: Callable[[], str | None] = default_gateway,
        port: int = PORT,
    ) -> None:
        self._is_spoken = is_spoken
        self._gateway = gateway
        self._port = port
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    async def add(self, port: int, outer_port: int, lease: int) -> tuple[str, Granted]:
        """Map a TCP port, or renew its mapping. Return the router's outer address with what was granted.

        Args:
            outer_port: the port that is asked for; the router may choose another one.
            lease: seconds.

        Raises:
            UnreachableError: the router does not speak PCP, or it did not answer, or it refused.
        """
        if not self._is_spoken():
            raise UnreachableError("not spoken here")
        return await ask_router(
            self._gateway(),
            self._port,
            lambda own_host: encode_map(own_host, self._nonce, port, outer_port, lease),
            lambda answer: read_map(answer, self._nonce, port, lease=lease),
        )

    async def still_has(self, port: int, host: str, granted: Granted) -> bool:
        """Renew the mapping, and return whether it is the same as before. Raises UnreachableError."""
        now_host, renewed = await self.add(port, granted.outer_port, granted.lease)
        return (now_host, renewed.outer_port) == (host, granted.outer_port)

    async def remove(self, port: int, granted: Granted) -> None:
        """Remove the mapping. Raises UnreachableError."""
        await self.add(port, granted.outer_port, 0)
