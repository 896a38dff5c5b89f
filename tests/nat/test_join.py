"""Volunteers behind home routers join by a link, train, stop, and come back."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration.jobs.fences import needs_fence
from tests.integration.jobs.test_join import MANIFEST, Started, call
from tests.nat.lab import Host, Kind, Lab

pytestmark = [pytest.mark.processes, pytest.mark.long, needs_fence]

TRAIN = """
import time, torch, p2pavg
from p2pavg.optim import AveragedOptimizer

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
torch.seed()
with p2pavg.job() as job:
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = AveragedOptimizer(
        inner, job.averager, target_batch_size=64, state=model, min_peers=job.min_peers
    )
    while True:
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        report = optimizer.step(samples=len(inputs))
        time.sleep(0.05)
        if report.updated:
            print(f"update {report.epoch} of {len(report.result.peers)} peers", flush=True)
"""


@contextmanager
def joined(folder: Path, host: Host, name: str, *arguments: str) -> Iterator[Started]:
    found = Started(folder, name, *arguments, before=("ip", "netns", "exec", host.namespace))
    try:
        yield found
    finally:
        found.close()


def test_two_volunteers_behind_routers_train_by_a_link(internet: Lab, tmp_path: Path) -> None:
    hosts = [internet.site(kind).hosts[0] for kind in (Kind.PUBLIC, Kind.CONE, Kind.SYMMETRIC)]
    job = tmp_path / "job"
    job.mkdir()
    (job / "job.toml").write_text(MANIFEST)
    (job / "train.py").write_text(TRAIN)
    packed = call(tmp_path, "job", "pack", "job", "-o", "line.job")
    root = re.search(r"root ([0-9a-f]{64})", packed)
    assert root is not None
    agree = ("--yes", "--job", root.group(1))
    create = ("run", "create", "lab", "--job", "line.job", "--address", hosts[0].address, "--count", "2")
    links = re.findall(r"join (p2pavg:\S+)", call(tmp_path, *create))
    with ExitStack() as stack:

        def start(host: Host, name: str, *arguments: str) -> Started:
            return stack.enter_context(joined(tmp_path, host, name, "join", *arguments))

        operator = start(hosts[0], "operator", "lab", *agree)
        operator.until("environment is ready")
        began = time.monotonic()
        first = start(hosts[1], "first", links[0], "--home", "first", *agree)
        first.until(r"update \d+ of 2 peers")
        print(f"first update of the first volunteer after {time.monotonic() - began:.1f} s")
        began = time.monotonic()
        second = start(hosts[2], "second", links[1], "--home", "second", *agree)
        second.until(r"update \d+ of 3 peers")
        print(f"first update of the second volunteer after {time.monotonic() - began:.1f} s")
        for each in (first, second):
            each.process.send_signal(signal.SIGINT)
        assert [first.end(), second.end()] == [0, 0]
        for each in (first, second):
            assert "stopped by its user" in each.text
        began = time.monotonic()
        first = start(hosts[1], "first again", "first")
        second = start(hosts[2], "second again", "second")
        for each in (first, second):
            each.until(r"update \d+ of 3 peers")
        print(f"both were back after {time.monotonic() - began:.1f} s")
        last = int(re.findall(r"update (\d+) of", operator.text)[-1])
        assert int(re.findall(r"update (\d+) of", first.text)[0]) > 1
        assert last > 2
