"""Telemetry keeps no more after hundreds of rounds than after a few: as many objects are left."""

from __future__ import annotations

import gc
import io
import logging
import tracemalloc
from collections.abc import Callable
from typing import get_args

import pytest
import torch
import trio

import p2pavg
from p2pavg.base.logs import make_handler
from p2pavg.metrics import PrometheusMetrics, RoundTraces
from p2pavg.optim.logging.loggers import FiguresLog
from p2pavg.telemetry import round_log
from p2pavg.telemetry.events import AnyEvent, Drifted, PeerGone, PeerSeen
from p2pavg.testing import MemoryNetwork, simulated_peers
from tests.simulation.swarm import LAN, config
from tests.unit.metrics.fakes import PEERS, FakeAverager, ended, moved, progressed, updated

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

KINDS = get_args(AnyEvent)
FEW, MANY = 400, 200  # a few: as many as fill the metrics' names
MOST_BYTES_A_ROUND = 16
"""Of growth; an event that is kept takes at least 500."""


class Nothing(FiguresLog):
    """A logger that writes nothing."""

    def write(self, figures: object, epoch: int) -> None:
        """Do nothing."""


def events(number: int) -> list[AnyEvent]:
    """Return the events of one round, each with names that no round before had."""
    other = f"12D3KooWother{number:06}"
    return [
        ended(group_id=f"{number:064x}", members=(PEERS[0], other), lost={other: f"reason {number}"}),
        updated(epoch=number, group_id=f"{number:064x}", metrics={f"metric {number % 64}": float(number)}),
        progressed(epoch=number, lineage=number.to_bytes(32)),
        moved("download", number, 10**6),
        Drifted(time=1.0, run_id="lab", sentence=f"{other} differs"),
        PeerSeen(time=1.0, run_id="lab", peer_id=other, name=other),
        PeerGone(time=1.0, run_id="lab", peer_id=other),
    ]


def growth(play: Callable[[int], None]) -> int:
    """Return the bytes by which memory is larger after many rounds than after a few.

    All are traced from the first one on: else what takes the place of an older value would count as new.
    """
    tracemalloc.start()
    try:
        for number in range(FEW):
            play(number)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(FEW, FEW + MANY):
            play(number)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


@pytest.fixture
def _log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log rounds by the library's handler alone, to a stream that keeps nothing; pytest keeps other lines."""
    made = logging.Logger("p2pavg.rounds", logging.INFO)
    made.addHandler(make_handler("json", _Sink()))
    monkeypatch.setattr(round_log, "logger", made)


class _Sink(io.StringIO):
    def write(self, text: str) -> int:
        return len(text)


@pytest.mark.usefixtures("_log")
def test_subscribers_keep_nothing_of_ended_rounds() -> None:
    averager = FakeAverager()
    figures = Nothing()
    with PrometheusMetrics(averager), RoundTraces(averager):
        averager.subscribe(round_log.log_round)
        averager.subscribe(figures)

        def play(number: int) -> None:
            for event in events(number):
                averager.events.emit(event)

        assert growth(play) < MOST_BYTES_A_ROUND * MANY


def test_a_subscriber_that_keeps_events_is_found() -> None:
    """The measure itself: one event kept a round is seen."""
    kept: list[AnyEvent] = []
    assert growth(lambda number: kept.extend(events(number))) > MOST_BYTES_A_ROUND * MANY


async def test_many_rounds_of_a_peer_leave_no_more_events_than_a_few() -> None:
    """Averagers with metrics, on a simulated network."""
    counts: list[int] = []

    async def average(peer: p2pavg.Peer) -> None:
        async with peer.averager(config(group_size=2)) as averager:
            with PrometheusMetrics(averager):
                for number in range(60):
                    averager.accumulate([torch.ones(64)])
                    result = await averager.step(wait=None)
                    assert isinstance(result, p2pavg.Success), result
                    del result
                    if number in (19, 59) and peer is peers[0]:
                        gc.collect()
                        counts.append(sum(type(each) in KINDS for each in gc.get_objects()))

    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as peers, trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(average, peer)
    few, many = counts
    assert many <= few + 4
