"""The monitor's HTTP server, asked by a client that may send anything."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.base.errors import ConfigError, ListenError
from p2pavg.telemetry.status import PeerStatus
from p2pavg.tools.monitor import serving
from p2pavg.tools.monitor.serving import MonitorOptions, serve_page
from tests.unit.telemetry.statuses import FULL, HOSTILE_TEXTS

pytest.importorskip("hypercorn")
pytest.importorskip("starlette")

TOKEN = "token-of-the-test-0123"


class Peers:
    """A source whose statuses the test sets."""

    run_id = "run"
    me = ""
    gives = "this machine gave 64 samples"
    wall_clock = staticmethod(time.time)

    def __init__(self) -> None:
        self.excluded: dict[str, str] = {}
        self.statuses: dict[str, tuple[PeerStatus, float]] = {"one": (FULL, 1_800_000_000.0)}

    def read(self) -> dict[str, tuple[PeerStatus, float]]:
        return dict(self.statuses)


class Client:
    """Asks one server, one connection for each question."""

    def __init__(self, address: str) -> None:
        self.token = address.partition("?token=")[2]
        self.port = int(address.partition("/?")[0].rstrip("/").rpartition(":")[2])

    async def ask(
        self, path: str, *, host: str = "127.0.0.1", method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all("\r\n".join([*lines, "", ""]).encode())
            answer = b"".join([chunk async for chunk in stream])
        head, _, body = answer.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
        return int(first.split()[1]), found, body


@asynccontextmanager
async def served(source: Peers | None = None, **options: object) -> AsyncIterator[Client]:
    chosen = MonitorOptions(**options)  # type: ignore[arg-type]
    async with serve_page(cast(Any, source or Peers()), chosen) as address:
        yield Client(address)


async def test_page_and_its_parts_come_from_here_alone() -> None:
    async with served() as client:
        status, headers, body = await client.ask("/")
        assert status == 200
        assert headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert b"http" not in body.replace(b"http-equiv", b"")
        assert b"<script>" not in body
        assert b"style=" not in body
        kinds = {"monitor.js": "text/javascript", "monitor.css": "text/css", "icon.svg": "image/svg+xml"}
        for path, kind in kinds.items():
            status, headers, body = await client.ask(f"/{path}")
            assert (status, headers["content-type"].split(";")[0]) == (200, kind)
            assert body


async def test_run_is_served_as_json_that_no_browser_takes_for_a_page() -> None:
    source = Peers()
    source.statuses |= {text: (PeerStatus(name=text, drift=text), 1_800_000_000.0) for text in HOSTILE_TEXTS}
    async with served(source) as client:
        status, headers, body = await client.ask("/api/run.json")
    run = json.loads(body)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert headers["x-content-type-options"] == "nosniff"
    assert (run["run"], run["gives"]) == ("run", "this machine gave 64 samples")
    assert sorted(peer["name"] for peer in run["peers"]) == sorted([*HOSTILE_TEXTS, "garage, 3090"])


async def test_events_follow_the_changes() -> None:
    source = Peers()
    async with served(source) as client, await trio.open_tcp_stream("127.0.0.1", client.port) as stream:
        await stream.send_all(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        with trio.fail_after(20):
            async for chunk in stream:
                received += chunk
                if b'"gone":null' in received and source.statuses:
                    source.statuses = {}
                if b"is gone" in received:
                    break
        assert b"text/event-stream" in received


async def test_other_names_methods_and_paths_are_refused() -> None:
    async with served(names=("monitor.example",)) as client:
        assert (await client.ask("/", host="evil.example"))[0] == 421
        assert (await client.ask("/api/run.json", host="evil.example"))[0] == 421
        assert (await client.ask("/", host="monitor.example"))[0] == 200
        assert (await client.ask("/", method="POST", Content_Length="0"))[0] == 405
        status, headers, _ = await client.ask("/../../etc/passwd")
        assert status == 404
        assert "content-security-policy" in headers


async def test_nothing_is_read_without_the_token() -> None:
    async with served(token=TOKEN) as client:
        assert client.token == TOKEN
        for path in ("/", "/monitor.js", "/api/run.json", "/api/events", "/nothing"):
            assert (await client.ask(path))[0] == 401
            assert (await client.ask(f"{path}?token=wrong-wrong-wrong-wr"))[0] == 401
            assert (await client.ask(path, Cookie="p2pavg_monitor=wrong"))[0] == 401
        assert (await client.ask("/api/run.json", Authorization=f"Bearer {TOKEN}"))[0] == 200


async def test_token_moves_from_the_address_into_a_cookie_and_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(0)
    async with served(token=TOKEN) as client:
        status, headers, body = await client.ask(f"/?token={TOKEN}&metric=loss")
        assert (status, headers["location"]) == (303, "/?metric=loss")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in body.decode() + headers["location"]
        assert (await client.ask("/", Cookie=cookie.partition(";")[0]))[0] == 200
    assert TOKEN not in caplog.text


async def test_further_pages_are_behind_the_same_guard() -> None:
    async def metrics() -> tuple[str, bytes]:
        await trio.lowlevel.checkpoint()
        return "text/plain", b"p2pavg_peers 1\n"

    async with served(token=TOKEN, pages={"/metrics": metrics}) as client:
        assert (await client.ask("/metrics"))[0] == 401
        status, headers, body = await client.ask("/metrics", Authorization=f"Bearer {TOKEN}")
        assert (status, headers["content-type"].split(";")[0], body) == (
            200,
            "text/plain",
            b"p2pavg_peers 1\n",
        )


async def test_taken_port_is_an_error_that_names_it() -> None:
    async with served() as client:
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{client.port}"):
            async with served(port=client.port):
                pass


async def test_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hypercorn.trio", None)
    with pytest.raises(ConfigError, match=r"pip install 'p2pavg\[monitor\]'"):
        serving.check_installed()


async def test_requests_that_go_on_do_not_hold_up_the_end() -> None:
    async with trio.open_nursery() as nursery:
        with trio.fail_after(10):
            async with served() as client:
                stream = await trio.open_tcp_stream("127.0.0.1", client.port)
                await stream.send_all(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert await stream.receive_some()
        nursery.start_soon(partial(stream.aclose))


async def asking_without_reading(port: int, request: bytes) -> trio.SocketStream:
    """Send requests until the server takes no more, because this client reads no answer."""
    deaf = trio.socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await deaf.connect(("127.0.0.1", port))
    stream = trio.SocketStream(deaf)
    with trio.move_on_after(1):
        await stream.send_all(request)
    return stream


ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
ASK_FALSELY = b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"


@pytest.mark.parametrize("request_bytes", [ASK, ASK_FALSELY], ids=["page", "refusal"])
async def test_client_that_does_not_read_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, request_bytes: bytes
) -> None:
    monkeypatch.setattr(serving, "REPLY_SECONDS", 600)
    with trio.fail_after(30):
        async with served() as client:
            stream = await asking_without_reading(client.port, request_bytes * 100_000)
    await stream.aclose()


async def is_served(stream: trio.SocketStream) -> bool:
    """Ask for the page; return whether an answer comes, rather than the connection's end."""
    try:
        await stream.send_all(ASK)
        return bool(await stream.receive_some())
    except trio.BrokenResourceError:
        return False


