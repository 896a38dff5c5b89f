"""Facts of addresses: what dialling a peer's leads to, step by step, and those of this machine's interfaces."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from functools import partial

import psutil
import trio
from multiaddr import Multiaddr

from p2pavg.base.errors import AddressError, UnreachableError
from p2pavg.base.limits import QUICK_REPLY_SECONDS
from p2pavg.net.addresses import is_circuit, parse_circuit_address, parse_peer_address
from p2pavg.net.transport import Transport
from p2pavg.tools.doctor.rules.network import Dialled, DialOutcome

QUICK_PROBE_SECONDS = 2.0  # for one answer: of a name server, of the other end of a connection
LONG_PROBE_SECONDS = 4.0  # for several: to connect, to dial, to measure one peer

_GREETING = b"\x13/multistream/1.0.0\n"
_MAX_HOSTS = 4  # addresses of one name
_MAX_SHOWN = 40  # characters of another service's words
_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}
_ANSWERS = {
    errno.ECONNREFUSED: DialOutcome.REFUSED,
    errno.ENETUNREACH: DialOutcome.NO_ROUTE,
    errno.EHOSTUNREACH: DialOutcome.NO_ROUTE,
    errno.ENETDOWN: DialOutcome.NO_ROUTE,
    errno.EADDRNOTAVAIL: DialOutcome.NO_ROUTE,  # no IPv6 on this machine
    errno.EACCES: DialOutcome.FORBIDDEN,
    errno.EPERM: DialOutcome.FORBIDDEN,
    errno.ETIMEDOUT: DialOutcome.TIMED_OUT,
    errno.ECONNRESET: DialOutcome.CLOSED,
}
_UNKNOWN_NAMES = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}

_HOW_FAR = {
    DialOutcome.FAILED: 0,
    DialOutcome.NO_ROUTE: 1,
    DialOutcome.FORBIDDEN: 2,
    DialOutcome.TIMED_OUT: 3,
    DialOutcome.REFUSED: 4,
}
"""The order of the outcomes of several hosts; all others are further."""

Found = tuple[DialOutcome, str]


async def meet(transport: Transport, text: str, own_id: str | None = None) -> Dialled:
    """Dial an address step by step: its name, a connection, the first words, and the peer's id.

    Args:
        own_id: the id of the examined peer, which is not dialled.
    """
    _, peer_id = parse_peer_address(text)
    relay = parse_circuit_address(text) if is_circuit(text) else None
    address, _ = parse_peer_address(text if relay is None else relay.relay_address)
    host = _host_of(address)
    port = int(str(address.value_for_protocol("tcp")))
    made = partial(Dialled, address=text, host=host, port=port, peer_id=peer_id)
    if peer_id == own_id:
        return made(answer=DialOutcome.OWN)
    found: Found = (DialOutcome.TIMED_OUT, "")
    began = trio.current_time()
    # Timeout of all steps of one address.
    with trio.move_on_after(QUICK_REPLY_SECONDS):
        hosts, found = await _look_up(address, port)
        if hosts:
            found = await _first_words(hosts, port)
        if found[0] is DialOutcome.REACHED:
            began = trio.current_time()
            found = await _dial(transport, text)
            if relay is not None and found[0] is DialOutcome.FAILED:
                found = DialOutcome.NOT_BEHIND, found[1]
    answer, detail = found
    return made(answer=answer, detail=detail, seconds=trio.current_time() - began)


def _host_of(address: Multiaddr) -> str:
    return str(address.value_for_protocol(next(iter(address.protocols())).name))


async def _look_up(address: Multiaddr, port: int) -> tuple[list[str], Found]:
    name, host = next(iter(address.protocols())).name, _host_of(address)
    if name not in _FAMILIES:
        return [host], (DialOutcome.REACHED, "")
    with trio.move_on_after(QUICK_PROBE_SECONDS):
        try:
            found = await trio.socket.getaddrinfo(host, port, _FAMILIES[name], socket.SOCK_STREAM)
            hosts = list(dict.fromkeys(str(where[4][0]) for where in found))[:_MAX_HOSTS]
            return hosts, (DialOutcome.REACHED, "")
        except OSError as error:
            if error.errno in _UNKNOWN_NAMES:
                return [], (DialOutcome.NAME_UNKNOWN, "")
    return [], (DialOutcome.NO_NAME_SERVER, "")


async def _first_words(hosts: Sequence[str], port: int) -> Found:
    """Return the first host's outcome that is a libp2p listener, or else that of the host that got furthest."""
    outcomes: list[Found] = []

    async def one(host: str) -> None:
        outcomes.append(await _greet(host, port))

    async with trio.open_nursery() as nursery:
        for host in hosts:
            nursery.start_soon(one, host)
    return max(outcomes, key=lambda found: _HOW_FAR.get(found[0], len(_HOW_FAR)))


async def _greet(host: str, port: int) -> Found:
    """Connect, exchange the greeting of libp2p, and hang up."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with trio.socket.socket(family, socket.SOCK_STREAM) as opened:
        try:
            with trio.move_on_after(LONG_PROBE_SECONDS) as scope:
                await opened.connect((host, port))
            if scope.cancelled_caught:
                return DialOutcome.TIMED_OUT, ""
            with trio.move_on_after(QUICK_PROBE_SECONDS) as scope:
                await opened.send(_GREETING)
                words = await opened.recv(len(_GREETING))
            if scope.cancelled_caught:
                return DialOutcome.SILENT, ""
        except OSError as error:
            return _ANSWERS.get(error.errno or 0, DialOutcome.FAILED), error.strerror or str(error)
    if not words:
        return DialOutcome.CLOSED, ""
    if not _GREETING.startswith(words):
        text = words.decode("ascii", "replace").strip()
        shown = "".join(each if each.isascii() and each.isprintable() else "?" for each in text)
        return DialOutcome.OTHER_SERVICE, shown[:_MAX_SHOWN]
    return DialOutcome.REACHED, ""


async def _dial(transport: Transport, text: str) -> Found:
    """Dial a listener of libp2p, which proves its peer id."""
    from p2pavg.net.libp2p.stream import ANOTHER_PEER  # libp2p takes 0.2 s to import

    try:
        await transport.dial(text, timeout=LONG_PROBE_SECONDS)
    except (UnreachableError, AddressError) as error:
        _, found, other = str(error).partition(ANOTHER_PEER)
        if found:
            return DialOutcome.OTHER_PEER, other.split(";")[0].strip()
        return DialOutcome.FAILED, str(error)
    return DialOutcome.REACHED, ""


def own_hosts() -> frozenset[str]:
    """Return the IP addresses of this machine's interfaces."""
    return frozenset(
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )
