"""A client of UPnP's port mappings (Internet Gateway Device 1 and 2): ask the router to pass a TCP port on to here.

miniupnpc, the usual library, takes any device that answers, follows every address that this one names, and reads for as
long as a device sends: an endless answer took 700 MB in 5 s after its caller had given up. So this client

* hears only the default router, and asks nothing at any other host (:mod:`p2pavg.net.nat.reach.upnp_messages`);
* reads at most 136 KiB of an answer, within REPLY_SECONDS;
* runs in trio: a call that is given up reads nothing any more.

A machine of the local network that forges the router's address can still lie: other peers dial back before the address
is announced.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from p2pavg.base.errors import RemoteProtocolError, UnreachableError
from p2pavg.base.limits import ASK_AGAIN_SECONDS, REPLY_SECONDS
from p2pavg.net.nat.reach.gateway import Granted, default_gateway
from p2pavg.net.nat.reach.upnp_messages import (
    CONFLICT,
    MAX_PACKET_BYTES,
    NO_SUCH_ENTRY,
    PERMANENT_ONLY,
    Location,
    RefusedActionError,
    Service,
    action_request,
    get_request,
    read_action_answer,
    read_http,
    read_search_answer,
    read_services,
    searches,
)

logger = logging.getLogger(__name__)

SSDP_PORT = 1900
MULTICAST = "239.255.255.250"
SEARCHES = 2  # a packet may be lost

_DESCRIPTION = "p2pavg"
_OTHER_PORTS = 3
"""Ports that are tried if the wanted one belongs to another machine of the local network."""
_PIECE_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class _Found:
    """The router, as it was found."""

    service: Service
    own_host: str
    """This machine's address towards the router."""


class Upnp:
    """The mapping of one port by UPnP.

    Args:
        gateway: the router's IPv4 address; ``None`` takes that of the default router at each search.
        port: the port at which the router hears searches.
    """

    name = "UPnP"

    def __init__(self, gateway: str | None = None, port: int = SSDP_PORT) -> None:
        self._gateway = gateway
        self._port = port
        self._found: _Found | None = None

    async def add(self, port: int, outer_port: int, lease: int) -> tuple[str, Granted]:
        """Map a TCP port, or renew its mapping. Return the router's outer address with what was granted.

        Args:
            outer_port: the port that is asked for first.
            lease: seconds. Some routers have permanent mappings only; theirs is made and renewed like the others.

        Raises:
            UnreachableError: there is no such router, or it did not answer, or it refused.
        """
        # Looking for the router takes seconds. A renewal asks the service that is known, until that fails.
        if self._found is None:
            with self._bounded():
                self._found = await self._find()
        found = self._found
        with self._bounded():
            return await _add(found, port, outer_port, lease)

    async def still_has(self, port: int, host: str, granted: Granted) -> bool:
        """Return whether the router has kept the mapping and its outer address.

        Raises:
            UnreachableError: it did not answer.
        """
        found = self._known()
        with self._bounded():
            return await _has(found, port, host, granted.outer_port)

    async def remove(self, port: int, granted: Granted) -> None:  # noqa: ARG002 - NAT-PMP's needs the port
        """Remove the mapping. Raises UnreachableError."""
        found = self._known()
        with self._bounded():
            await _act(found.service, "DeletePortMapping", _mapping(granted.outer_port))

    def _known(self) -> _Found:
        if self._found is None:
            raise UnreachableError("no router is known")
        return self._found

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Let the block do a step within REPLY_SECONDS. After a failure, the router is looked for again.

        Raises:
            UnreachableError: it failed, or took longer.
        """
        try:
            with trio.fail_after(REPLY_SECONDS):
                yield
        except RefusedActionError:
            raise  # an answer of the router that is known
        # The router may have been replaced, or have another address: the next call looks for it again.
        except UnreachableError:
            self._found = None
            raise
        except RemoteProtocolError as error:
            self._found = None
            raise UnreachableError(f"the router sent {error}") from None
        except OSError as error:
            self._found = None
            raise UnreachableError(f"the router: {error.strerror or error}") from None
        except trio.TooSlowError:
            self._found = None
            raise UnreachableError(f"no answer within {REPLY_SECONDS:.0f} s") from None

    async def _find(self) -> _Found:
        gateway = self._gateway or default_gateway()
        if gateway is None:
            raise UnreachableError("no router is known")
        location, own_host = await _search(gateway, self._port)
        _, description = await _fetch(location, get_request(location))
        services = read_services(description, location)
        for service in services:  # of a router with several connections, one is up
            try:
                if await _outer_host(service):
                    return _Found(service, own_host)
            except (RefusedActionError, RemoteProtocolError) as error:
                logger.debug("the router's service %s: %s", service.kind, error)
        return _Found(services[0], own_host)


async def _search(gateway: str, port: int) -> tuple[Location, str]:
    """Return the address of the router's description, and this machine's address towards the router.

    Raises:
        UnreachableError: the router does not answer.
        OSError: there is no way to it.
    """
    # Nothing is sent: connecting a UDP socket tells from which of its addresses the machine reaches the router.
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        await towards.connect((gateway, port))
        own_host = towards.getsockname()[0]
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        await opened.bind((own_host, 0))
        # A machine with several networks would otherwise search in the one that the system prefers.
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own_host))
        for _ in range(SEARCHES):
            # Some routers hear only what is sent to all. The answers of others are dropped.
            for host in (gateway, MULTICAST):
                for packet in searches(host, port):
                    try:
                        await opened.sendto(packet, (host, port))
                    except OSError as error:
                        logger.debug("no search at %s: %s", host, error)
            # Routers answer within the second that a search gives them (MX).
            with trio.move_on_after(ASK_AGAIN_SECONDS):
                return await _receive_answer(opened, gateway), own_host
    raise UnreachableError(f"the router {gateway} does not answer")


async def _receive_answer(opened: trio.socket.SocketType, gateway: str) -> Location:
    while True:
        packet, source = await opened.recvfrom(MAX_PACKET_BYTES)
        # Any machine of the local network may answer. Only the router can map a port of its own.
        if source[0] != gateway:
            continue
        try:
            return read_search_answer(packet, gateway)
        except RemoteProtocolError as error:
            logger.debug("an answer of the router: %s", error)


async def _fetch(location: Location, request: bytes) -> tuple[int, bytes]:
    """Send a request, and return the status and the body of the answer. The caller bounds its time.

    Raises:
        RemoteProtocolError: the answer is too long, or is none.
        OSError: there is no connection.
    """
    received = b""
    with trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
        await opened.connect((location.host, location.port))
        await trio.SocketStream(opened).send_all(request)
        while True:
            # A router that sends without end is cut off: too much is an error, at the latest one piece later. So no
            # bound here, which would make a read of nothing look like the end of the answer.
            data = await opened.recv(_PIECE_BYTES)
            received += data
            if (answer := read_http(received, ended=not data)) is not None:
                return answer


async def _act(service: Service, action: str, arguments: dict[str, str]) -> dict[str, str]:
    """Have the router do something, and return what it answers.

    Raises:
        RefusedActionError: it refused.
        RemoteProtocolError, OSError: see :func:`_fetch`.
    """
    status, body = await _fetch(service.control, action_request(service, action, arguments))
    return read_action_answer(status, body)


async def _outer_host(service: Service) -> str:
    """Return the router's outer address; empty if what it says is none."""
    answer = await _act(service, "GetExternalIPAddress", {})
    try:
        host = ipaddress.ip_address(answer.get("NewExternalIPAddress", ""))
    except ValueError:
        return ""
    return "" if host.is_unspecified or host.is_loopback or host.is_multicast else str(host)


