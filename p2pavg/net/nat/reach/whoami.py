"""The whoami probe: one connection that learns under which address and port a listener sees it.

A router may give a connection another port than the one it was opened from. The probe opens a plain TCP connection
from a chosen local port to another peer's listening port, and the listener answers with the address that it sees:

* question: ``P2PAVG?`` and a line feed, then 16 random bytes, the nonce
* answer: the nonce, the version 4 or 6, the address in 16 bytes (IPv4 in the last four), the port in 2 bytes

Nothing is authenticated. A false answer makes hole punching fail, which costs a few tries. The question has 24 bytes
and the answer 35. TCP has verified the asker's address before, so the probe is no amplifier.

The listener closes first, and :func:`ask` waits for that. So the waiting state of TCP (TIME_WAIT) is at the listener,
and the asker can use its port again at once.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
from dataclasses import dataclass

import trio

from p2pavg.base.errors import RemoteProtocolError, UnreachableError
from p2pavg.base.hosts import parse_host, version_of
from p2pavg.base.limits import QUICK_REPLY_SECONDS
from p2pavg.net.limits.rate import Accounts, TokenBucket, take_from_all

logger = logging.getLogger(__name__)

MAGIC = b"P2PAVG?\n"
NONCE_BYTES = 16
QUESTION_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + 1 + 16 + 2


# Probes of one host: 64 at once, and 4 a second. Each try of hole punching takes one probe, and a member of a group of
# 16 punches up to 30 lanes. A home with several peers shares its host's budget.
HOST_BURST = 64.0
HOST_PER_SECOND = 4.0
ALL_BURST = 512.0
ALL_PER_SECOND = 64.0
MAX_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenEndpoint:
    """The end of a connection as the other side sees it."""

    host: str
    """An IP address in its normal form, IPv4 not inside IPv6."""
    port: int
    local_port: int
    """The port from which the probe was sent."""


def encode_answer(nonce: bytes, host: str, port: int) -> bytes:
    """Return the bytes of an answer.

    Raises:
        ValueError: ``host`` is no IP address, or the port or the nonce is out of range.
    """
    address = parse_host(host)
    if address is None or not 0 < port < 1 << 16 or len(nonce) != NONCE_BYTES:
        raise ValueError(f"no answer can hold {host!r}, port {port} and a nonce of {len(nonce)} bytes")
    return nonce + bytes([address.version]) + address.packed.rjust(16, b"\0") + port.to_bytes(2, "big")


def read_answer(answer: bytes, nonce: bytes) -> tuple[str, int]:
    """Return the host and port in an answer.

    Raises:
        RemoteProtocolError: anything that :func:`encode_answer` does not make for this nonce.
    """
    if len(answer) != ANSWER_BYTES or answer[:NONCE_BYTES] != nonce:
        raise RemoteProtocolError(f"{len(answer)} bytes that are no answer to this probe")
    version, packed, port = (
        answer[NONCE_BYTES],
        answer[NONCE_BYTES + 1 : -2],
        int.from_bytes(answer[-2:], "big"),
    )
    if version == 4 and not any(packed[:12]):
        host: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.IPv4Address(packed[12:])
    elif version == 6:
        host = ipaddress.IPv6Address(packed)
    else:
        raise RemoteProtocolError("an answer with an address of no known version")
    if parse_host(str(host)) != host or host.is_unspecified or not port:
        raise RemoteProtocolError("an answer with an address that no connection has")
    return str(host), port


class WhoamiAnswerer:
    """Answers probes that arrive at this peer's listening port, within limits for each host and in all."""

    def __init__(self) -> None:
        self._all = TokenBucket(ALL_PER_SECOND, ALL_BURST)
        self._hosts = Accounts(HOST_PER_SECOND, HOST_BURST)
        self._answering = 0

    async def answer(self, opened: socket.socket) -> None:
        """Answer the probe on an accepted connection, and close it.

        At most QUESTION_BYTES are read, for QUICK_REPLY_SECONDS. A connection beyond the limits is closed without an
        answer. Raises nothing for anything that the other side does.

        Args:
            opened: an accepted, connected socket whose bytes are all unread; this call owns it.
        """
        with opened:
            opened.setblocking(False)
            try:
                host, port = opened.getpeername()[:2]
            except OSError:  # the connection is gone already
                return
            if not self._may_answer(host):
                logger.debug("a whoami probe from %s is beyond the limits", host)
                return
            self._answering += 1
            try:
                with trio.move_on_after(QUICK_REPLY_SECONDS):
                    await _answer(trio.socket.from_stdlib_socket(opened), host, port)
            except (OSError, RemoteProtocolError) as error:
                logger.debug("a whoami probe from %s ended: %s", host, error)
            finally:
                self._answering -= 1

    def _may_answer(self, host: str) -> bool:
        if self._answering >= MAX_AT_ONCE:
            return False
        return take_from_all(trio.current_time(), 1.0, self._hosts.of(host), self._all)


