"""Serves the monitor's pages from a program that has a peer."""

from __future__ import annotations

import logging
import re
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import trio

from p2pavg.base.errors import ConfigError, ListenError
from p2pavg.base.hosts import is_loopback, prefix_of
from p2pavg.base.limits import QUICK_REPLY_SECONDS, REPLY_SECONDS, STALL_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.blocking import Averager
from p2pavg.net.limits.call_budget import CallBudget
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.peer.host import Host
from p2pavg.runs.membership.membership import RunAccess
from p2pavg.tools.daemon.life import DaemonProcess
from p2pavg.tools.monitor.guard import MIN_TOKEN_CHARS
from p2pavg.tools.monitor.watching import AveragerSource, StatusSource, board_source, watching

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from p2pavg.tools.monitor.app import Page

logger = logging.getLogger(__name__)

# Connections of the monitor's server: how many there are, how long they may be silent, and how they end.
#
# The server of HTTP sends under a shield, so a client that does not read would keep the program from ending. It also
# sets no bound on the time of a request, and none on the number of connections. This module does all three.

MAX_CONNECTIONS = 128
"""Four for each page that may look on; a browser opens up to six to a host, most of them for a moment."""
PIECE_BYTES = 64 * 1024
ANSWER_COST_SECONDS = 0.002
"""Processor time that a connection is charged for, before the overhead: 3 ms were measured for one with one answer."""
_ABORT = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 seconds: closing drops what is not sent, and tells the client so."""


class Connection:
    """A stream over TCP to a client that may neither send nor read.

    It has what the server of HTTP uses of :class:`trio.SocketStream`.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._pieces = 0

    @property
    def socket(self) -> trio.socket.SocketType:
        """The socket, for its addresses."""
        return self._stream.socket

    async def send_all(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            trio.BrokenResourceError: the client is gone, or takes nothing; the connection is closed then.
        """
        with memoryview(data) as view:
            for start in range(0, len(view), PIECE_BYTES):
                # The caller may hold a shield, but this deadline lies within it.
                with trio.move_on_after(REPLY_SECONDS) as sending:
                    await self._stream.send_all(view[start : start + PIECE_BYTES])
                if sending.cancelled_caught:
                    self.abort()
                    raise trio.BrokenResourceError(f"the client has read nothing for {REPLY_SECONDS:g} s")
                self._pieces += 1

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Return the next bytes, empty at the end.

        Raises:
            trio.BrokenResourceError: the client is gone, or nothing was received or sent for 30 s.
        """
        while True:
            before = self._pieces
            with trio.move_on_after(STALL_SECONDS):
                return await self._stream.receive_some(max_bytes)
            if self._pieces == before:
                self.abort()
                raise trio.BrokenResourceError(f"nothing has moved for {STALL_SECONDS:g} s")

    async def send_eof(self) -> None:
        """Tell the client that nothing follows."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    def abort(self) -> None:
        """Close the connection at once, and wake the tasks that send or receive."""
        if self.socket.fileno() >= 0:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self.socket.close()


Answer = Callable[[Connection], Awaitable[None]]
"""Serves one connection until it ends."""


@asynccontextmanager
async def serving(listener: socket.socket, answer: Answer) -> AsyncIterator[None]:
    """Accept connections for as long as the block runs; no client delays its end.

    Args:
        listener: a bound socket; it is closed at the end.
        answer: serves one connection.
    """
    opened: set[Connection] = set()
    budget = CallBudget()
    has_ended = False

    def may_come(connection: Connection) -> bool:
        """Return whether there is room, and the host of a connection has budget left; charge it for this one."""
        if has_ended or len(opened) >= MAX_CONNECTIONS:
            return False
        try:
            host = str(connection.socket.getpeername()[0])
        except OSError:  # the connection is gone already
            return False
        now, prefix = trio.current_time(), prefix_of(host)
        if budget.delay(now, host, prefix) != 0.0:
            return False
        budget.charge(now, host, prefix, seconds=ANSWER_COST_SECONDS, count=0)
        return True

    async def handle(stream: trio.SocketStream) -> None:
        connection = Connection(stream)
        if not may_come(connection):
            connection.abort()
            return
        opened.add(connection)
        try:
            await answer(connection)
        except Exception:
            logger.exception("a connection to the monitor has failed")
        finally:
            opened.discard(connection)
            connection.abort()

    listener.listen()
    async with trio.open_nursery() as nursery:
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(listener))]
        await nursery.start(partial(trio.serve_listeners, handle, listeners))
        try:
            yield
        finally:
            has_ended = True
            for connection in opened:
                connection.abort()
            nursery.cancel_scope.cancel()


MAX_HEADER_BYTES = 16 * 1024
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{{MIN_TOKEN_CHARS},}}")
DEFAULT_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorOptions:
    """The address of the monitor's pages, and the access to them.

    Args:
        port: 0 takes a free one.
        host: address to listen on. One that other machines can reach needs a token.
        token: at least 16 characters; ``None``: one is made where it is needed.
        names: names of this machine under which browsers ask for the pages, besides its addresses.
        pages: further pages by their path, such as ``/metrics``; each returns its media type and its content.

    Raises:
        ConfigError: an argument is out of range.
    """

    port: int = 0
    host: str = DEFAULT_HOST
    token: str | None = None
    names: tuple[str, ...] = ()
    pages: Mapping[str, Page] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be a whole number from 0 to 65535, got {self.port!r}")
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise ConfigError(f"token must have at least {MIN_TOKEN_CHARS} letters, digits, - or _")

    @property
    def needed_token(self) -> str | None:
        """The token, or a new one where none is given and one is needed."""
        if self.token is None and not is_loopback(self.host):
            return secrets.token_urlsafe(24)
        return self.token


def check_installed() -> None:
    """Raise ConfigError, with the remedy, if the packages are missing that serve pages."""
    try:
        import hypercorn.trio  # noqa: F401
        import starlette.applications  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the monitor's page needs the package {error.name}: pip install 'p2pavg[monitor]'"
        ) from None


@asynccontextmanager
async def serve_page(source: StatusSource, options: MonitorOptions) -> AsyncIterator[str]:
    """Serve the monitor's pages for as long as the block runs; yield the address to open, with the token in it.

    Raises:
        ConfigError: the packages that serve pages are missing.
        ListenError: the address cannot be listened on.
    """
    check_installed()
    from p2pavg.tools.monitor.app import make_app

    token = options.needed_token
    address = f"[{options.host}]" if ":" in options.host else options.host
    # Browsers may ask under the user's names, and under those of the printed address.
    names = frozenset(name.lower() for name in (*options.names, options.host, socket.gethostname()))
    with _listen(options) as listener:
        port = listener.getsockname()[1]
        async with watching(source) as watcher:
            app = make_app(watcher, token=token, names=names, pages=options.pages)
            async with serving(listener, _answer_with(app)):
                # An address to open in a browser, also for one that stands for all addresses of this machine.
                named = socket.gethostname() if address in ("0.0.0.0", "[::]") else address
                shown = f"http://{named}:{port}/"
                logger.info("the monitor of run %r is at %s", source.run_id, shown)  # without the token
                yield shown if token is None else f"{shown}?token={token}"


def _answer_with(app: ASGIApp) -> Answer:
    """Return the function that speaks HTTP on a connection, with the answers of an application."""
    from hypercorn.app_wrappers import ASGIWrapper
    from hypercorn.config import Config
    from hypercorn.trio.tcp_server import TCPServer
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import ConnectionState

    config = Config()
    config.accesslog = None  # its lines would hold tokens
    http = logging.getLogger("p2pavg.tools.monitor.http")
    http.setLevel(logging.WARNING)
    config.errorlog = http
    config.include_server_header = False
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    # A connection on which nothing is asked is closed after this.
    config.keep_alive_timeout = QUICK_REPLY_SECONDS
    wrapped = ASGIWrapper(cast(Any, app))
    context = WorkerContext(None)

    # hypercorn.trio.serve accepts by itself, and neither counts connections nor ends those that do not read.
    async def answer(connection: Connection) -> None:
        await TCPServer(wrapped, config, context, ConnectionState({}), cast(Any, connection))

    return answer


def _listen(options: MonitorOptions) -> socket.socket:
    """Return a socket that is bound to the address; raise ListenError if it cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        where = f"{options.host}:{options.port}"
        raise ListenError(f"the monitor cannot listen on {where}: {error.strerror or error}") from None
    return listener


@asynccontextmanager
async def serve_run(
    peer: Host,
    run_id: str,
    options: MonitorOptions,
    *,
    access: RunAccess | None = None,
    daemon: DaemonProcess | None = None,
) -> AsyncIterator[str]:
    """Serve the pages of a run from a peer that takes no part in it; yield the address to open.

    Args:
        peer: a :class:`p2pavg.Peer`.
        access: keys and certificate of a run that has an authority; ``None``: the run is open to anybody.
        daemon: of this peer; see :func:`~p2pavg.tools.monitor.watching.board_source`.

    Raises:
        ConfigError, ListenError: see :func:`serve_page`; or the certificate is for another peer.
    """
    with bare_exceptions():
        async with (
            board_source(peer, run_id, access, daemon) as source,
            serve_page(source, options) as address,
        ):
            yield address


@asynccontextmanager
async def monitor_of(averager: DecentralizedAverager, options: MonitorOptions) -> AsyncIterator[str]:
    """Serve the pages of an averager's run in a trio program; yield the address to open.

    Raises:
        ConfigError, ListenError: see :func:`serve_page`.
    """
    with bare_exceptions():
        async with serve_page(AveragerSource(averager), options) as address:
            yield address


@contextmanager
def serve_monitor(averager: Averager, port: int = 0, **options: Any) -> Iterator[str]:
    """Serve a page on the run of an averager for as long as the block runs; yield the address to open.

    The page is served by the averager's own thread, so it costs the training loop next to nothing.

    Args:
        averager: of :mod:`p2pavg.blocking`.
        port: 0 takes a free one.
        options: ``host``, ``token``, ``names`` and ``pages``, see :class:`MonitorOptions`.

    Raises:
        ConfigError: an argument is out of range, or the packages of the extra ``monitor`` are missing.
        ListenError: the address cannot be listened on.
    """
    chosen = MonitorOptions(port=port, **options)
    with averager.beside(partial(monitor_of, options=chosen)) as address:
        yield address
