"""An epoch's samples are taken once each by a swarm whose peers die and come, up to what died with its peer."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess
from tests.integration.optim import coverage_work

WATCHDOG_SECONDS = 1500.0
UPDATES_BETWEEN = 3
MOST = 0.02
"""Part of an epoch's samples that may be missed, or repeated, beyond what died with its peer."""


class Counted:
    """The samples that the run's updates have counted, from what its processes have reported."""

    def __init__(self) -> None:
        self.taken: dict[int, Counter[int]] = {}
        self._pending: dict[str, list[tuple[int, int]]] = {}
        self._until: dict[str, int] = {}
        self._updates: dict[int, dict[str, int]] = {}

    def add(self, peer_id: str, event: dict[str, Any]) -> None:
        if "batch" in event:
            self._pending.setdefault(peer_id, []).extend((epoch, sample) for epoch, sample in event["batch"])
        elif "update" in event:
            assert self._updates.setdefault(event["update"], event["weights"]) == event["weights"]
            self._count(peer_id, event["update"])

    @property
    def updates(self) -> int:
        """Number of updates that the run has taken."""
        return len(self._updates)

    def has_trained(self, peer_id: str) -> bool:
        """Return whether a peer has contributed to an update."""
        return any(peer_id in weights for weights in self._updates.values())

    def _count(self, peer_id: str, update: int) -> None:
        self._until[peer_id] = update
        if count := self._updates[update].get(peer_id, 0):
            pending = self._pending.pop(peer_id, [])
            # What it had accumulated before it fell behind was dropped.
            for epoch, sample in pending[-count:]:
                self.taken.setdefault(epoch, Counter())[sample] += 1

    def ended(self) -> None:
        """Count what was taken by peers that died before they could tell of the update."""
        for peer_id, pending in [*self._pending.items()]:
            later = [
                update
                for update, weights in self._updates.items()
                if update > self._until.get(peer_id, 0) and peer_id in weights
            ]
            if later:
                count = self._updates[min(later)][peer_id]
                for epoch, sample in pending[:count]:
                    self.taken.setdefault(epoch, Counter())[sample] += 1


def run(
    *,
    peers: int,
    length: int,
    epochs: int,
    every: float,
    least: float,
    batch_seconds: float = 0.05,
) -> list[str]:
    """Train for some epochs, with a kill and a join every few seconds; return a line for each epoch.

    Args:
        least: part of an epoch's samples that may be missed, or repeated.
    """
    arguments = {
        "length": length,
        "peers": peers,
        "batch": 8,
        "batch_seconds": batch_seconds,
        # What is left of an epoch when the next one has begun is in the lanes of some.
        "epochs": epochs + 2,
    }
    counted, kills = Counted(), 0
    ids: dict[int, str] = {}
    addresses: dict[int, str] = {}

    def read(process: SwarmProcess, timeout: float) -> None:
        with suppress(TimeoutError):
            for event in process.events(timeout):
                if "peer_id" in event:
                    ids[process.index], addresses[process.index] = event["peer_id"], event["address"]
                else:
                    counted.add(ids[process.index], event)

    with LocalSwarm(coverage_work.train, peers=peers, arguments={**arguments, "start": peers}) as swarm:
        swarm.start()
        alive = list(swarm.processes)
        ids |= {process.index: process.peer_id for process in alive}
        addresses |= {process.index: process.address for process in alive}
        waiting = [swarm.add(arguments={"waits": True, "start": None}, wait=False) for _ in range(2)]
        began = last = time.monotonic()
        before = 0
        while any(process.running for process in alive):
            assert time.monotonic() < began + WATCHDOG_SECONDS
            for process in list(swarm.processes):
                read(process, 0.0)
            # Those that train must not all die at once: the run would begin again, from the state that joiners hold.
            # And on a busy machine it has to take updates between two deaths.
            here = [each for each in alive if counted.has_trained(ids.get(each.index, ""))]
            is_due = time.monotonic() >= last + every and counted.updates >= before + UPDATES_BETWEEN
            if is_due and len(here) >= 3 and all(process.running for process in alive):
                before = counted.updates
                last = time.monotonic()
                # The oldest, so that in the end none is left that has been there from the beginning.
                alive.pop(0).kill()
                kills += 1
                joins = waiting.pop(0)
                # Those that were there when it was started may all have died.
                joins.tell(bootstrap=[addresses[each.index] for each in alive if each.index in addresses])
                alive.append(joins)
                waiting.append(swarm.add(arguments={"waits": True, "start": None}, wait=False))
            time.sleep(0.05)
        for process in waiting:
            process.kill()
        for process in swarm.processes:
            read(process, 1.0)
    counted.ended()
    assert kills >= 1
    lines = []
    for epoch in range(epochs):
        taken = counted.taken[epoch]
        missed = (length - len(taken)) / length
        repeated = sum(times - 1 for times in taken.values()) / length
        lines.append(f"epoch {epoch}: {missed:.2%} missed, {repeated:.2%} repeated")
        assert missed <= least, lines
        assert repeated <= least, lines
    return [*lines, f"{kills} kills"]


def test_a_small_swarm_takes_each_sample_once(capsys: pytest.CaptureFixture[str]) -> None:
    # Of so few samples, those weigh more that some repeat before the first update, when no peer knows of the others'.
    lines = run(peers=4, length=800, epochs=1, every=4.0, least=3 * MOST)
    with capsys.disabled():
        print("", *lines, sep="\n")


@pytest.mark.long
def test_eight_peers_take_each_sample_of_ten_epochs_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(peers=8, length=1500, epochs=10, every=5.0, least=MOST)
    with capsys.disabled():
        print("", *lines, sep="\n")