async def _answer(opened: trio.socket.SocketType, host: str, port: int) -> None:
    question = await _receive(opened, QUESTION_BYTES)
    if len(question) != QUESTION_BYTES or not question.startswith(MAGIC):
        raise RemoteProtocolError(f"{len(question)} bytes that are no question")
    # An answer of 35 bytes always fits into the empty send buffer of a new connection.
    await opened.send(encode_answer(question[len(MAGIC) :], host, port))


async def _receive(opened: trio.socket.SocketType, count: int) -> bytes:
    """Return ``count`` bytes, or fewer if the other side closes its half before."""
    received = b""
    while len(received) < count and (chunk := await opened.recv(count - len(received))):
        received += chunk
    return received


async def ask(
    server_host: str, server_port: int, *, local_port: int | None = None, timeout: float
) -> SeenEndpoint:
    """Ask a listener under which address and port it sees a connection from a local port.

    Args:
        server_host: an IP address.
        local_port: the port to connect from, which may be in use by a listener with SO_REUSEPORT; ``None`` takes any
            free port.
        timeout: seconds for everything.

    Raises:
        UnreachableError: the local port cannot be used, or no valid answer came within ``timeout`` seconds.
    """
    if not (version := version_of(server_host)):
        raise UnreachableError(f"no whoami answer of {server_host!r}: it is no IP address")
    try:
        bound = bound_socket(version, local_port or 0, shared=local_port is not None)
        with trio.fail_after(timeout), trio.socket.from_stdlib_socket(bound) as opened:
            await opened.connect((server_host, server_port))
            nonce = secrets.token_bytes(NONCE_BYTES)
            await opened.send(MAGIC + nonce)
            # One byte more than the answer: the end is awaited.
            answer = await _receive(opened, ANSWER_BYTES + 1)
            host, port = read_answer(answer, nonce)
            return SeenEndpoint(host=host, port=port, local_port=opened.getsockname()[1])
    except (OSError, RemoteProtocolError, trio.TooSlowError) as error:
        reason = f"within {timeout:.1f} s" if isinstance(error, trio.TooSlowError) else str(error)
        raise UnreachableError(f"no whoami answer of {server_host} port {server_port}: {reason}") from None


def bound_socket(version: int, port: int = 0, *, shared: bool = True) -> socket.socket:
    """Return a new, non-blocking TCP socket of one version of IP that is bound to a local port.

    Args:
        port: 0 lets the system choose a port that no other socket has.
        shared: other sockets with the same options may listen at the port or connect from it.

    Raises:
        OSError: the port cannot be used, or this machine has no IPv6.
    """
    opened = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        opened.setblocking(False)
        if shared:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if version == 6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(("0.0.0.0" if version == 4 else "::", port))
    except BaseException:
        opened.close()
        raise
    return opened
