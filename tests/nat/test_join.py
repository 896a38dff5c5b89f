"""Volunteers behind home routers join by a link, train, stop, and come back."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.jobs.fences import needs_fence
from tests.integration.jobs.join_work import Started, make_run, started
from tests.nat.lab import Host, Kind, Lab

GPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "gpt"
pytestmark = [pytest.mark.processes, pytest.mark.long, needs_fence]


def test_two_volunteers_behind_routers_train_by_a_link(internet: Lab, tmp_path: Path) -> None:
    hosts = [internet.site(kind).hosts[0] for kind in (Kind.PUBLIC, Kind.CONE, Kind.SYMMETRIC)]
    root, links = make_run(tmp_path, address=hosts[0].address, job=GPT)
    agree = ("--yes", "--job", root)
    with ExitStack() as stack:

        def start(host: Host, name: str, *arguments: str) -> Started:
            inside = ("ip", "netns", "exec", host.namespace)
            return stack.enter_context(started(tmp_path, name, "join", *arguments, before=inside))

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
        # They went on where the run was.
        assert int(first.until(r"update (\d+) of \d peers: loss").group(1)) > 1