async def _holder(service: Service, outer_port: int) -> tuple[str, str] | None:
    """Return the machine and its port to which an outer port is mapped; ``None`` if it is not mapped."""
    try:
        found = await _act(service, "GetSpecificPortMappingEntry", _mapping(outer_port))
    except RefusedActionError as error:
        if error.code != NO_SUCH_ENTRY:
            # Some routers have other numbers for it, or no such action: then adding the mapping decides.
            logger.debug("the router tells nothing of its port %d: %s", outer_port, error)
        return None
    return found.get("NewInternalClient", ""), found.get("NewInternalPort", "")


async def _add(found: _Found, port: int, outer_port: int, lease: int) -> tuple[str, Granted]:
    """Map a port; take another outer port or a permanent mapping if the router wants that."""
    # The same service is asked that makes the mapping: a router may have several connections.
    host = await _outer_host(found.service)
    others = [1024 + secrets.randbelow(65536 - 1024) for _ in range(_OTHER_PORTS)]
    for wanted in (outer_port, *others):
        # Some routers would replace the mapping of another machine without a word.
        if await _holder(found.service, wanted) not in (None, (found.own_host, str(port))):
            continue
        for seconds in (lease, 0):
            arguments = {
                **_mapping(wanted),
                "NewInternalPort": str(port),
                "NewInternalClient": found.own_host,
                "NewEnabled": "1",
                "NewPortMappingDescription": _DESCRIPTION,
                "NewLeaseDuration": str(seconds),
            }
            try:
                await _act(found.service, "AddPortMapping", arguments)
            except RefusedActionError as error:
                # Another machine has the port, whatever the router said of its holder. The next port is tried.
                if error.code == CONFLICT:
                    break
                if error.code != PERMANENT_ONLY or not seconds:
                    raise UnreachableError(f"the router refused: {error}") from None
            else:
                return host, Granted(wanted, lease)
    raise UnreachableError(f"port {outer_port} and {_OTHER_PORTS} others belong to other machines")


async def _has(found: _Found, port: int, host: str, outer_port: int) -> bool:
    # Both may change when the router starts again: it forgets its mappings, or has another outer address.
    holder = await _holder(found.service, outer_port)
    return holder == (found.own_host, str(port)) and await _outer_host(found.service) == host


def _mapping(outer_port: int) -> dict[str, str]:
    """Return the name of a mapping, in the order that routers expect of their arguments."""
    return {"NewRemoteHost": "", "NewExternalPort": str(outer_port), "NewProtocol": "TCP"}
