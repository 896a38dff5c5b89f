"""Faults while a state is fetched: donors and joiners that are killed, and disks that are full."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess
from tests.integration.optim import state_work
from tests.integration.optim.test_state_restarts import WATCHDOG_SECONDS, next_of, until_update

MIB = 2**20
ELEMENTS = 3 * MIB
"""Of float32. A snapshot has the parameters and the momentum: 24 MiB."""
STATE_BYTES = 24 * MIB
UPLOAD_MBPS = 20.0  # of each donor: two of them need five seconds
MORE_UPDATES = 4


@contextmanager
def donors(folder: Path, count: int = 2, **changes: Any) -> Iterator[tuple[LocalSwarm, dict[str, Any]]]:
    """Run a swarm that trains a large state; yield it and the arguments of a joiner."""
    arguments = {
        "folder": str(folder),
        "peers": 2,
        "elements": ELEMENTS,
        "batch_seconds": 0.5,  # the snapshot stays the same while a joiner starts again
        "state": {"upload_mbps": UPLOAD_MBPS, "log_bytes": 400 * MIB},
        **changes,
    }
    with LocalSwarm(state_work.train, peers=count, arguments=arguments) as swarm:
        swarm.start()
        for process in swarm.processes:
            until_update(process, 2, [])
        yield swarm, {"seed": 1, "checks": True}


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


def end_together(swarm: LocalSwarm, processes: list[SwarmProcess], epoch: int) -> None:
    """Let processes end at the same update, and check that they have the same parameters."""
    for process in processes:
        process.tell(last=epoch + MORE_UPDATES)
    ends = [next_of(process, "ended", []) for process in processes]
    for process in processes:
        process.tell(end=True)
    assert len({(end["ended"], end["digest"], end["lineage"]) for end in ends}) == 1, ends


def check_no_errors(seen: list[dict[str, Any]]) -> None:
    assert not [event for event in seen if event.get("level") == "ERROR"]


def test_a_joiner_finishes_from_another_donor_when_one_is_killed(tmp_path: Path) -> None:
    with donors(tmp_path, 3) as (swarm, joining):
        seen: list[dict[str, Any]] = []
        joiner = swarm.add(arguments=joining)
        until(joiner, "done", lambda done: done > STATE_BYTES // 4, seen)
        swarm.processes[1].kill()
        until(joiner, "log", lambda line: "has loaded the state" in line, seen)
        update = until(joiner, "replayed", lambda replayed: not replayed, seen)
        end_together(swarm, [swarm.processes[0], swarm.processes[2], joiner], update["update"] + 2)
        check_no_errors(seen)


def test_a_joiner_without_donors_keeps_its_state_and_goes_on(tmp_path: Path) -> None:
    with donors(tmp_path) as (swarm, joining):
        seen: list[dict[str, Any]] = []
        joiner = swarm.add(arguments=joining | {"sync_timeout": 3.0})
        begin = next_of(joiner, "began", seen)
        until(joiner, "done", lambda done: done > STATE_BYTES // 4, seen)
        for process in swarm.processes[:2]:
            process.kill()
        said = until(
            joiner,
            "catching_up",
            lambda line: "could" in line or "no donor" in line or "no peer" in line,
            seen,
        )
        assert said["same"] is True
        assert said["epoch"] == 0
        digests = {begin["digest"]}
        joiner.tell(say=True)
        digests.add(until(joiner, "now", lambda _: True, seen)["now"])
        assert len(digests) == 1, "its parameters are the ones that it began with"
        assert joiner.running
        check_no_errors(seen)


def test_a_joiner_that_is_killed_resumes_its_download(tmp_path: Path) -> None:
    with donors(tmp_path) as (swarm, joining):
        joiner = swarm.add(arguments=joining | {"die_at": STATE_BYTES // 2})
        first: list[dict[str, Any]] = list(joiner.events(WATCHDOG_SECONDS))
        assert joiner.process.wait() == -9
        came = max(event["done"] for event in first if is_of_snapshot(event))
        seen: list[dict[str, Any]] = []
        again = swarm.restart(joiner.index, arguments={"die_at": 10**12})
        while not (begun := next_of(again, "done", seen))["done"] or not is_of_snapshot(begun):
            pass
        assert begun["done"] >= 0.95 * came, "what was there is not sent again"
        until(again, "log", lambda line: "has loaded the state" in line, seen)
        update = until(again, "replayed", lambda replayed: not replayed, seen)
        end_together(swarm, [*swarm.processes[:2], again], update["update"] + 2)
        check_no_errors(seen)


def test_a_joiner_that_is_killed_while_it_loads_a_state_is_a_valid_peer_again(tmp_path: Path) -> None:
    with donors(tmp_path, 2, elements=1000, state={"every": 2, "keep": 2}) as (swarm, joining):
        joiner = swarm.add(arguments=joining | {"die_loading": True})
        assert list(joiner.events(WATCHDOG_SECONDS))
        assert joiner.process.wait() == -9
        seen: list[dict[str, Any]] = []
        again = swarm.restart(joiner.index, arguments={"die_loading": False})
        update = until(again, "replayed", lambda replayed: not replayed, seen)
        end_together(swarm, [*swarm.processes[:2], again], update["update"] + 2)
        check_no_errors(seen)
        assert not [event for event in seen if "damaged" in event.get("log", "")]


def test_a_full_disk_is_told_and_training_goes_on(tmp_path: Path) -> None:
    """The limit of a file's size stands for the disk: writing beyond it fails in the same place."""
    with donors(tmp_path) as (swarm, joining):
        seen: list[dict[str, Any]] = []
        joiner = swarm.add(arguments=joining | {"file_bytes": 8 * MIB})
        said = until(joiner, "catching_up", lambda line: "full" in line, seen)
        assert said["same"] is True
        assert "download" in said["catching_up"]
        check_no_errors(seen)
    (tmp_path / "full").mkdir()
    with donors(tmp_path / "full", 2, file_bytes=MIB, state={"every": 2}) as (swarm, _):
        told: list[dict[str, Any]] = []
        until(swarm.processes[0], "log", lambda line: "no checkpoint of update" in line, told)
        lines = [event["log"] for event in told if event.get("level") == "ERROR"]
        assert "cannot write the checkpoint" in lines[-1]
        update = next_of(swarm.processes[0], "update", told)["update"]
        end_together(swarm, swarm.processes, update + MORE_UPDATES)
