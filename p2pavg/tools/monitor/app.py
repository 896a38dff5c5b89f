"""The monitor's pages over HTTP: the run as a page, as JSON and as a stream of events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import TypeAlias
from urllib.parse import urlencode

import trio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from p2pavg.base.hosts import may_ask
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.tools.monitor.guard import COOKIE, HEADERS, bearer, is_token
from p2pavg.tools.monitor.watching import READ_SECONDS, Watcher

MAX_STREAMS = 32
"""Pages that may look on at once."""

Page: TypeAlias = Callable[[], Awaitable[tuple[str, bytes]]]
"""Returns the media type and the content of a further page. It is called in trio's thread."""

_ASSETS = {"index.html": "text/html", "monitor.js": "text/javascript", "monitor.css": "text/css"}
_ASSETS["icon.svg"] = "image/svg+xml"


class Guard:
    """ASGI middleware: checks host and token, and adds the headers that every answer has.

    Args:
        token: without it, a request needs none.
        names: names of this host that a request may use, besides addresses and ``localhost``.
    """

    def __init__(self, app: ASGIApp, token: str | None, names: frozenset[str]) -> None:
        self._app = app
        self._token = token
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no other kind is served
            return
        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        if not may_ask(request.headers.get("host", ""), self._names):
            return PlainTextResponse("This host name is not one of the monitor's (--name adds one).\n", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("Only GET is served.\n", 405)
        if self._token is None:
            return None
        if is_token(request.query_params.get("token"), self._token):
            return self._with_cookie(request)
        given = request.cookies.get(COOKIE), bearer(request.headers.get("authorization"))
        if any(is_token(each, self._token) for each in given):
            return None
        return PlainTextResponse("Open the address that the monitor has printed: it holds the token.\n", 401)

    def _with_cookie(self, request: Request) -> Response:
        """Move the token from the address into a cookie, so that it stays in no history and no log."""
        assert self._token is not None
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        response = RedirectResponse(
            request.url.path + (f"?{urlencode(rest)}" if rest else ""), status_code=303
        )
        # Not secure=True: the monitor itself serves plain HTTP.
        response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict", max_age=30 * 86400)
        return response


def _with_headers(send: Send) -> Send:
    async def sends(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return sends


def make_app(
    watcher: Watcher,
    *,
    token: str | None = None,
    names: frozenset[str] = frozenset(),
    pages: Mapping[str, Page] | None = None,
) -> ASGIApp:
    """Return the ASGI application.

    Args:
        token: needed to read anything, if given.
        names: names of this host that a request may use, besides addresses and ``localhost``.
        pages: further pages by their path, such as ``/metrics``.
    """
    streams = trio.CapacityLimiter(MAX_STREAMS)

    async def run_json(_: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return Response(watcher.text(), media_type="application/json")

    async def events(_: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return EventStream(watcher, streams)

    routes = [
        Route("/", _asset("index.html")),
        *(Route(f"/{name}", _asset(name)) for name in _ASSETS if name != "index.html"),
        Route("/api/run.json", run_json),
        Route("/api/events", events),
        *(Route(path, _page(page)) for path, page in (pages or {}).items()),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, token=token, names=names)],
        exception_handlers={404: _not_found},
    )


def _asset(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("p2pavg.tools.monitor").joinpath("page", name).read_bytes()

    async def answer(_: Request) -> Response:
        await trio.lowlevel.checkpoint()
        return Response(content, media_type=_ASSETS[name])

    return answer


def _page(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def answer(_: Request) -> Response:
        media_type, content = await page()
        return Response(content, media_type=media_type)

    return answer


async def _not_found(_: Request, __: Exception) -> Response:
    await trio.lowlevel.checkpoint()
    return JSONResponse({"error": "not found"}, 404)


class EventStream(Response):
    """The run whenever it has changed, as server-sent events, until the page is closed.

    Args:
        streams: limits how many there are.
    """

    media_type = "text/event-stream"

    def __init__(self, watcher: Watcher, streams: trio.CapacityLimiter) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._watcher = watcher
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            # In one step: of two requests that saw the same free place, one would wait for it without an answer.
            self._streams.acquire_on_behalf_of_nowait(self)
        except trio.WouldBlock:
            await PlainTextResponse("Too many pages look on.\n", 503)(scope, receive, send)
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, send)
                while (await receive())["type"] != "http.disconnect":
                    pass
                nursery.cancel_scope.cancel()
        finally:
            self._streams.release_on_behalf_of(self)

    async def _send(self, send: Send) -> None:
        async def write(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        watcher = self._watcher
        while True:
            version = watcher.overview.version
            await write(f"data: {watcher.text()}\n\n")
            await trio.sleep(READ_SECONDS)
            while watcher.overview.version == version:
                # It says something at least so often, so that a page notices when the monitor has ended.
                with trio.move_on_after(REPLY_SECONDS) as waiting:
                    await watcher.changed()
                if waiting.cancelled_caught:
                    await write(": still here\n\n")
