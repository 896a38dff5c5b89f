"""Checkpoints of real processes: a run that was killed goes on from the newest one, and each is written whole."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pavg.blocking import open_averager
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess
from tests.integration.optim import state_work
from tests.integration.optim.company import LISTEN, config

PEERS = 4
EVERY = 5
WATCHDOG_SECONDS = 600.0


def next_of(process: SwarmProcess, key: str, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the next report of a process that has a key; note all reports on the way."""
    end = time.monotonic() + WATCHDOG_SECONDS
    while True:
        event = process.event(max(end - time.monotonic(), 0.0))
        seen.append(event)
        if key in event:
            return event


def until_update(process: SwarmProcess, update: int, seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the report of the first update at or after ``update``."""
    while (event := next_of(process, "update", seen))["update"] < update:
        pass
    return event


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a directory, the oldest first."""
    return sorted(folder.glob("update-*.safetensors"))


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """All peers but one have lost their newest checkpoint, and download the state from the one that has it."""
    behind = PEERS - 1
    arguments = {
        "folder": str(tmp_path),
        "peers": PEERS,
        "state": {"every": EVERY, "keep": 2},
        "batch_seconds": 0.1,  # a checkpoint is written before the next one is due
    }
    with LocalSwarm(state_work.train, peers=PEERS, arguments=arguments) as swarm:
        swarm.start()
        seen: list[list[dict[str, Any]]] = [[] for _ in range(PEERS)]
        begins = [next_of(process, "began", seen[i]) for i, process in enumerate(swarm.processes)]
        assert [begin["began"] for begin in begins] == [0] * PEERS
        first = until_update(swarm.processes[0], 1, seen[0])
        for index, process in enumerate(swarm.processes):
            until_update(process, 4 * EVERY + 2, seen[index])
        for process in swarm.processes:
            process.kill()
        for index, process in enumerate(swarm.processes):
            process.process.wait()
            seen[index] += list(process.events(10.0))
        reached = max(event["update"] for events in seen for event in events if "update" in event)
        losses = {event["update"]: event["loss"] for event in seen[0] if "update" in event}
        folders = [tmp_path / str(index) for index in range(PEERS)]
        assert all(len(checkpoints(folder)) == 2 for folder in folders)
        newest = checkpoints(folders[-1])[-1].name
        for folder in folders[:behind]:
            for path in checkpoints(folder):
                if path.name >= newest:
                    path.unlink()
        epoch = int(newest.removeprefix("update-").split(".")[0])
        assert reached - epoch <= EVERY, "no more updates are lost than between two checkpoints"

        swarm.restart(0)
        for index in range(1, PEERS):
            swarm.restart(index, wait=False)
        again: list[list[dict[str, Any]]] = [[] for _ in range(PEERS)]
        begins = [next_of(process, "began", again[i]) for i, process in enumerate(swarm.processes)]
        assert all(begin["began"] < epoch for begin in begins[:behind])
        assert all(begin["began"] == epoch for begin in begins[behind:])
        for begin in begins:
            assert begin["extras"]["data_position"] >= begin["began"] * state_work.BATCH
        updates = [until_update(process, 0, again[i]) for i, process in enumerate(swarm.processes)]
        assert [update["update"] for update in updates] == [epoch + 1] * PEERS
        assert [update["peers"] for update in updates] == [PEERS] * PEERS
        assert updates[0]["loss"] < 0.5 * first["loss"]
        assert updates[0]["loss"] < 3.0 * losses[epoch], "the loss goes on where it was"
        for process in swarm.processes:
            process.tell(last=epoch + 10)
        ends = [next_of(process, "ended", again[i]) for i, process in enumerate(swarm.processes)]
        for process in swarm.processes:
            process.tell(end=True)
        swarm.wait_ended(60.0)
    assert [end["ended"] for end in ends] == [epoch + 10] * PEERS
    assert len({(end["digest"], end["lineage"]) for end in ends}) == 1
    for index in range(PEERS):
        loaded = [e for e in again[index] if "has loaded the state of update" in e.get("log", "")]
        assert len(loaded) == (1 if index < behind else 0)
        logged = [e["log"] for e in again[index] if e.get("level") in ("WARNING", "ERROR")]
        assert not [line for line in logged if "has waited" not in line], (
            "a slow machine's peers wait for each other"
        )


def test_a_checkpoint_that_is_being_written_when_the_averager_closes_is_written() -> None:
    written: list[int] = []
    with open_averager(config(2), listen=LISTEN) as averager:
        averager.declare([torch.zeros(3)])
        sharing = averager.share_states(ShareSettings(log_bytes=2**20))
        sharing._token.run_sync_soon(time.sleep, 0.5)  # what follows is heard of at once
        sharing.in_background(lambda: written.append(1))
        sharing._token.run_sync_soon(sharing._nursery.cancel_scope.cancel)  # as the averager's end does
    assert written == [1]
