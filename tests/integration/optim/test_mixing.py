"""Peers that average with another small group in each round: real processes, and one of them dies."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from p2pavg.testing import LocalSwarm, SwarmProcess
from tests.integration.optim import mixing_work

PEERS = 5
WATCHDOG_SECONDS = 600.0


def until_epoch(processes: list[SwarmProcess], epoch: int) -> dict[int, list[dict[str, Any]]]:
    """Return what each process reports until its outer step ``epoch``."""
    end = time.monotonic() + WATCHDOG_SECONDS
    found: dict[int, list[dict[str, Any]]] = {process.index: [] for process in processes}
    for process in processes:
        while not any(event.get("epoch", 0) >= epoch for event in found[process.index]):
            found[process.index].append(process.event(max(end - time.monotonic(), 0.0)))
    return found


def final_of(process: SwarmProcess) -> dict[str, Any]:
    return next(event for event in process.events(WATCHDOG_SECONDS) if "final" in event)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["gossip", "noloco"])
def test_peers_train_in_changing_pairs_and_one_of_them_is_killed(recipe: str) -> None:
    arguments = {"peers": PEERS, "recipe": recipe, "sync_every": 5}
    with LocalSwarm(mixing_work.train, peers=PEERS, arguments=arguments) as swarm:
        swarm.start()
        first = until_epoch(swarm.processes, 4)
        swarm.processes[-1].kill()
        alive = swarm.processes[:-1]
        later = until_epoch(alive, 16)
        for process in alive:
            process.tell(enough=True)
        finals = [final_of(process) for process in alive]
    begun = first[0][0]["held_out"]
    steps = [event for index in later for event in (*first[index], *later[index]) if "epoch" in event]
    for final in finals:
        assert final["held_out"] < 0.5 * begun, "each peer has learned"
    assert all(event["drifted"] is None and event["behind"] is None for event in steps)
    assert all(len(event["group"]) == 2 for event in steps), "no group is larger than a pair"
    assert len({tuple(event["group"]) for event in steps}) > PEERS - 1, "the pairs change"
    anchors = torch.tensor([final["final"] for final in finals])
    assert len({tuple(final["final"]) for final in finals}) > 1, "the anchors differ"
    norm = float(anchors.norm(dim=1).mean())
    apart = max(float((one - other).norm()) for one, other in itertools.combinations(anchors, 2))
    assert apart < 0.5 * norm, "the anchors stay near each other"
    assert all(0 <= event["distance"] < 0.5 * norm for event in steps)
