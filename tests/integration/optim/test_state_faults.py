"""Faults while a state is fetched: donors and joiners that are killed, and disks that are full."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess
from tests.integration.optim import state_work
from tests.integration.optim.test_state_restarts import WATCHDOG_SECONDS, next_of, until_update

MIB = 2**20
ELEMENTS = 3 * MIB
"""Of float32. A snapshot has the parameters and the momentum: 24 MiB."""
STATE_BYTES = 24 * MIB
UPLOAD_MBPS = 20.0  # of each donor: two of them need five seconds


@contextmanager
def donors(folder: Path, count: int, **changes: Any) -> Iterator[LocalSwarm]:
    """Run a swarm that trains a large state."""
    arguments = {
        "folder": str(folder),
        "peers": 2,
        "elements": ELEMENTS,
        "batch_seconds": 1.5,  # slower than the donors send averages; the snapshot stays while a joiner starts again
        "checks": True,
        "state": {"upload_mbps": UPLOAD_MBPS, "log_bytes": 400 * MIB},
        **changes,
    }
    with LocalSwarm(state_work.train, peers=count, arguments=arguments) as swarm:
        swarm.start()
        for process in swarm.processes:
            until_update(process, 1, [])
        yield swarm


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """Run two donors for several joiners, which come one after the other."""
    with donors(tmp_path_factory.mktemp("donors"), 2) as found:
        yield found


def until(process: SwarmProcess, key: str, found: Any, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first report whose value of a key is as wanted."""
    end = time.monotonic() + WATCHDOG_SECONDS
    while time.monotonic() < end:
        event = next_of(process, key, seen)
        if event[key] is not None and found(event[key]):
            return event
    raise AssertionError(f"no such {key}")


def is_of_snapshot(event: dict[str, Any]) -> bool:
    """Return whether a report is the progress of a snapshot, and not of an average."""
    return bool(event.get("total", 0) >= STATE_BYTES)


def until_half(joiner: SwarmProcess, seen: list[dict[str, Any]]) -> None:
    """Wait until a good part of a snapshot is here."""
    while not is_of_snapshot(event := next_of(joiner, "done", seen)) or event["done"] < STATE_BYTES // 4:
        pass


def check_joined(joiner: SwarmProcess, donor: SwarmProcess, seen: list[dict[str, Any]]) -> None:
    """Check that a joiner takes part in a round, and has then the parameters of a donor."""
    update = until(joiner, "replayed", lambda replayed: not replayed, seen)
    assert until_update(donor, update["update"], [])["digest"] == update["digest"]
    assert not [event for event in seen if event.get("level") == "ERROR"]


def leave(joiner: SwarmProcess) -> None:
    """Let a joiner end."""
    joiner.tell(last=0)
    next_of(joiner, "ended", [])  # before that, the joiner's loop would take the next message
    joiner.tell(end=True)
    list(joiner.events(WATCHDOG_SECONDS))


def test_a_joiner_that_is_killed_resumes_its_download(swarm: LocalSwarm) -> None:
    joiner = swarm.add(arguments={"seed": 1, "die_at": STATE_BYTES // 2})
    first: list[dict[str, Any]] = list(joiner.events(WATCHDOG_SECONDS))
    assert joiner.process.wait() == -9
    came = max(event["done"] for event in first if is_of_snapshot(event))
    seen: list[dict[str, Any]] = []
    again = swarm.restart(joiner.index, arguments={"die_at": 10**12})
    begun: dict[str, Any] = {}
    while not is_of_snapshot(begun) or not begun["done"]:
        begun = again.event(WATCHDOG_SECONDS)
        seen.append(begun)
        assert "has loaded" not in begun.get("log", ""), seen
    assert begun["done"] >= 0.95 * came, "what was there is not sent again"
    check_joined(again, swarm.processes[0], seen)
    leave(again)


def test_a_joiner_that_is_killed_while_it_loads_a_state_is_a_valid_peer_again(swarm: LocalSwarm) -> None:
    arguments = {"seed": 1, "state": {"every": 2, "keep": 2}}
    joiner = swarm.add(arguments=arguments | {"die_loading": True})
    assert list(joiner.events(WATCHDOG_SECONDS))
    assert joiner.process.wait() == -9
    seen: list[dict[str, Any]] = []
    again = swarm.restart(joiner.index, arguments={"die_loading": False})
    check_joined(again, swarm.processes[0], seen)
    assert not [event for event in seen if "damaged" in event.get("log", "")]
    leave(again)


def test_a_full_disk_stops_the_download_and_not_the_joiner(swarm: LocalSwarm) -> None:
    """The limit of a file's size stands for the disk: writing beyond it fails in the same place."""
    seen: list[dict[str, Any]] = []
    joiner = swarm.add(arguments={"seed": 1, "file_bytes": 8 * MIB})
    said = until(joiner, "catching_up", lambda line: "full" in line, seen)
    assert said["same"] is True, "its parameters are the ones that it began with"
    assert "download" in said["catching_up"]
    assert joiner.running
    assert not [event for event in seen if event.get("level") == "ERROR"]
    leave(joiner)


def test_a_joiner_needs_one_donor_and_keeps_its_state_without_any(tmp_path: Path) -> None:
    with donors(tmp_path, 3) as swarm:
        seen: list[dict[str, Any]] = []
        joiner = swarm.add(arguments={"seed": 1})
        until_half(joiner, seen)
        swarm.processes[1].kill()
        until(joiner, "log", lambda line: "has loaded the state" in line, seen)
        check_joined(joiner, swarm.processes[0], seen)

        seen = []
        late = swarm.add(arguments={"seed": 1, "sync_timeout": 3.0})
        begin = next_of(late, "began", seen)
        until_half(late, seen)
        for process in swarm.processes[:-1]:
            process.kill()
        said = until(late, "catching_up", lambda line: "no " in line, seen)
        assert said["same"] is True
        assert said["epoch"] == 0
        late.tell(say=True)
        assert until(late, "now", lambda _: True, seen)["now"] == begin["digest"]
        assert late.running
        assert not [event for event in seen if event.get("level") == "ERROR"]
