"""Metrics of a peer for Prometheus, and traces of its rounds for OpenTelemetry, both from its events."""

from __future__ import annotations

from p2pavg.metrics.prometheus import PeerMetrics, PrometheusMetrics
from p2pavg.metrics.traces import RoundTraces

__all__ = ["PeerMetrics", "PrometheusMetrics", "RoundTraces"]
