"""The server of the metrics among programs that hold its connections, or ask without end."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pavg.metrics import server
from p2pavg.metrics.server import MAX_HEAD_BYTES, MAX_SCRAPES, MetricsServer
from p2pavg.net.limits import call_budget

IDLE = 60
PATIENCE = 60.0


@pytest.fixture
def registry() -> CollectorRegistry:
    found = CollectorRegistry()
    Gauge("answer", "An answer.", registry=found).set(42)
    return found


@contextmanager
def serving(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    found = MetricsServer(registry, 0)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def served(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsServer]:
    monkeypatch.setattr(server, "REPLY_SECONDS", 10 * PATIENCE)  # time alone ends no connection
    with serving(registry) as found:
        yield found


def read(served: MetricsServer, accept: str = "") -> bytes:
    request = urllib.request.Request(
        f"http://127.0.0.1:{served.port}/metrics", headers={"Accept": accept} if accept else {}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        content: bytes = answer.read()
        return content


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.02)


def until_the_end(connection: socket.socket) -> bytes:
    """Return what comes on a connection until the server ends it."""
    connection.settimeout(PATIENCE)
    found = b""
    try:
        while piece := connection.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


def test_silent_connections_take_few_threads_and_do_not_keep_a_scrape_out(served: MetricsServer) -> None:
    before = threading.active_count()
    with ExitStack() as held:
        for _ in range(IDLE):
            held.enter_context(socket.create_connection(("127.0.0.1", served.port), PATIENCE))
        eventually(lambda: threading.active_count() - before <= MAX_SCRAPES)
        assert b"answer 42.0" in read(served)
        assert served.connections <= MAX_SCRAPES


def test_the_oldest_connection_gives_way(served: MetricsServer) -> None:
    with ExitStack() as held:
        opened = [
            held.enter_context(socket.create_connection(("127.0.0.1", served.port), PATIENCE))
            for _ in range(MAX_SCRAPES + 1)
        ]
        assert until_the_end(opened[0]) == b""
        opened[-1].sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert b"answer 42.0" in until_the_end(opened[-1])


def test_a_connection_has_a_bounded_time(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REPLY_SECONDS", 0.2)
    with serving(registry) as served:
        for said in (b"", b"GET /metrics HTTP/1.0\r\n"):
            with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as held:
                held.sendall(said)
                assert b"answer" not in until_the_end(held)
        eventually(lambda: served.connections == 0)


def test_a_request_without_end_is_not_read_without_end(served: MetricsServer) -> None:
    with (
        socket.create_connection(("127.0.0.1", served.port), PATIENCE) as held,
        pytest.raises(ConnectionError),  # the server has closed the connection
    ):
        held.sendall(b"GET /metrics HTTP/1.0\r\nX-Long: " + b"x" * 1024 * MAX_HEAD_BYTES)


class Counting(Collector):
    """Counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def collect(self) -> Iterator[Metric]:
        self.reads += 1
        yield GaugeMetricFamily("reads", "So often.", self.reads)

    def describe(self) -> Iterator[Metric]:
        return iter(())


def test_many_scrapes_at_once_make_the_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TEXT_SECONDS", 1e6)
    registry, counting = CollectorRegistry(), Counting()
    registry.register(counting)
    with serving(registry) as served:
        for _ in range(20):
            assert b"reads 1.0" in read(served)
            assert b"# EOF" in read(served, "application/openmetrics-text; version=1.0.0")
        assert counting.reads == 2  # one of each format
        for index in range(50):
            read(served, f"application/openmetrics-text; version=1.0.{index}")


def test_a_host_has_a_budget_of_processor_time(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = call_budget.CallRates(peer_seconds=1e-6, peer_burst_seconds=1e-6)
    monkeypatch.setattr(server, "CallBudget", lambda: call_budget.CallBudget(rates))
    with serving(registry) as served:
        assert b"answer 42.0" in read(served)
        eventually(lambda: served.connections == 0)
        with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as beyond:
            assert until_the_end(beyond) == b""


@pytest.mark.parametrize("accept", ["text/plain; version=x.y", "application/openmetrics-text; version=-1.a"])
def test_formats_that_none_knows_end_nothing_but_their_connection(served: MetricsServer, accept: str) -> None:
    with socket.create_connection(("127.0.0.1", served.port), PATIENCE) as held:
        held.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\nAccept: " + accept.encode() + b"\r\n\r\n")
        until_the_end(held)
    assert b"answer 42.0" in read(served)
