"""An attached process that begins late gets the run's state from its siblings, or through the peer from other peers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess
from tests.integration.attach import work
from tests.integration.attach.daemon import WATCHDOG_SECONDS, daemon, event_of


def until_update(process: SwarmProcess, update: int) -> dict[int, Any]:
    """Return a process's reports of its updates, up to one."""
    found: dict[int, Any] = {}
    while max(found, default=0) < update:
        event = event_of(process, "update")
        found[event["update"]] = event  # type: ignore[index]
    return found


def check_joins(swarm: LocalSwarm, late: SwarmProcess, name: str) -> None:
    """Check that a late process takes part in an update of the others, and holds what they hold."""
    end = time.monotonic() + WATCHDOG_SECONDS
    seen: dict[int, Any] = {}
    while True:
        assert time.monotonic() < end
        event: Any = event_of(late, "update")
        seen[event["update"]] = event
        if len(event["members"]) > 1 and any(name in member for member in event["members"]):
            break
    last = max(seen)
    others = [until_update(process, last) for process in swarm.processes if process is not late]
    for other in others:
        common = seen.keys() & other.keys()
        assert last in common
        assert all(seen[update]["digest"] == other[update]["digest"] for update in common)


@pytest.mark.long
@pytest.mark.parametrize("local", [False, True], ids=["gradients", "local updates"])
def test_a_late_process_gets_the_state_of_its_siblings(tmp_path: Path, local: bool) -> None:
    """No other peer is there, so the averages have no certificate, and no other peer could pass them on."""
    with daemon(tmp_path) as peer:
        arguments = {"peers": 3, "path": peer.path, "local": local}
        with LocalSwarm(work.train_with_state, peers=2, arguments=arguments) as swarm:
            swarm.start()
            for process in swarm.processes:
                until_update(process, 8)
            late = swarm.add(arguments={"late": True})
            check_joins(swarm, late, "/p2")


@pytest.mark.long
def test_a_late_process_gets_the_state_of_another_peer_through_its_own(tmp_path: Path) -> None:
    """The process is the only one at its peer."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with daemon(tmp_path / "one") as first:
        arguments: dict[str, Any] = {"peers": 3, "address": first.address}
        with (
            LocalSwarm(work.train_with_state, peers=2, arguments=arguments) as swarm,
            daemon(tmp_path / "two", "--bootstrap", first.address) as second,
        ):
            swarm.start()
            for process in swarm.processes:
                until_update(process, 8)
            late = swarm.add(arguments={"late": True, "path": second.path})
            check_joins(swarm, late, "/p2")


@pytest.mark.long
def test_a_late_peer_gets_the_state_from_attached_processes(tmp_path: Path) -> None:
    with daemon(tmp_path) as peer:
        arguments: dict[str, Any] = {"peers": 3, "path": peer.path, "attached": 2, "address": peer.address}
        with LocalSwarm(work.train_with_state, peers=2, arguments=arguments) as swarm:
            swarm.start()
            for process in swarm.processes:
                until_update(process, 8)
            late = swarm.add(arguments={"late": True})
            check_joins(swarm, late, late.peer_id)
