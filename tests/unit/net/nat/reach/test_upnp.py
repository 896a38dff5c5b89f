"""UPnP with routers on loopback that map ports, refuse, are silent, answer without end, or point to other hosts."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from http.client import responses
from xml.etree import ElementTree

import pytest
import trio
from trio_typing import TaskStatus

from p2pavg.base.errors import UnreachableError
from p2pavg.net.nat.reach import upnp
from p2pavg.net.nat.reach.gateway import Granted
from p2pavg.net.nat.reach.upnp import Upnp
from p2pavg.net.nat.reach.upnp_messages import MAX_BODY_BYTES, MAX_HEAD_BYTES

PORT, LEASE = 4001, 3600
GATEWAY, NEIGHBOUR = "127.0.0.1", "127.0.0.2"
KIND = "urn:schemas-upnp-org:service:WANIPConnection:1"
FOUND = "HTTP/1.1 200 OK\r\nST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\nLOCATION: {}\r\n\r\n"
DESCRIPTION = (
    '<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0">{base}<device><serviceList>'
    "<service><serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1</serviceType>"
    "<controlURL>/other</controlURL></service>"
    f"<service><serviceType>{KIND}</serviceType>"
    "<controlURL>{control}</controlURL></service></serviceList></device></root>"
)
ANSWER = '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>{}</s:Body></s:Envelope>'
REFUSAL = (
    "<s:Fault><detail><UPnPError xmlns='urn:schemas-upnp-org:control-1-0'><errorCode>{}</errorCode>"
    "<errorDescription>{}</errorDescription></UPnPError></detail></s:Fault>"
)


class Router:
    """A router at GATEWAY with a table of mappings."""

    def __init__(self) -> None:
        self.outer = "5.0.0.1"
        self.table: dict[int, tuple[str, int]] = {}
        self.leases: list[int] = []
        self.requests: list[str] = []
        """The first lines of the requests."""
        self.refusal: tuple[int, str] | None = None
        self.permanent_only = False
        self.is_silent = False
        self.location = ""
        """The address that it names in answers to searches; its own if empty."""
        self.control = "/control"
        self.base = ""
        self.raw: Callable[[trio.SocketStream], Awaitable[None]] | None = None
        """Answers each connection in place of HTTP."""
        self.ended = trio.Event()
        """A connection that :attr:`raw` answers was closed by the other side."""
        self.http_port = 0

    # -- discovery

    async def receive(self, opened: trio.socket.SocketType, *, task_status: TaskStatus[None]) -> None:
        task_status.started()
        while True:
            packet, source = await opened.recvfrom(2048)
            assert packet.startswith(b"M-SEARCH * HTTP/1.1\r\n")
            if not self.is_silent:
                where = self.location or f"http://{GATEWAY}:{self.http_port}/description.xml"
                await opened.sendto(FOUND.format(where).encode(), source)

    # -- HTTP

    async def serve(self, stream: trio.SocketStream) -> None:
        if self.raw is not None:
            try:
                await self.raw(stream)
            except trio.BrokenResourceError:
                self.ended.set()
            return
        head = b""
        while b"\r\n\r\n" not in head:
            head += await stream.receive_some(4096)
        head, _, body = head.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        self.requests.append(lines[0])
        fields = {
            name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines[1:])
        }
        while len(body) < int(fields.get("content-length", 0)):
            body += await stream.receive_some(4096)
        if lines[0].startswith("GET"):
            status, text = 200, DESCRIPTION.format(control=self.control, base=self.base)
        else:
            assert fields["soapaction"].startswith(f'"{KIND}#')
            status, text = self.act(body)
        content = text.encode()
        head_of_answer = f"HTTP/1.1 {status} {responses[status]}\r\nContent-Length: {len(content)}\r\n\r\n"
        await stream.send_all(head_of_answer.encode() + content)

    def act(self, body: bytes) -> tuple[int, str]:
        action = ElementTree.fromstring(body)[0][0]
        name = action.tag.rpartition("}")[2]
        given = {each.tag: each.text or "" for each in action}
        inside = ""
        if name == "GetExternalIPAddress":
            inside = f"<NewExternalIPAddress>{self.outer}</NewExternalIPAddress>"
        else:
            assert list(given)[:3] == ["NewRemoteHost", "NewExternalPort", "NewProtocol"]
            refused = self._change(name, given, int(given["NewExternalPort"]))
            if refused is not None:
                return 500, ANSWER.format(REFUSAL.format(*refused))
            host, port = self.table.get(int(given["NewExternalPort"]), ("", 0))
            inside = f"<NewInternalPort>{port}</NewInternalPort><NewInternalClient>{host}</NewInternalClient>"
        return 200, ANSWER.format(f"<u:{name}Response xmlns:u='{KIND}'>{inside}</u:{name}Response>")

    def _change(self, name: str, given: dict[str, str], outer_port: int) -> tuple[int, str] | None:
        """Change the table, or return an error."""
        if name == "AddPortMapping":
            self.leases.append(int(given["NewLeaseDuration"]))
            if self.refusal is not None:
                return self.refusal
            if self.permanent_only and self.leases[-1]:
                return 725, "OnlyPermanentLeasesSupported"
            self.table[outer_port] = (given["NewInternalClient"], int(given["NewInternalPort"]))
        elif outer_port not in self.table:
            return 714, "NoSuchEntryInArray"
        elif name == "DeletePortMapping":
            del self.table[outer_port]
        return None


@asynccontextmanager
async def at_home(router: Router) -> AsyncIterator[Upnp]:
    """Start a router, and yield a client that knows it."""
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        await opened.bind((GATEWAY, 0))
        async with trio.open_nursery() as nursery:
            await nursery.start(router.receive, opened)
            listeners = await nursery.start(partial(trio.serve_tcp, router.serve, 0, host=GATEWAY))
            router.http_port = listeners[0].socket.getsockname()[1]
            yield Upnp(GATEWAY, opened.getsockname()[1])
            nursery.cancel_scope.cancel()


async def test_port_is_mapped_renewed_and_removed() -> None:
    router = Router()
    async with at_home(router) as client:
        for _ in range(2):
            assert await client.add(PORT, PORT, LEASE) == ("5.0.0.1", Granted(PORT, LEASE))
        assert router.table == {PORT: (GATEWAY, PORT)}
        assert await client.still_has(PORT, "5.0.0.1", Granted(PORT, LEASE))
        await client.remove(PORT, Granted(PORT, LEASE))
        assert not router.table
        assert not await client.still_has(PORT, "5.0.0.1", Granted(PORT, LEASE))
    assert router.requests.count("GET /description.xml HTTP/1.1") == 1


async def test_mapping_of_another_machine_is_not_taken_over() -> None:
    router = Router()
    router.table[PORT] = ("192.168.1.9", PORT)
    async with at_home(router) as client:
        _, granted = await client.add(PORT, PORT, LEASE)
    assert granted.outer_port != PORT
    assert router.table[PORT] == ("192.168.1.9", PORT)
    assert router.table[granted.outer_port] == (GATEWAY, PORT)


async def test_router_whose_ports_are_all_taken_is_an_error() -> None:
    router = Router()
    router.refusal = 718, "ConflictInMappingEntry"
    async with at_home(router) as client:
        with pytest.raises(UnreachableError, match="belong to other machines"):
            await client.add(PORT, PORT, LEASE)
    assert len(router.leases) == 4


async def test_router_with_permanent_mappings_only_gets_one() -> None:
    router = Router()
    router.permanent_only = True
    async with at_home(router) as client:
        _, granted = await client.add(PORT, PORT, LEASE)
    assert granted == Granted(PORT, LEASE)
    assert router.leases == [LEASE, 0]


async def test_refusal_has_its_reason() -> None:
    router = Router()
    router.refusal = 606, "Not\x85 Authorized [/b]"
    async with at_home(router) as client:
        with pytest.raises(UnreachableError, match=r"the router refused: Not  Authorized \[/b\]"):
            await client.add(PORT, PORT, LEASE)


async def test_router_that_is_absent_is_an_error_and_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upnp, "ASK_AGAIN_SECONDS", 0.1)
    router = Router()
    router.is_silent = True
    async with at_home(router) as client:
        with pytest.raises(UnreachableError, match=f"the router {GATEWAY} does not answer"):
            await client.add(PORT, PORT, LEASE)
        monkeypatch.undo()
        router.is_silent = False
        assert (await client.add(PORT, PORT, LEASE))[0] == "5.0.0.1"
    monkeypatch.setattr(upnp, "default_gateway", lambda: None)
    with pytest.raises(UnreachableError, match="no router is known"):
        await Upnp().add(PORT, PORT, LEASE)


async def test_new_outer_address_is_recognized() -> None:
    router = Router()
    async with at_home(router) as client:
        host, granted = await client.add(PORT, PORT, LEASE)
        router.outer = "5.0.0.2"
        assert not await client.still_has(PORT, host, granted)


@pytest.mark.parametrize("outer", ["", "router.example", "0.0.0.0", "127.0.0.1", "224.0.0.1", "5.0.0.1 5"])
async def test_senseless_outer_addresses_count_as_none(outer: str) -> None:
    router = Router()
    router.outer = outer
    async with at_home(router) as client:
        assert (await client.add(PORT, PORT, LEASE))[0] == ""


# -- requests that others want to steer


class Victim:
    """A server of another host, or of this machine, that must not be asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.port = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        self.asked += 1
        await stream.aclose()


