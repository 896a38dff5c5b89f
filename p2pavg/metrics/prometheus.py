"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import TYPE_CHECKING, Self

from p2pavg.metrics.sources import MetricsSource, Subscribable

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

    from p2pavg.metrics.server import MetricsServer
    from p2pavg.peer.peer import Peer

LOCALHOST = "127.0.0.1"
_MISSING = "metrics need prometheus-client: pip install 'p2pavg[prometheus]'"


class _Metrics:
    """Metrics of one source of events, in a registry, and their server."""

    def __init__(
        self,
        source: Subscribable,
        runs: Collection[str],
        collector: Collector,
        registry: CollectorRegistry | None,
    ) -> None:
        from prometheus_client import CollectorRegistry as OwnRegistry

        from p2pavg.metrics.figures import Figures

        self.registry = OwnRegistry() if registry is None else registry
        """The registry of the metrics."""
        self.registry.register(collector)
        self._subscription = source.subscribe(Figures(self.registry, runs).take)
        self._server: MetricsServer | None = None

    def serve(self, port: int = 0, host: str = LOCALHOST) -> int:
        """Serve the metrics over HTTP until :meth:`close`, and return the port.

        Args:
            port: 0 takes a free one.
            host: address to listen on. All who reach it can read the metrics: there is no password.

        Raises:
            ListenError: the port is taken, or the address is not one of this machine.
            RuntimeError: the metrics are served already.
        """
        if self._server is not None:
            raise RuntimeError("the metrics are served already")
        from p2pavg.metrics.server import MetricsServer

        self._server = MetricsServer(self.registry, port, host)
        return self._server.port

    def close(self) -> None:
        """Count no more events, and stop serving; leaving a ``with`` block does it too."""
        self._subscription.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PrometheusMetrics(_Metrics):
    """Metrics of one averager, made from its events; they cost microseconds a round.

    In a training loop::

        with PrometheusMetrics(averager) as metrics:
            metrics.serve(9100)  # http://127.0.0.1:9100/metrics
            ...

    Args:
        averager: of :func:`p2pavg.blocking.open_averager` or :meth:`p2pavg.Peer.averager`.
        registry: where the metrics go, such as ``prometheus_client.REGISTRY``; one of its own if not given. A registry
            takes one averager.

    Raises:
        ImportError: ``prometheus-client`` is not installed; the message says how to install it.
    """

    def __init__(self, averager: MetricsSource, registry: CollectorRegistry | None = None) -> None:
        try:
            from p2pavg.metrics.live import RunCollector
        except ImportError as error:
            raise ImportError(_MISSING) from error
        super().__init__(averager, [averager.config.run_id], RunCollector(averager), registry)


class PeerMetrics(_Metrics):
    """Metrics of a peer: its place in the network, and the rounds of all of its averagers.

    ``p2pavg peer --metrics PORT`` serves them.

    Args:
        peer: of :func:`p2pavg.open_peer`. Make the metrics in its trio thread.
        runs: ids of the runs that it takes part in, as far as they are known; their series begin at 0.
        registry: as for :class:`PrometheusMetrics`.

    Raises:
        ImportError: as :class:`PrometheusMetrics`.
    """

    def __init__(
        self, peer: Peer, runs: Collection[str] = (), registry: CollectorRegistry | None = None
    ) -> None:
        try:
            from p2pavg.metrics.live import PeerCollector
        except ImportError as error:
            raise ImportError(_MISSING) from error
        super().__init__(peer, runs, PeerCollector(peer), registry)
