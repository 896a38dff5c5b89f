"""Debian's Prometheus scrapes two peers that train together, and each query of the dashboard returns data."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from p2pavg.testing.swarm import LocalSwarm
from tests.integration.metrics_work import train

DASHBOARD = Path("p2pavg/tools/cli/machine_files/grafana.json")
SECONDS = float(os.environ.get("P2PAVG_SCRAPE_SECONDS", "5"))
"""Time for which Prometheus scrapes before the queries; the documentation's figure is of 60 s."""
WATCHDOG_SECONDS = 180.0
BOTH = ("sum(up) == 2", "count(p2pavg_rounds_total{result='success'} > 0) == 2")
"""Queries that return data once both peers are scraped and have averaged."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (apt: prometheus)"
)


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [expr.replace("$__rate_interval", "10s").replace("$run", ".*") for expr in found]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def prometheus(folder: Path, ports: list[int]) -> Iterator[str]:
    """Run Prometheus, which scrapes these ports every second; give the address of its API."""
    targets = ", ".join(f"'127.0.0.1:{port}'" for port in ports)
    settings = (
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: p2pavg, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )
    (folder / "prometheus.yml").write_text(settings, encoding="utf-8")
    port = free_port()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield f"http://127.0.0.1:{port}/api/v1"
        finally:
            process.terminate()
            process.wait(30.0)


def ask(api: str, query: str) -> list[Any]:
    """Return the series of a query, now; none while Prometheus starts."""
    address = f"{api}/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(address, timeout=10.0) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
            return found
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    except urllib.error.URLError:
        return []


@needs_prometheus
def test_each_query_of_the_dashboard_returns_data(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with LocalSwarm(train, peers=2) as swarm:
        swarm.start()
        ports = [member.event(timeout=WATCHDOG_SECONDS)["port"] for member in swarm.processes]
        with prometheus(tmp_path, ports) as api:
            give_up = time.monotonic() + SECONDS + WATCHDOG_SECONDS
            enough = time.monotonic() + SECONDS
            empty = [*queries(), *BOTH]
            while empty and time.monotonic() < give_up:
                time.sleep(0.5)
                if time.monotonic() >= enough:
                    empty = [query for query in empty if not ask(api, query)]
            assert not empty, (empty, (tmp_path / "prometheus.log").read_text()[-2000:])
        for member in swarm.processes:
            member.tell(enough=True)
        swarm.wait_ended(timeout=WATCHDOG_SECONDS)


def test_the_dashboard_names_only_metrics_that_exist() -> None:
    prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from p2pavg.metrics import PrometheusMetrics
    from tests.unit.metrics.fakes import FakeAverager, ended, updated

    averager = FakeAverager()
    with PrometheusMetrics(averager) as metrics:
        averager.events.emit(ended())
        averager.events.emit(updated())
        written = prometheus_client.generate_latest(metrics.registry).decode()
    names = {line.partition("{")[0].partition(" ")[0] for line in written.splitlines() if line[0] != "#"}
    used = {word for query in queries() for word in _names(query)}
    assert used
    assert used <= names


def _names(query: str) -> list[str]:
    words = "".join(each if each.isalnum() or each == "_" else " " for each in query).split()
    return [word for word in words if word.startswith("p2pavg_")]
