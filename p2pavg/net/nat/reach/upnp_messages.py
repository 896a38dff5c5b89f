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


class HttpAnswer:
    """An answer over HTTP, as its bytes arrive: at most MAX_HEAD_BYTES and MAX_BODY_BYTES."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._body_at = 0
        """The place of the first byte of the body; 0 until it is known."""
        self._length: int | None = None
        self._is_chunked = False

    @property
    def wanted(self) -> int:
        """The number of bytes that may still be read; 0 if the answer is complete."""
        if not self._body_at:
            return MAX_HEAD_BYTES - len(self._received)
        have = len(self._received) - self._body_at
        if self._length is not None:
            return self._length - have
        if self._has_last_chunk():
            return 0
        return MAX_BODY_BYTES - have

    def receive(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            RemoteProtocolError: the head or the body is too long, or is none of HTTP.
        """
        # The blank line may be split between two reads.
        start = max(0, len(self._received) - len(_END))
        self._received += data
        if not self._body_at:
            end = self._received.find(_END, start)
            if end < 0 and len(self._received) < MAX_HEAD_BYTES:
                return
            if end < 0:
                raise RemoteProtocolError(f"a head of more than {MAX_HEAD_BYTES} bytes")
            self._read_head(bytes(self._received[: end + 2]), end + len(_END))
        have = len(self._received) - self._body_at
        if self._length is None and have >= MAX_BODY_BYTES:
            raise RemoteProtocolError(f"a body of more than {MAX_BODY_BYTES} bytes")

    def _has_last_chunk(self) -> bool:
        # The end of the last chunk may also stand within another one.
        if not self._is_chunked or not self._received.endswith(b"0" + _END):
            return False
        try:
            _joined(bytes(self._received[self._body_at :]))
        except RemoteProtocolError:
            return False
        return True

    def _read_head(self, head: bytes, body_at: int) -> None:
        if not _STATUS.match(head):
            raise RemoteProtocolError("an answer that is none of HTTP")
        self._body_at = body_at
        self._is_chunked = _CHUNKED.search(head) is not None
        length = _LENGTH.search(head)
        # Chunks count if a header names both, as HTTP says.
        if length is not None and not self._is_chunked:
            self._length = int(length[1])
            if self._length > MAX_BODY_BYTES:
                raise RemoteProtocolError(f"a body of {self._length} bytes")

    def finish(self) -> tuple[int, bytes]:
        """Return the status and the body, once all has come or the other side has closed.

        Raises:
            RemoteProtocolError: the answer is not complete.
        """
        status = _STATUS.match(self._received)
        if not self._body_at or status is None:
            raise RemoteProtocolError("an answer that ended early")
        body = bytes(self._received[self._body_at :])
        if self._is_chunked:
            body = _joined(body)
        if self._length is not None and len(body) < self._length:
            raise RemoteProtocolError("an answer that ended early")
        # What a server sends beyond its own length does not belong to the answer.
        return int(status[1]), body[: self._length]


def _joined(chunks: bytes) -> bytes:
    """Return the body that was sent in chunks."""
    pieces: list[bytes] = []
    at = 0
    while True:
        size = _SIZE.match(chunks, at)
        if size is None:
            raise RemoteProtocolError("a chunk without a size")
        start, length = size.end(), int(size[1], 16)
        if not length:
            return b"".join(pieces)
        if start + length > len(chunks):
            raise RemoteProtocolError("an answer that ended early")
        pieces.append(chunks[start : start + length])
        at = start + length + 2
