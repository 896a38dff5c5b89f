"""Attached processes whose peer, or whose sibling, is killed, stopped or started again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess
from tests.integration.attach import work
from tests.integration.attach.daemon import WATCHDOG_SECONDS, daemon, event_of, events_of, kill

UPDATES = 30


def digests(swarm: LocalSwarm, first: int, last: int) -> list[dict[int, object]]:
    """Return each process's digest after each update from ``first`` to ``last``."""
    found: list[dict[int, object]] = []
    for process in swarm.processes:
        seen: dict[int, object] = {}
        end = time.monotonic() + WATCHDOG_SECONDS
        while last not in seen:
            assert time.monotonic() < end
            event = process.event(WATCHDOG_SECONDS)
            assert "behind" not in event, event
            assert "drifted" not in event, event
            if "update" in event:
                assert isinstance(event["update"], int)
                seen[event["update"]] = event["digest"]
        found.append(seen)
    assert all(seen.keys() == set(range(first, last + 1)) for seen in found), "no update is left out"
    return found


def until_members(process: SwarmProcess, names: list[str]) -> dict[object, object]:
    """Return a process's digest after each update, up to the first one of these processes alone."""
    found = {}
    while True:
        event = event_of(process, "update")
        found[event["update"]] = event["digest"]
        weights = event["weights"]
        assert isinstance(weights, dict)
        if sorted(name.partition("/")[2] for name in weights) == names:
            return found


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_both_processes_go_on_after_the_peer_is_started_again(tmp_path: Path, how: signal.Signals) -> None:
    """Nothing is done by hand: the same command again is enough."""
    with daemon(tmp_path) as peer:
        arguments = {"updates": UPDATES, "peers": 2, "path": peer.path, "pause": 0.05}
        with LocalSwarm(work.train, peers=2, arguments=arguments) as swarm:
            swarm.start()
            before = digests(swarm, 1, 5)
            for round_ in range(3):
                peer.kill(how)
                if round_ == 1:
                    time.sleep(2.0)  # a while without a peer, which is what is tested
                peer.start()
            after = digests(swarm, 6, UPDATES)
            events_of(swarm, "done")
    assert before[0] == before[1]
    assert after[0] == after[1]


def test_the_others_go_on_without_a_killed_process(tmp_path: Path) -> None:
    with daemon(tmp_path) as peer:
        arguments = {"updates": 10**6, "peers": 3, "path": peer.path}
        with LocalSwarm(work.train, peers=3, arguments=arguments) as swarm:
            swarm.start()
            assert len({str(seen) for seen in digests(swarm, 1, 5)}) == 1
            victim = swarm.processes.pop()
            kill(victim)
            found = [[event_of(process, "update") for _ in range(20)] for process in swarm.processes]
            assert peer.running
    for one, other in zip(*found, strict=True):
        assert one["digest"] == other["digest"]
    last = found[0][-1]["weights"]
    assert isinstance(last, dict)
    assert sorted(name.partition("/")[2] for name in last) == ["p0", "p1"]


@pytest.mark.long
def test_a_stopped_process_costs_itself(tmp_path: Path) -> None:
    """The others go on without it, in rounds that are among themselves."""
    with daemon(tmp_path) as peer:
        arguments = {"updates": 10**6, "peers": 3, "path": peer.path}
        with LocalSwarm(work.train, peers=3, arguments=arguments) as swarm:
            swarm.start()
            assert len({str(seen) for seen in digests(swarm, 1, 5)}) == 1
            stopped = swarm.processes.pop()
            stopped.stop()
            before = [until_members(process, ["p0", "p1"]) for process in swarm.processes]
            assert before[0] == before[1]
            found = [[event_of(process, "update") for _ in range(20)] for process in swarm.processes]
            stopped.resume()
            assert peer.running
    for one, other in zip(*found, strict=True):
        assert one["digest"] == other["digest"]