async def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "QUICK_REPLY_SECONDS", 600)
    with trio.fail_after(60):
        async with served() as client, AsyncExitStack() as stack:
            idle = [
                await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", client.port))
                for _ in range(200)
            ]
            assert not await is_served(idle[serving.MAX_CONNECTIONS])
            assert not await is_served(idle[-1])
            assert await is_served(idle[0])
            assert await is_served(idle[serving.MAX_CONNECTIONS - 1])


async def test_place_of_a_connection_that_has_ended_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(serving, "QUICK_REPLY_SECONDS", 0.1)
    with trio.fail_after(30):
        async with served() as client:
            for _ in range(3):
                while True:  # until the server has noticed the end of the one before
                    async with await trio.open_tcp_stream("127.0.0.1", client.port) as stream:
                        if await is_served(stream):
                            break


async def test_of_pages_that_look_on_at_once_each_has_a_place_or_an_answer() -> None:
    from p2pavg.tools.monitor.app import EventStream  # not above: it needs starlette

    async def changed() -> None:
        await trio.sleep_forever()

    watcher = SimpleNamespace(overview=SimpleNamespace(version=0), text=lambda: "{}", changed=changed)
    streams, answers = trio.CapacityLimiter(2), list[int]()

    async def receive() -> dict[str, str]:
        await trio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        await trio.lowlevel.checkpoint()
        if message["type"] == "http.response.start":
            answers.append(message["status"])

    async with trio.open_nursery() as nursery:
        pages = [
            EventStream(cast(Any, watcher), streams) for _ in range(3)
        ]  # all of them see two free places
        for page in pages:
            nursery.start_soon(page, {"type": "http"}, receive, send)
        await wait_all_tasks_blocked()
        assert sorted(answers) == [200, 200, 503]
        nursery.cancel_scope.cancel()
    assert streams.borrowed_tokens == 0
