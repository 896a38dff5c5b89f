"""Metrics for Prometheus: their values, their names, and bounds on their number."""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import pytest

from p2pavg.base.errors import ListenError
from p2pavg.metrics import PrometheusMetrics
from p2pavg.telemetry.events import Drifted, PeerGone, PeerSeen, RoundKind
from tests.unit.metrics.fakes import PEERS, FakeAverager, ended, moved, progressed, updated
from tests.unit.telemetry.statuses import HOSTILE_TEXTS

prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
pytest.importorskip("prometheus_client.parser")


@pytest.fixture
def averager() -> FakeAverager:
    return FakeAverager()


@pytest.fixture
def metrics(averager: FakeAverager) -> Iterator[PrometheusMetrics]:
    with PrometheusMetrics(averager) as made:
        yield made


def text(metrics: PrometheusMetrics) -> str:
    return str(prometheus_client.generate_latest(metrics.registry).decode())


def value(metrics: PrometheusMetrics, series: str, **labels: str) -> float | None:
    found: float | None = metrics.registry.get_sample_value(series, {"run": "lab", **labels})
    return found


def test_rounds(averager: FakeAverager, metrics: PrometheusMetrics) -> None:
    averager.events.emit(ended(lost={PEERS[4]: "gone"}, clipped=PEERS[:2]))
    averager.events.emit(ended())
    averager.events.emit(ended(RoundKind.FAILED, code="timed_out", samples=0.0, own_samples=0.0))
    averager.events.emit(ended(RoundKind.NO_PEERS, code="unreachable", members=(), sent={}, received={}))
    assert value(metrics, "p2pavg_rounds_total", result="success") == 2
    assert value(metrics, "p2pavg_rounds_total", result="failed") == 1
    assert value(metrics, "p2pavg_round_failures_total", code="timed_out") == 1
    assert value(metrics, "p2pavg_round_failures_total", code="unreachable") == 1
    assert value(metrics, "p2pavg_round_failures_total", code="left_out") == 0
    assert value(metrics, "p2pavg_round_duration_seconds_count", result="success") == 2
    assert value(metrics, "p2pavg_round_duration_seconds_sum", result="success") == 4.0
    assert value(metrics, "p2pavg_exchange_duration_seconds_count") == 3
    assert value(metrics, "p2pavg_bytes_total", direction="sent", path="lane") == 3000
    assert value(metrics, "p2pavg_bytes_total", direction="sent", path="relayed") == 30
    assert value(metrics, "p2pavg_bytes_total", direction="received", path="stream") == 0
    assert value(metrics, "p2pavg_lost_members_total") == 1
    assert value(metrics, "p2pavg_clipped_contributions_total") == 2
    assert value(metrics, "p2pavg_samples_total") == 128
    assert value(metrics, "p2pavg_own_samples_total") == 32
    assert value(metrics, "p2pavg_round_members") == 5


def test_training(averager: FakeAverager, metrics: PrometheusMetrics) -> None:
    averager.events.emit(updated())
    averager.events.emit(progressed(epoch=7, samples=12.0, samples_per_second=3.5, waiting=True))
    averager.events.emit(Drifted(time=1.0, run_id="lab", sentence="one differs"))
    assert value(metrics, "p2pavg_updates_total") == 1
    assert value(metrics, "p2pavg_epoch") == 7
    assert value(metrics, "p2pavg_samples_per_second") == 3.5
    assert value(metrics, "p2pavg_accumulated_samples") == 12
    assert value(metrics, "p2pavg_waiting") == 1
    assert value(metrics, "p2pavg_behind") == 0
    assert value(metrics, "p2pavg_gradient_norm") == 1.5
    assert value(metrics, "p2pavg_learning_rate", group="1") == 0.01
    assert value(metrics, "p2pavg_training_metric", name="loss") == 2.5
    assert value(metrics, "p2pavg_drifted") == 1


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_a_metrics_name_of_a_peer_is_a_label_and_nothing_else(
    averager: FakeAverager, metrics: PrometheusMetrics, name: str
) -> None:
    averager.events.emit(updated(metrics={name: 2.5}))
    families = prometheus_client.parser.text_string_to_metric_families(text(metrics))
    told = [each for family in families for each in family.samples if each.name == "p2pavg_training_metric"]
    assert [(each.labels, each.value) for each in told] == [({"run": "lab", "name": name}, 2.5)]


def test_states_count_over_several_transfers(averager: FakeAverager, metrics: PrometheusMetrics) -> None:
    for done in (100, 400, 50, 60):
        averager.events.emit(moved("download", done, 400))
    assert value(metrics, "p2pavg_state_bytes_total", direction="download") == 460
    assert value(metrics, "p2pavg_state_transfer_ratio", direction="download") == 0.15
    assert value(metrics, "p2pavg_state_bytes_total", direction="upload") == 0
    # What is sent counts and ends, too.
    for done, total in ((100, 0), (400, 0), (400, 400), (500, 0)):
        averager.events.emit(moved("upload", done, total))
    assert value(metrics, "p2pavg_state_bytes_total", direction="upload") == 900


