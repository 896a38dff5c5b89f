"""The messages of UPnP's Internet Gateway Device: discovery (SSDP), the description, and actions (SOAP). No I/O.

Every machine of the local network can answer in the router's place, and a description names addresses for further
requests. So each address must be at the host that was asked: otherwise a neighbour could make this peer send requests
to its own loopback, or to third parties.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from p2pavg.base.errors import RemoteProtocolError, UnreachableError

MAX_PACKET_BYTES = 2048
"""Of an answer to a search; they have about 400 bytes."""
MAX_BODY_BYTES = 128 * 1024
"""Of a description, which has 3 to 30 KiB; and of the answer to an action, which has one."""
MAX_HEAD_BYTES = 8 * 1024
MAX_URL_CHARS = 512
# A description may name any number of services, and this peer asks each until one is up.
MAX_SERVICES = 4
MAX_ERROR_CHARS = 100

CONFLICT, PERMANENT_ONLY, NO_SUCH_ENTRY = 718, 725, 714

_DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:"
_VERSIONS = (1, 2)
_SERVICE = re.compile(r"urn:schemas-upnp-org:service:WAN(IP|PPP)Connection:[12]\Z")
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})[ \r]")
# Nine digits at most: more would be too many bytes in any case.
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n", re.IGNORECASE)
_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(;[^\r\n]*)?\r\n")
_END = b"\r\n\r\n"


class RefusedActionError(UnreachableError):
    """The router refused an action; ``code`` is UPnP's number of the error."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True)
class Location:
    """An address of HTTP at the router."""

    host: str
    """An IPv4 address."""
    port: int
    target: str
    """Path and query, printable ASCII without blanks."""

    @property
    def text(self) -> str:
        """The address as text."""
        return f"http://{self.host}:{self.port}{self.target}"


@dataclass(frozen=True, slots=True)
class Service:
    """A service that maps ports."""

    kind: str
    control: Location


def searches(host: str, port: int) -> list[bytes]:
    """Return the questions to send: is there a router that maps ports? One of each version.

    Args:
        host, port: the address to which they are sent.
    """
    head = f'M-SEARCH * HTTP/1.1\r\nHOST: {host}:{port}\r\nMAN: "ssdp:discover"\r\nMX: 1\r\n'
    return [f"{head}ST: {_DEVICE}{version}\r\n\r\n".encode() for version in _VERSIONS]


def read_search_answer(packet: bytes, gateway: str) -> Location:
    """Return the address of the description in an answer to a search.

    Args:
        gateway: the router's address, from which the packet came.

    Raises:
        RemoteProtocolError: it is no such answer, or the description is at another host.
    """
    head = packet[:MAX_PACKET_BYTES].decode("latin-1")
    lines = head.split("\r\n")
    if not re.match(r"HTTP/1\.[01] 200\b", lines[0]):
        raise RemoteProtocolError("a packet that is no answer to a search")
    parted = (line.partition(":") for line in lines[1:])
    fields = {name.strip().lower(): value.strip() for name, _, value in parted}
    # Printers and televisions answer searches too, and some of them answer every one.
    if not fields.get("st", "").startswith(_DEVICE):
        raise RemoteProtocolError("an answer of another device than a router")
    return read_location(fields.get("location", ""), gateway)


def read_location(url: str, gateway: str, base: str = "") -> Location:
    """Return an address at the router.

    Args:
        gateway: the only host that is allowed.
        base: the address to which a relative one is relative.

    Raises:
        RemoteProtocolError: it is none, or at another host.
    """
    # A blank or a line break would end the first line of the request, and let the answer add lines to it.
    if len(url) > MAX_URL_CHARS or not all("!" <= each <= "~" for each in url):
        raise RemoteProtocolError("an address that is too long or has blanks")
    try:
        found = urlsplit(urljoin(base, url))
        port = found.port
    except ValueError as error:
        raise RemoteProtocolError(f"an address that is none: {error}") from None
    if found.scheme != "http" or found.username is not None or port == 0:
        raise RemoteProtocolError("an address that is not one of HTTP")
    # Any machine of the local network can send this: it must not make this peer call third parties.
    if found.hostname != gateway:
        raise RemoteProtocolError(f"an address at another host than the router {gateway}")
    return Location(gateway, port or 80, (found.path or "/") + (f"?{found.query}" if found.query else ""))


def read_services(body: bytes, location: Location) -> list[Service]:
    """Return the services of a description that map ports, MAX_SERVICES at most.

    Args:
        location: the address of the description.

    Raises:
        RemoteProtocolError: it is no description, or no such service is at the router.
    """
    tree = _parsed(body)
    base = location.text
    if text := (tree.findtext("{*}URLBase") or "").strip():
        # The base decides where relative addresses lead, so it is checked like these.
        base = read_location(text, location.host).text
    found = []
    for service in tree.iterfind(".//{*}service"):
        kind = (service.findtext("{*}serviceType") or "").strip()
        # The pattern is strict, since the name is written into the headers of requests.
        if not _SERVICE.match(kind):
            continue
        control = (service.findtext("{*}controlURL") or "").strip()
        found.append(Service(kind, read_location(control, location.host, base)))
        if len(found) == MAX_SERVICES:
            break
    if not found:
        raise RemoteProtocolError("a description without a service that maps ports")
    return found


