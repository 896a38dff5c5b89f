"""Traces of rounds for OpenTelemetry: one span a round, with spans for its stages."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from p2pavg.metrics.sources import Subscribable
from p2pavg.telemetry.events import AnyEvent, RoundEnded, RoundKind

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_MISSING = "RoundTraces needs OpenTelemetry: pip install 'p2pavg[otel]'"
_NANO = 1_000_000_000


class RoundTraces:
    """Makes a trace of each round, when the round has ended.

    A span ``p2pavg.round`` has the children ``p2pavg.matchmaking`` and, if a group was found, ``p2pavg.exchange`` and
    ``p2pavg.agreement``. Members of one group have the same attribute ``p2pavg.group_id``, so traces of several peers
    can be joined. A round without a result has the status ERROR and the cause.

    Args:
        averager: an averager or a peer.
        provider: makes the tracer; OpenTelemetry's global one if not given.

    Raises:
        ImportError: OpenTelemetry is not installed; the message says how to install it.
    """

    def __init__(self, averager: Subscribable, provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ImportError(_MISSING) from error
        self._trace = trace
        self._tracer = trace.get_tracer("p2pavg", tracer_provider=provider)
        self._subscription = averager.subscribe(self.take)

    def take(self, event: AnyEvent) -> None:
        """Make the trace of a round; other events are skipped."""
        if not isinstance(event, RoundEnded):
            return
        end = event.time
        begin = end - event.duration
        met = end - event.exchange_duration if event.members else end
        agreed = max(end - event.agreement_duration, met)
        root = self._tracer.start_span(
            "p2pavg.round", start_time=_nanoseconds(begin), attributes=_attributes(event)
        )
        within = self._trace.set_span_in_context(root)
        stages = [("matchmaking", begin, met)]
        if event.members:
            stages += [("exchange", met, agreed), ("agreement", agreed, end)]
        for name, start, stop in stages:
            span = self._tracer.start_span(f"p2pavg.{name}", context=within, start_time=_nanoseconds(start))
            span.end(_nanoseconds(stop))
        if event.result is not RoundKind.SUCCESS:
            root.set_status(self._trace.Status(self._trace.StatusCode.ERROR, event.reason))
        root.end(_nanoseconds(end))

    def close(self) -> None:
        """Trace no more rounds; leaving a ``with`` block does it too."""
        self._subscription.cancel()

    def __enter__(self) -> RoundTraces:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANO)


def _attributes(event: RoundEnded) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {
        "p2pavg.run": event.run_id,
        "p2pavg.result": event.result.value,
        "p2pavg.members": len(event.members),
        "p2pavg.contributors": len(event.contributors),
        "p2pavg.lost": len(event.lost),
        "p2pavg.clipped": len(event.clipped),
        "p2pavg.bytes_sent": sum(event.sent.values()),
        "p2pavg.bytes_received": sum(event.received.values()),
        "p2pavg.samples": event.samples,
    }
    if event.group_id:
        found["p2pavg.group_id"] = event.group_id
    if event.code:
        found["p2pavg.code"] = event.code
    return found
