"""Metrics that are read at each scrape: peers of the run, exclusions, reachability."""

from __future__ import annotations

from collections.abc import Iterator

import trio
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from p2pavg.metrics.sources import MetricsSource
from p2pavg.net.nat.reach.reachability import Kind, Reachability
from p2pavg.peer.peer import Peer


class RunCollector(Collector):
    """The peers of one averager's run."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Return the present values."""
        run, members = self._source.config.run_id, self._source.members()
        speed = sum(member.samples_per_second for member in members)
        for name, text, value in (
            ("peers", "Peers of the run, this one included.", len(members)),
            ("peers_waiting", "Peers that have computed enough.", sum(each.waiting for each in members)),
            ("peers_behind", "Peers that catch up with the run.", sum(each.behind for each in members)),
            ("excluded_peers", "Peers that are excluded because they lied.", len(self._source.excluded)),
            ("run_samples_per_second", "Speed of all peers of the run, by their own words.", speed),
        ):
            family = GaugeMetricFamily(f"p2pavg_{name}", text, labels=["run"])
            family.add_metric([run], value)
            yield family
        yield reachability(self._source.reachability)


class PeerCollector(Collector):
    """A peer's place in the network. It is made in the thread of trio, and read in any other one."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._token = trio.lowlevel.current_trio_token()

    def collect(self) -> Iterator[Metric]:
        """Return the present values; none once the peer has ended."""
        try:
            contacts, relayed = trio.from_thread.run_sync(
                lambda: (len(self._peer.records.contacts), self._peer.context.transport.relayed_bytes),
                trio_token=self._token,
            )
        except (trio.RunFinishedError, trio.Cancelled):
            return
        yield GaugeMetricFamily(
            "p2pavg_network_peers", "Peers of the network that answered their last call.", contacts
        )
        yield CounterMetricFamily(
            "p2pavg_relayed_bytes",
            "Bytes that this peer has carried between others, as their relay.",
            relayed,
        )
        yield reachability(self._peer.context.transport.reachability)

    def describe(self) -> Iterator[Metric]:
        """Return no names, because the thread of trio, which registers this, cannot call itself."""
        return iter(())


def reachability(now: Reachability) -> Metric:
    """Return how others reach this peer: 1 for the present kind, 0 for all other kinds."""
    family = GaugeMetricFamily(
        "p2pavg_reachability", "1 for the way in which others reach this peer.", labels=["kind"]
    )
    for kind in Kind:
        family.add_metric([kind.value], float(kind is now.kind))
    return family