def test_peers_of_the_run(averager: FakeAverager, metrics: PrometheusMetrics) -> None:
    averager.events.emit(PeerSeen(time=1.0, run_id="lab", peer_id=PEERS[1]))
    averager.events.emit(PeerGone(time=2.0, run_id="lab", peer_id=PEERS[1]))
    assert value(metrics, "p2pavg_peers") == 3
    assert value(metrics, "p2pavg_peers_waiting") == 1
    assert value(metrics, "p2pavg_excluded_peers") == 1
    assert value(metrics, "p2pavg_run_samples_per_second") == 30.0
    assert value(metrics, "p2pavg_peers_seen_total") == value(metrics, "p2pavg_peers_gone_total") == 1
    assert metrics.registry.get_sample_value("p2pavg_reachability", {"kind": "mapped"}) == 1
    assert metrics.registry.get_sample_value("p2pavg_reachability", {"kind": "public"}) == 0


def test_series_are_bounded_and_hold_no_peer_ids(averager: FakeAverager, metrics: PrometheusMetrics) -> None:
    """Other peers choose names of metrics, and peers come and go for weeks."""
    before = len(text(metrics).splitlines())
    for number in range(2000):
        peers = (f"12D3KooWother{number:06}",)
        averager.events.emit(ended(members=peers, contributors=peers, lost={peers[0]: f"reason {number}"}))
        averager.events.emit(updated(metrics={f"metric {number}": 1.0}, learning_rates=(0.1,) * 64))
        averager.events.emit(PeerSeen(time=1.0, run_id="lab", peer_id=peers[0], name=f"name {number}"))
    written = text(metrics)
    assert len(written.splitlines()) < before + 60
    assert "12D3KooW" not in written
    assert "reason" not in written


def test_names_that_others_invent_crowd_none_out(averager: FakeAverager, metrics: PrometheusMetrics) -> None:
    from p2pavg.metrics.figures import MAX_NAMES

    for number in range(50):
        averager.events.emit(updated(metrics={f"invented {number} {index}": 1.0 for index in range(40)}))
    averager.events.emit(updated(metrics={"loss": 4.0}))
    assert value(metrics, "p2pavg_training_metric", name="loss") == 4.0
    for number in range(50):
        invented = {f"another {number} {index}": 1.0 for index in range(40)}
        averager.events.emit(updated(metrics={**invented, "loss": 3.0}))
        assert value(metrics, "p2pavg_training_metric", name="loss") == 3.0
    assert text(metrics).count("p2pavg_training_metric{") == MAX_NAMES


def test_a_closed_collector_counts_nothing(averager: FakeAverager) -> None:
    with PrometheusMetrics(averager) as metrics:
        pass
    averager.events.emit(ended())
    assert value(metrics, "p2pavg_rounds_total", result="success") == 0


def test_metrics_over_http(averager: FakeAverager) -> None:
    with PrometheusMetrics(averager) as metrics:
        port = metrics.serve()
        address = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(address, timeout=10.0) as answer:
            assert b"p2pavg_peers{" in answer.read()
        with pytest.raises(RuntimeError, match="already"):
            metrics.serve()
        with pytest.raises(ListenError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            PrometheusMetrics(averager).serve(port)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10.0)


def status_of(port: int, host: str) -> int:
    """Return the status of an answer to a request that names a host."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    with closing(connection):
        connection.request("GET", "/metrics", headers={"Host": host})
        return connection.getresponse().status


def test_page_of_a_stranger_cannot_read_them_under_its_own_name(averager: FakeAverager) -> None:
    with PrometheusMetrics(averager) as metrics:
        port = metrics.serve()
        with socket.socket() as other:
            other.bind(("127.0.0.2", port))  # free: the server has only 127.0.0.1
        assert status_of(port, "rebound.example") == 421
        assert status_of(port, f"rebound.example:{port}") == 421
        assert status_of(port, f"localhost:{port}") == 200
        assert status_of(port, f"127.0.0.1:{port}") == 200


def test_other_machines_may_use_any_name_once_they_may_ask(averager: FakeAverager) -> None:
    with PrometheusMetrics(averager) as metrics:
        assert status_of(metrics.serve(host="0.0.0.0"), "trainer.lan") == 200


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)")
def test_names_and_texts_follow_the_conventions(averager: FakeAverager, metrics: PrometheusMetrics) -> None:
    averager.events.emit(ended())
    averager.events.emit(updated())
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text(metrics),
        text=True,
        capture_output=True,
        timeout=60.0,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
