"""Two teams of real processes over libp2p, of which one copies the other."""

from __future__ import annotations

import pytest

from p2pavg.testing import LocalSwarm
from tests.integration.team_work import RATES, SETTINGS, train

SECONDS = 120.0
TEAMS = ("slow", "slow", "fast", "fast")


def test_both_processes_of_a_team_copy_the_better_team() -> None:
    with LocalSwarm(train, peers=0) as swarm:
        first, *more = TEAMS
        swarm.add(arguments={"team": first})
        for process in [swarm.add(arguments={"team": team}, wait=False) for team in more]:
            process.wait_joined()
        found = [process.event(SECONDS) for process in swarm.processes]
        for process in swarm.processes:
            process.tell(last=True)
    slow, also_slow, fast, also_fast = found
    assert slow == also_slow
    assert fast == also_fast
    assert (slow["copied_from"], fast["copied_from"]) == ("fast", None)
    changed = [pytest.approx(factor * RATES["fast"]) for factor in SETTINGS.factors]
    assert slow["lr"] in changed, "the hyperparameters are changed ones of the better team"
    assert fast["lr"] == RATES["fast"]
