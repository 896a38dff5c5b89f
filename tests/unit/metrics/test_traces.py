"""Traces of rounds: spans, their times, and their attributes."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.metrics import RoundTraces
from p2pavg.telemetry.events import PeerGone, RoundKind
from tests.unit.metrics.fakes import PEERS, FakeAverager, ended

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")


def traced(*events: Any) -> list[Any]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider, averager = InMemorySpanExporter(), TracerProvider(), FakeAverager()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with RoundTraces(averager, provider):
        for event in events:
            averager.events.emit(event)
    averager.events.emit(ended())  # after the end, so it is not traced
    return list(exporter.get_finished_spans())


def test_a_round_is_a_span_with_its_stages() -> None:
    spans = {span.name: span for span in traced(ended(lost={PEERS[4]: "gone"}))}
    times = {
        name.removeprefix("p2pavg."): (span.start_time / 1e9, span.end_time / 1e9)
        for name, span in spans.items()
    }
    assert times == {
        "round": (98.0, 100.0),
        "matchmaking": (98.0, 99.25),
        "exchange": (99.25, 99.75),
        "agreement": (99.75, 100.0),
    }
    root = spans.pop("p2pavg.round")
    assert all(span.parent.span_id == root.context.span_id for span in spans.values())
    assert root.attributes["p2pavg.group_id"] == "0a1b2c3d" * 8
    assert root.attributes["p2pavg.bytes_sent"] == 1010
    assert root.attributes["p2pavg.lost"] == 1
    assert root.status.is_ok or root.status.is_unset


def test_a_round_without_a_group_has_no_exchange_and_an_error() -> None:
    alone = ended(
        RoundKind.NO_PEERS,
        code="unreachable",
        reason="saw one",
        members=(),
        group_id="",
        exchange_duration=0.0,
        agreement_duration=0.0,
    )
    spans = {span.name: span for span in traced(alone, PeerGone(time=1.0, run_id="lab", peer_id=PEERS[1]))}
    assert set(spans) == {"p2pavg.round", "p2pavg.matchmaking"}
    root = spans["p2pavg.round"]
    assert root.status.description == "saw one"
    assert root.attributes["p2pavg.code"] == "unreachable"
    assert "p2pavg.group_id" not in root.attributes