def get_request(location: Location) -> bytes:
    """Return the request for a description."""
    return (
        f"GET {location.target} HTTP/1.1\r\nHost: {location.host}:{location.port}\r\nConnection: close\r\n\r\n"
    ).encode("ascii")


def action_request(service: Service, action: str, arguments: dict[str, str]) -> bytes:
    """Return the request for an action of a service."""
    inside = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in arguments.items())
    body = (
        '<?xml version="1.0"?>\r\n'
        '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
        ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/">'
        f'<s:Body><u:{action} xmlns:u="{service.kind}">{inside}</u:{action}></s:Body></s:Envelope>\r\n'
    ).encode()
    at = service.control
    head = (
        f"POST {at.target} HTTP/1.1\r\nHost: {at.host}:{at.port}\r\nConnection: close\r\n"
        f'Content-Type: text/xml; charset="utf-8"\r\nContent-Length: {len(body)}\r\n'
        f'SOAPAction: "{service.kind}#{action}"\r\n\r\n'
    )
    return head.encode("ascii") + body


def read_action_answer(status: int, body: bytes) -> dict[str, str]:
    """Return the values that an action has returned, by their names.

    Raises:
        RefusedActionError: the router refused the action.
        RemoteProtocolError: the bytes are no answer.
    """
    tree = _parsed(body)
    if status != 200:
        code = next((each.text or "" for each in tree.iterfind(".//{*}errorCode")), "").strip()
        text = next((each.text or "" for each in tree.iterfind(".//{*}errorDescription")), "").strip()
        # Without a number of UPnP, the status is one of the HTTP server: it says nothing about the action.
        if not re.fullmatch(r"[0-9]{1,4}", code, re.ASCII):
            raise RemoteProtocolError(f"an answer with the status {status}")
        # It is shown to the user, and terminals obey control characters.
        shown = "".join(each if each.isprintable() else " " for each in text[:MAX_ERROR_CHARS])
        raise RefusedActionError(int(code), shown or f"the error {code}")
    answer = tree.find("{*}Body/*")
    if answer is None:
        raise RemoteProtocolError("an answer without content")
    return {each.tag.rpartition("}")[2]: (each.text or "").strip() for each in answer}


def _parsed(body: bytes) -> ElementTree.Element:
    text = body.decode("utf-8", errors="replace")  # names of old routers are in Latin-1
    # Definitions of entities can make a small document large. No document of UPnP has one.
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise RemoteProtocolError("a document with definitions of its own")
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise RemoteProtocolError(f"a document that is no XML: {error}") from None


# ---------------------------------------------------------------------- HTTP


def read_http(received: bytes, *, ended: bool) -> tuple[int, bytes] | None:
    """Return the status and the body of an answer over HTTP; ``None`` while more of it has to come.

    Args:
        ended: the other side has closed.

    Raises:
        RemoteProtocolError: it is none of HTTP, is longer than MAX_HEAD_BYTES or MAX_BODY_BYTES, or has ended early.
    """
    head, blank, body = received.partition(_END)
    if len(head) >= MAX_HEAD_BYTES:
        raise RemoteProtocolError(f"a head of more than {MAX_HEAD_BYTES} bytes")
    if blank:
        lines = head + b"\r\n"
        if (status := _STATUS.match(lines)) is None:
            raise RemoteProtocolError("an answer that is none of HTTP")
        length = _LENGTH.search(lines)
        # Chunks count if a header names both, as HTTP says. Their end may also stand within one of them.
        if _CHUNKED.search(lines):
            if (ended or body.endswith(b"0" + _END)) and (joined := _joined(body)) is not None:
                return int(status[1]), joined
        elif length is not None:
            if int(length[1]) > MAX_BODY_BYTES:
                raise RemoteProtocolError(f"a body of {int(length[1])} bytes")
            # What a server sends beyond its own length does not belong to the answer.
            if len(body) >= int(length[1]):
                return int(status[1]), body[: int(length[1])]
        elif ended:
            return int(status[1]), body
        if len(body) >= MAX_BODY_BYTES:
            raise RemoteProtocolError(f"a body of more than {MAX_BODY_BYTES} bytes")
    if ended:
        raise RemoteProtocolError("an answer that ended early")
    return None


def _joined(chunks: bytes) -> bytes | None:
    """Return the body that was sent in chunks; ``None`` if it is not complete."""
    pieces: list[bytes] = []
    at = 0
    while (size := _SIZE.match(chunks, at)) is not None:
        start, length = size.end(), int(size[1], 16)
        if not length:
            return b"".join(pieces)
        pieces.append(chunks[start : start + length])
        at = start + length + 2
    return None
