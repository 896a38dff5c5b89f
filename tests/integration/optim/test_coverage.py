"""An epoch's samples are taken once each by a swarm whose peers die and come, up to what died with its peer."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess
from tests.integration.optim import coverage_work

WATCHDOG_SECONDS = 1500.0
PEERS, LENGTH, BATCH = 4, 800, 8
SECONDS_BETWEEN, UPDATES_BETWEEN = 4.0, 3
"""Between two deaths, at least."""
MOST = 0.06
"""Part of an epoch's samples that may be missed, or repeated, beyond what died with its peer. Of so few samples, those
weigh more that some repeat before the first update, when no peer knows of the others'."""


@dataclass(frozen=True)
class Update:
    """One update as its members reported it: two groups that lost sight of each other each make one of a number."""

    number: int
    weights: tuple[tuple[str, int], ...]
    before: tuple[float, ...]
    """The parameters' values before it."""
    after: tuple[float, ...]


class Counted:
    """The samples that the run's updates have counted, from what its processes have reported."""

    def __init__(self) -> None:
        self.taken: dict[int, Counter[int]] = {}
        self._told: dict[str, list[Update | tuple[int, int]]] = {}
        """What each peer has told: its samples, and the updates that it took part in or replayed."""
        self._values: dict[str, tuple[float, ...]] = {}
        self._updates: dict[int, set[Update]] = {}

    def add(self, peer_id: str, event: dict[str, Any]) -> None:
        told = self._told.setdefault(peer_id, [])
        if "batch" in event:
            told.extend((epoch, sample) for epoch, sample in event["batch"])
        elif "update" in event:
            weights = tuple(sorted(event["weights"].items()))
            update = Update(event["update"], weights, self._values.get(peer_id, ()), tuple(event["values"]))
            told.append(update)
            self._updates.setdefault(update.number, set()).add(update)
        self._values[peer_id] = tuple(event["values"])

    @property
    def updates(self) -> int:
        """Number of updates that the run has taken."""
        return len(self._updates)

    @property
    def splits(self) -> int:
        """Number of updates that the run has taken twice, and of which one was given up."""
        return sum(len({each.after for each in those}) > 1 for those in self._updates.values())

    def has_trained(self, peer_id: str) -> bool:
        """Return whether a peer has contributed to an update."""
        return any(peer_id in dict(each.weights) for those in self._updates.values() for each in those)

    def count(self) -> None:
        """Count the samples of the updates from which the run's last state follows."""
        kept: dict[int, Update] = {}
        values: Counter[tuple[float, ...]] = Counter()
        for number, those in sorted(self._updates.items(), reverse=True):
            # Most that told of the next update had the values from which it was taken. One may have fetched them after
            # its last batch.
            kept[number] = max(those, key=lambda each: values[each.after])
            values = Counter(each.before for each in those if each.after == kept[number].after)
        for peer_id, told in self._told.items():
            self._count(peer_id, told, kept)

    def _count(self, peer_id: str, told: list[Update | tuple[int, int]], kept: dict[int, Update]) -> None:
        pending: list[tuple[int, int]] = []
        until = 0
        for each in told:
            if not isinstance(each, Update):
                pending.append(each)
                continue
            until = each.number
            if count := dict(each.weights).get(peer_id, 0):
                # What it had accumulated before it fell behind was dropped.
                if kept[each.number].after == each.after:
                    self._take(pending[-count:])
                pending = []
        # It may have died before it could tell of the update.
        later = [number for number, each in kept.items() if number > until and peer_id in dict(each.weights)]
        if later:
            self._take(pending[: dict(kept[min(later)].weights)[peer_id]])

    def _take(self, samples: list[tuple[int, int]]) -> None:
        for epoch, sample in samples:
            self.taken.setdefault(epoch, Counter())[sample] += 1


def test_a_small_swarm_takes_each_sample_once() -> None:
    """A kill and a join come every few seconds."""
    # What is left of an epoch when the next one has begun is in the lanes of some.
    epochs = 3
    arguments: dict[str, Any] = {
        "length": LENGTH,
        "peers": PEERS,
        "batch": BATCH,
        "batch_seconds": 0.05,
        "epochs": epochs,
    }
    counted, kills = Counted(), 0
    in_all = LENGTH * epochs // (2 * PEERS * BATCH)
    ids: dict[int, str] = {}
    addresses: dict[int, str] = {}

    def read(process: SwarmProcess, timeout: float) -> None:
        with suppress(TimeoutError):
            for event in process.events(timeout):
                if "peer_id" in event:
                    ids[process.index], addresses[process.index] = event["peer_id"], event["address"]
                else:
                    counted.add(ids[process.index], event)

    with LocalSwarm(coverage_work.train, peers=PEERS, arguments={**arguments, "start": PEERS}) as swarm:
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
            is_due = (
                time.monotonic() >= last + SECONDS_BETWEEN and counted.updates >= before + UPDATES_BETWEEN
            )
            # One that joins just before the end may miss the last update, and the others have left then.
            is_due = is_due and counted.updates + 4 * UPDATES_BETWEEN <= in_all
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
    counted.count()
    assert kills >= 1
    taken = counted.taken[0]
    missed = (LENGTH - len(taken)) / LENGTH
    repeated = sum(times - 1 for times in taken.values()) / LENGTH
    told = (
        f"{missed:.2%} missed, {repeated:.2%} repeated, {kills} kills, {counted.splits} updates taken twice"
    )
    assert max(missed, repeated) <= MOST, told