@asynccontextmanager
async def victim() -> AsyncIterator[Victim]:
    found = Victim()
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, found.serve, 0, host=NEIGHBOUR))
        found.port = listeners[0].socket.getsockname()[1]
        yield found
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "where",
    [
        "http://{}:{}/x",
        "http://{}:{}/x?y",
        "//{}:{}/x",
        "http://router@{}:{}/x",
        "http://127.0.0.1@{}:{}/x",
        "http://127.0.0.1.{}:{}/x",
    ],
)
@pytest.mark.parametrize("through", ["location", "control", "base"])
async def test_addresses_at_other_hosts_than_the_router_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, through: str, where: str
) -> None:
    """The addresses of a description made the peer send GET and POST with any path to any host, loopback too."""
    monkeypatch.setattr(upnp, "ASK_AGAIN_SECONDS", 0.1)
    router = Router()
    async with victim() as other, at_home(router) as client:
        named = where.format(NEIGHBOUR, other.port)
        setattr(router, through, f"<URLBase>{named}</URLBase>" if through == "base" else named)
        with pytest.raises(UnreachableError):
            await client.add(PORT, PORT, LEASE)
        assert not other.asked
    assert not router.table


@pytest.mark.parametrize(
    ("control", "base"),
    [
        *((each, "") for each in ("/a b", "/a\nX-Header: 1", "https://127.0.0.1/", "file:///x", "/" * 600)),
        ("relative", f"<URLBase>http://{GATEWAY}/a b/</URLBase>"),
    ],
)
async def test_addresses_that_would_change_the_request_are_not_asked(control: str, base: str) -> None:
    router = Router()
    async with at_home(router) as client:
        router.control, router.base = control, base
        with pytest.raises(UnreachableError, match="the router sent an address"):
            await client.add(PORT, PORT, LEASE)
    assert router.requests == ["GET /description.xml HTTP/1.1"]


