"""The HTTP server of ``/metrics``, on this machine only unless told otherwise.

The server of prometheus-client takes a thread and a file for each connection, without limit, for as long as the other
side is silent, also after its own end. It reads a head of 6 MB, and answers a page that asks under any name. A program
that trains cannot afford that, so the library makes the text here, and this module serves it:

* MAX_SCRAPES connections at once. The oldest one gives way to a new one: an honest scrape takes milliseconds, so only
  connections that are held on purpose are ever the oldest.
* Each connection has REPLY_SECONDS for one request and its answer.
* The text is made again after TEXT_SECONDS at the earliest, and each host has a budget of processor time.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from io import BufferedReader, RawIOBase
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from p2pavg.base.errors import ListenError, is_shortage
from p2pavg.base.hosts import is_loopback, may_ask, prefix_of
from p2pavg.base.limits import LOOK_SECONDS, REPLY_SECONDS
from p2pavg.net.limits.call_budget import CallBudget

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)

LOCALHOST = "127.0.0.1"
MAX_SCRAPES = 16
"""Connections at once. A Prometheus has one; a pair of them and a person with a browser have a few."""
TEXT_SECONDS = 0.5
MAX_HEAD_BYTES = 16 * 1024
"""Of a request's lines, as for the monitor. The library's parser allows 6 MiB."""
_MAX_TEXTS = 8  # kept at once: a scraper names one of three formats, and how names are written in it

_Answer: TypeAlias = tuple[str, bytes]
"""A media type, and an answer of it."""


class _MetricsText:
    """The metrics as text, which is made anew at most every TEXT_SECONDS. For all threads."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._made = -TEXT_SECONDS
        self._texts: dict[str, bytes] = {}

    def get(self, accept: str) -> _Answer:
        """Return the text in a format that a scraper accepts."""
        encoder, media_type = choose_encoder(accept)
        with self._lock:
            now = time.monotonic()
            # Scrapers choose the formats, so their number has a bound.
            if now - self._made >= TEXT_SECONDS or len(self._texts) >= _MAX_TEXTS:
                self._made, self._texts = now, {}
            if media_type not in self._texts:
                # Under the lock: scrapes that come together share one text.
                self._texts[media_type] = encoder(self._registry)
            return media_type, self._texts[media_type]


class MetricsServer(TCPServer):
    """Serves a registry until :meth:`close`, in a thread of its own, and each connection in a further one.

    :class:`http.server.HTTPServer` asks for its name in the DNS first, so it is no base of this one.

    Args:
        port: 0 takes a free one.
        host: address to listen on. Every program that reaches it can read the metrics, without a password.

    Raises:
        ListenError: the port is taken, or the address is not one of this machine.
    """

    allow_reuse_address = True
    request_queue_size = MAX_SCRAPES

    def __init__(self, registry: CollectorRegistry, port: int, host: str = LOCALHOST) -> None:
        self.texts = _MetricsText(registry)
        self.only_here = is_loopback(host)
        self._budget = CallBudget()
        self._lock = threading.Lock()  # of the budget and the connections, which all threads change
        self._since: dict[socket.socket, float] = {}  # the open connections, the oldest first
        try:
            self.address_family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            super().__init__((str(address[0]), port), _ScrapeHandler)
        except (OSError, OverflowError) as error:
            # Python raises OverflowError for a port above 65535.
            raise ListenError(f"cannot serve metrics on {host}:{port}: {error}") from None
        self._thread = threading.Thread(
            target=self.serve_forever, args=(LOOK_SECONDS,), name="p2pavg metrics", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self.server_address[1])

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._since)

    def close(self) -> None:
        """Stop serving, wait for the thread, and end all connections.

        The threads of connections are not waited for: one may wait for the very thread that calls this. They end as
        soon as they use their connection.
        """
        self.shutdown()
        self._thread.join()
        self.server_close()
        self._end_older_than(0.0)

    def _end_older_than(self, seconds: float) -> None:
        """End the connections that were opened more than ``seconds`` ago."""
        with self._lock:
            too_old = time.monotonic() - seconds
            for connection in [each for each, since in self._since.items() if since <= too_old]:
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        """Wake the thread of a connection, which closes it. Its place is free from now on."""
        del self._since[connection]
        try:
            # Not closed: its thread still uses the number, which the system would give to another file.
            connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("a connection to the metrics had ended already: %s", error)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. If no file is left for one, all others give way, and the next try is later."""
        try:
            return super().get_request()
        except OSError as error:
            if is_shortage(error):  # without the pause, the loop would try again at once, for ever
                self._end_older_than(0.0)
                time.sleep(LOOK_SECONDS)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        """Return whether a host has budget left. A connection beyond it is closed unread."""
        host = str(client_address[0])
        with self._lock:
            # Refused rather than delayed: a connection that waits keeps a file and a thread.
            return self._budget.delay(time.monotonic(), host, prefix_of(host)) == 0.0

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread."""
        with self._lock:
            if len(self._since) >= MAX_SCRAPES:
                # A dict keeps the order in which connections came, so the first is the oldest.
                self._end(next(iter(self._since)))
            # Before the thread starts: a connection that waits for it counts too.
            self._since[request] = time.monotonic()
        threading.Thread(
            target=self._serve, args=(request, client_address), name="p2pavg scrape", daemon=True
        ).start()

    def _serve(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError as error:
            logger.debug("a scrape of %s ended: %s", client_address[0], error)
        except Exception:
            logger.exception("an exception while the metrics were served")
        finally:
            host = str(client_address[0])
            with self._lock:
                # The thread began with this connection, so all of its time is that of this host.
                self._budget.charge(
                    time.monotonic(), host, prefix_of(host), seconds=time.thread_time(), count=0
                )
                self._since.pop(request, None)
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log that a connection could not be served, such as for lack of a thread."""
        logger.warning("a scrape of %s could not be served", client_address[0], exc_info=True)

    def service_actions(self) -> None:
        """End the connections that have had their time. The loop calls this now and then."""
        # Time for a request and its answer: the timeout of a Prometheus that is configured with none.
        self._end_older_than(REPLY_SECONDS)


class _ScrapeHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: MetricsServer
    server_version = "p2pavg"
    sys_version = ""

    def setup(self) -> None:
        """Prepare to read the request, and not more than MAX_HEAD_BYTES."""
        super().setup()
        # The library's reader has no limit of its own for all lines together.
        self.rfile.close()
        self.rfile = BufferedReader(_FirstBytes(self.request, MAX_HEAD_BYTES))

    def do_GET(self) -> None:
        """Answer with the metrics.

        On an address of this machine only, a request under the name of another machine is refused. A stranger's page
        in a browser of this machine could read the metrics otherwise (DNS rebinding). On an address that other
        machines reach, there is no such check: Prometheus asks under the name that its configuration gives.
        """
        if self.server.only_here and not may_ask(self.headers.get("Host", ""), frozenset()):
            self._answer(421, "text/plain", b"Ask for localhost, or for an address.\n")
            return
        self._answer(200, *self.server.texts.get(self.headers.get("Accept", "")))

    def _answer(self, status: int, media_type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Log a request; the base class writes it to standard error."""
        logger.debug("%s: " + format, self.client_address[0], *args)


class _FirstBytes(RawIOBase):
    """The first bytes that come on a connection; then it seems to have ended."""

    def __init__(self, connection: socket.socket, most: int) -> None:
        self._receive: Callable[[memoryview], int] = connection.recv_into
        self._left = most

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read some bytes, none at the end."""
        with memoryview(buffer) as view:
            count = self._receive(view[: self._left]) if self._left else 0
        self._left -= count
        return count
