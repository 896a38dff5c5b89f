"""Processes that share one peer train like as many peers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import Member
from tests.integration.attach import work
from tests.integration.attach.daemon import daemon, event_of, events_of

UPDATES = 15


def updates_of(swarm: LocalSwarm, count: int = UPDATES) -> list[list[dict[str, object]]]:
    """Return the reports of each process's updates."""
    return [[event_of(process, "update") for _ in range(count)] for process in swarm.processes]


def run(
    arguments: dict[str, object], program: Callable[[Member], None] = work.train, peers: int = 2
) -> list[list[dict[str, object]]]:
    with LocalSwarm(
        program, peers=peers, arguments={"updates": UPDATES, "peers": peers, **arguments}
    ) as swarm:
        swarm.start()
        found = updates_of(swarm)
        assert all(event["done"] for event in events_of(swarm, "done"))
        return found


@pytest.mark.long
def test_two_attached_processes_train_like_two_peers_to_the_bit(tmp_path: Path) -> None:
    with daemon(tmp_path) as peer:
        together = run({"path": peer.path})
    apart = run({})
    digests = [[update["digest"] for update in updates] for updates in (*together, *apart)]
    assert digests[0] == digests[1], "the processes of one peer hold the same bits after every update"
    assert digests[2] == digests[3]
    assert digests[0] == digests[2], "the same as two peers with the same batches"
    names = sorted(together[0][0]["weights"])  # type: ignore[call-overload]
    assert [name.partition("/")[2] for name in names] == ["p0", "p1"]


@pytest.mark.long
def test_local_updates_of_attached_processes_are_those_of_two_peers_to_the_bit(tmp_path: Path) -> None:
    with daemon(tmp_path) as peer:
        together = run({"path": peer.path}, work.train_locally)
    apart = run({}, work.train_locally)
    digests = [[update["digest"] for update in updates] for updates in (*together, *apart)]
    assert digests[0] == digests[1] == digests[2] == digests[3]


def test_attached_processes_and_another_peer_train_together(tmp_path: Path) -> None:
    """The group has two members; the update is that of three batches."""
    with daemon(tmp_path) as peer:
        found = run({"path": peer.path, "attached": 2, "address": peer.address}, peers=3)
    for first, second, other in zip(*found, strict=True):
        assert first["digest"] == second["digest"] == other["digest"]
        ours, theirs = first["weights"], other["weights"]
        assert isinstance(ours, dict)
        assert isinstance(theirs, dict)
        own = {name: weight for name, weight in ours.items() if "/" in name}
        assert len(own) == 2
        (shared,) = {name.partition("/")[0] for name in own}
        assert len(theirs) == 2, "it sees one member with the batches of both"
        assert theirs[shared] == sum(own.values())
        assert sum(theirs.values()) == sum(ours.values())
