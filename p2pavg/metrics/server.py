"""The HTTP server of ``/metrics``, on this machine only unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, start_http_server

from p2pavg.base.errors import ListenError
from p2pavg.base.hostnames import is_loopback, may_ask

LOCALHOST = "127.0.0.1"
_App: TypeAlias = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """Serves a registry until :meth:`close`, in a thread of its own.

    Args:
        port: 0 takes a free one.
        host: address to listen on. Every program that reaches it can read the metrics, without a password.

    Raises:
        ListenError: the port is taken, or the address is not one of this machine.
    """

    def __init__(self, registry: CollectorRegistry, port: int, host: str = LOCALHOST) -> None:
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            raise ListenError(f"cannot serve metrics on {host}:{port}: {error}") from None
        if is_loopback(host):
            self._server.set_app(_for_this_machine(self._server.get_app()))

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving, and wait for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _for_this_machine(app: Any) -> _App:
    """Return a WSGI application that refuses requests under the name of another machine.

    A stranger's page in a browser of this machine could read the metrics otherwise (DNS rebinding). On an address that
    other machines reach, there is no such check: Prometheus asks under the name that its configuration gives.
    """

    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if may_ask(environ.get("HTTP_HOST", ""), frozenset()):
            answer: Iterable[bytes] = app(environ, start_response)
            return answer
        start_response("421 Misdirected Request", [("Content-Type", "text/plain")])
        return [b"Ask for localhost, or for an address.\n"]

    return checked