async def test_answers_of_other_machines_than_the_router_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upnp, "ASK_AGAIN_SECONDS", 0.2)
    router = Router()
    router.is_silent = True

    async def answer_in_its_place(client: Upnp) -> None:
        """Hear the search, as every machine of the network does, and answer from another address."""
        with (
            trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as heard,
            trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as answering,
        ):
            await heard.bind((GATEWAY, 0))
            await answering.bind((NEIGHBOUR, 0))
            client._port = heard.getsockname()[1]
            ready.set()
            while True:
                _, source = await heard.recvfrom(2048)
                where = f"http://{GATEWAY}:{router.http_port}/description.xml"
                await answering.sendto(FOUND.format(where).encode(), source)

    ready = trio.Event()
    async with at_home(router) as client, trio.open_nursery() as nursery:
        nursery.start_soon(answer_in_its_place, client)
        await ready.wait()
        with pytest.raises(UnreachableError, match="does not answer"):
            await client.add(PORT, PORT, LEASE)
        nursery.cancel_scope.cancel()
    assert not router.requests


# -- answers without end


async def endless(start: bytes, stream: trio.SocketStream) -> None:
    await stream.send_all(start)
    while True:
        await stream.send_all(b"x" * 65536)


ENDLESS = {
    "head": (b"HTTP/1.1 200 OK\r\nX: ", f"a head of more than {MAX_HEAD_BYTES} bytes"),
    "body": (b"HTTP/1.1 200 OK\r\n\r\n", f"a body of more than {MAX_BODY_BYTES} bytes"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "a body of more than"),
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n", "a body of 999999999 bytes"),
    "nothing of HTTP": (b"SSH-2.0\r\n\r\n", "an answer that is none of HTTP"),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_an_answer_without_end_is_read_to_a_bound_and_its_connection_closed(kind: str) -> None:
    """miniupnpc read on in a thread of its own after its caller had given up: 700 MB in 5 s."""
    start, reason = ENDLESS[kind]
    router = Router()
    async with at_home(router) as client:
        router.raw = partial(endless, start)
        with pytest.raises(UnreachableError, match=reason):
            await client.add(PORT, PORT, LEASE)
        with trio.fail_after(60.0):
            await router.ended.wait()


@pytest.mark.parametrize("pause", [0.01, 1e6])
async def test_a_slow_answer_is_given_up_and_its_connection_closed(
    monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    monkeypatch.setattr(upnp, "REPLY_SECONDS", 0.5)
    router, closed = Router(), trio.Event()

    async def drip(stream: trio.SocketStream) -> None:
        try:
            while True:
                await stream.send_all(b"H")
                with trio.move_on_after(pause):
                    while await stream.receive_some(4096):
                        pass
                    break
        except trio.BrokenResourceError:
            pass
        closed.set()

    async with at_home(router) as client:
        router.raw = drip
        with pytest.raises(UnreachableError, match="no answer within"):
            await client.add(PORT, PORT, LEASE)
        with trio.fail_after(60.0):
            await closed.wait()


async def test_a_call_can_be_cancelled_while_a_router_is_silent() -> None:
    async def be_silent(_: trio.SocketStream) -> None:
        await trio.sleep_forever()

    router = Router()
    async with at_home(router) as client:
        router.raw = be_silent
        with trio.move_on_after(0.05) as scope:
            await client.add(PORT, PORT, LEASE)
        assert scope.cancelled_caught


BOMB = "<!DOCTYPE r [" + "".join(f'<!ENTITY e{i + 1} "{f"&e{i};" * 10}">' for i in range(9)) + "]><r>&e9;</r>"


@pytest.mark.parametrize("document", [BOMB, "<root>", "", "\xff", "<root/>", "<a>" * 5000])
async def test_documents_that_are_no_description_are_refused(document: str) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        content = document.encode("latin-1")
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)

    router = Router()
    async with at_home(router) as client:
        router.raw = answer
        with pytest.raises(UnreachableError, match="the router sent"):
            await client.add(PORT, PORT, LEASE)


async def test_an_answer_in_chunks_is_joined() -> None:
    async def answer(stream: trio.SocketStream) -> None:
        text = DESCRIPTION.format(control="/control", base="").encode()
        await stream.send_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in (text[:7], text[7:100], text[100:]):
            await stream.send_all(b"%x;a=b\r\n%s\r\n" % (len(piece), piece))
        router.raw = None
        await stream.send_all(b"0\r\n\r\n")
        await trio.sleep_forever()  # as routers do that do not close

    router = Router()
    async with at_home(router) as client:
        router.raw = answer
        assert (await client.add(PORT, PORT, LEASE))[0] == "5.0.0.1"
