"""Faults while a state is fetched, in real processes: what is done, and what must come of it.

Processes for joiners are started early, and wait: importing torch takes longer than most of the faults.
"""

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
ELEMENTS = 2 * MIB
"""Of float32. A snapshot has the parameters and the momentum: 16 MiB."""
STATE_BYTES = 16 * MIB
UPLOAD_MBPS = 16.0  # of each donor: two of them need four seconds
LOG_BYTES = 32 * MIB  # of a dozen updates
DONORS = 2
"""With a joiner, they are three peers. Of four, two pairs could go on by themselves on a slow machine."""
MOST_CHUNKS = 4
"""Each of two donors sends more chunks of a snapshot than these."""
TENSORS = 3
"""Of the parameters, which a joiner replaces one after the other."""
TRIES = 4
"""Joiners, until a donor comes to the chunk at which it fails: the others may be faster, or it has no snapshot."""
PATIENCE = 5.0  # for donors that are gone: the default is half a minute

Seen = list[dict[str, Any]]


@contextmanager
def donors(folder: Path) -> Iterator[LocalSwarm]:
    """Run a swarm that trains a large state."""
    arguments = {
        "folder": str(folder),
        "peers": 2,
        "elements": ELEMENTS,
        "batch_seconds": 1.5,  # slower than the donors send averages; the snapshot stays while a joiner starts again
        "checks": True,
        "patience": PATIENCE,
        "state": {"upload_mbps": UPLOAD_MBPS, "log_bytes": LOG_BYTES},
    }
    with LocalSwarm(state_work.train, peers=DONORS, arguments=arguments) as swarm:
        swarm.start()
        yield swarm


def until_training(swarm: LocalSwarm) -> None:
    """Wait until each donor has taken an update."""
    for process in swarm.processes[:DONORS]:
        until_update(process, 1, [])


def prepare(swarm: LocalSwarm, name: str) -> SwarmProcess:
    """Start a process for a joiner that begins when it is told; the name is that of its folder and identity."""
    return swarm.add(arguments={"waits": True, "name": name, "seed": 1}, wait=False)


def go(joiner: SwarmProcess, **arguments: Any) -> None:
    """Let a joiner begin."""
    joiner.tell(go=arguments)
    joiner.wait_joined(WATCHDOG_SECONDS)


def arm(donor: SwarmProcess, chunk: int, *, spoils: bool = False) -> None:
    """Prepare a donor's fault; see :class:`state_work.Sabotage`."""
    donor.tell(sabotage={"chunk": chunk, "spoils": spoils})
    next_of(donor, "armed", [])


def until(process: SwarmProcess, key: str, found: Any, seen: Seen) -> dict[str, Any]:
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


def until_part(joiner: SwarmProcess, seen: Seen) -> None:
    """Wait until a part of a snapshot is here."""
    while not is_of_snapshot(event := next_of(joiner, "done", seen)) or not event["done"]:
        pass


def check_joined(joiner: SwarmProcess, donor: SwarmProcess, seen: Seen) -> None:
    """Check that a joiner takes part in a round, and has then the parameters of a donor."""
    here = until(joiner, "replayed", lambda replayed: not replayed, seen)
    there = until_update(donor, here["update"], [])
    while (
        there["update"] != here["update"]
    ):  # a donor that was left behind has taken this update with a snapshot
        here = until_update(joiner, there["update"], seen)
        there = until_update(donor, here["update"], []) if here["update"] > there["update"] else there
    assert there["digest"] == here["digest"], f"{there} and {here}"
    assert not [event for event in seen if event.get("level") == "ERROR"]


# ---------------------------------------------------------------------- faults


def joiner_dies_downloading(
    first: SwarmProcess, again: SwarmProcess, donor: SwarmProcess, part: float
) -> None:
    """Kill a joiner when this part of the snapshot is here; it begins again with what it had.

    Args:
        again: a process with the same folder.
    """
    go(first, die_at=int(part * STATE_BYTES))
    came = max(event["done"] for event in first.events(WATCHDOG_SECONDS) if is_of_snapshot(event))
    assert first.process.wait() == -9
    seen: Seen = []
    go(again)
    begun: dict[str, Any] = {}
    while not is_of_snapshot(begun) or not begun["done"]:
        begun = again.event(WATCHDOG_SECONDS)
        seen.append(begun)
        assert "has loaded" not in begun.get("log", ""), seen
    assert begun["done"] >= 0.95 * came, "what was there is not sent again"
    check_joined(again, donor, seen)


def joiner_dies_loading(first: SwarmProcess, again: SwarmProcess, donor: SwarmProcess, tensors: int) -> None:
    """Kill a joiner when so many tensors of its state are replaced; it begins again as a valid peer."""
    checkpoints = {"every": 2, "keep": 2}
    go(first, die_loading=tensors, state=checkpoints)
    assert list(first.events(WATCHDOG_SECONDS))
    assert first.process.wait() == -9
    seen: Seen = []
    go(again, state=checkpoints)
    check_joined(again, donor, seen)
    assert not [event for event in seen if "damaged" in event.get("log", "")]


def disk_is_full(joiner: SwarmProcess, file_bytes: int) -> None:
    """Let a joiner write files up to this size: it says that the disk is full, and keeps its state.

    The limit of a file's size stands for the disk: writing beyond it fails in the same place.
    """
    seen: Seen = []
    go(joiner, file_bytes=file_bytes)
    said = until(joiner, "catching_up", lambda line: "full" in line, seen)
    assert said["same"] is True, "its parameters are the ones that it began with"
    assert "download" in said["catching_up"]
    assert joiner.running
    assert not [event for event in seen if event.get("level") == "ERROR"]


def donor_dies(joiner: SwarmProcess, victim: SwarmProcess, donor: SwarmProcess) -> bool:
    """Let a donor that is armed die while a joiner fetches its state from it and others: the joiner joins.

    Returns false if the others were so fast that the donor did not come to its chunk.
    """
    seen: Seen = []
    go(joiner)
    until(joiner, "log", lambda line: "has loaded the state" in line, seen)
    died = not victim.running
    check_joined(joiner, donor, seen)
    return died


def donor_lies(joiner: SwarmProcess, liar: SwarmProcess, donor: SwarmProcess) -> bool:
    """Let a donor that is armed send a wrong chunk: the joiner excludes it by name, and joins.

    Returns false if the others were so fast that the donor did not come to its chunk.
    """
    seen: Seen = []
    go(joiner)
    check_joined(joiner, donor, seen)
    blamed = [event["log"] for event in seen if "sent piece" in event.get("log", "")]
    assert all(liar.peer_id in line for line in blamed), "the evidence names the donor that lied"
    return bool(blamed)


def donors_vanish(joiner: SwarmProcess, swarm: LocalSwarm) -> None:
    """Kill all other peers while a joiner fetches a state: it says so, and keeps its state."""
    seen: Seen = []
    go(joiner, sync_timeout=2.0)
    begin = next_of(joiner, "began", seen)
    until_part(joiner, seen)
    for process in swarm.processes:
        if process is not joiner:
            process.kill()
    said = until(joiner, "catching_up", lambda line: "no " in line, seen)
    assert said["same"] is True
    assert said["epoch"] == 0
    joiner.tell(say=True)
    assert until(joiner, "now", lambda _: True, seen)["now"] == begin["digest"]
    assert joiner.running
    assert not [event for event in seen if event.get("level") == "ERROR"]
