"""Training loops that hold Python's lock for seconds: the event loops of their peers cannot run meanwhile."""

from __future__ import annotations

import pytest

from p2pavg.testing import LocalSwarm

WORK = "tests.integration.optim.holding_work:train"
PEERS, UPDATES, HOLD_SECONDS = 4, 3, 5.0
WATCHDOG_SECONDS = 600.0


@pytest.mark.long
@pytest.mark.alone
def test_peers_that_hold_the_lock_for_seconds_are_slow_and_not_lost() -> None:
    """With timeouts that ran meanwhile, they gave each other up: no five updates in 150 s, and none of all peers.

    On a busy machine a hold may last so long that one peer misses a round. It fetches that update.
    """
    arguments = {"count": PEERS, "updates": UPDATES, "seconds": HOLD_SECONDS}
    with LocalSwarm(WORK, peers=PEERS, arguments=arguments) as swarm:
        swarm.start()
        reports = [list(process.events(WATCHDOG_SECONDS)) for process in swarm.processes]
    for *_, end in reports:
        assert end["ended"] == UPDATES, reports
        assert end["parameters"] == reports[0][-1]["parameters"]
    full = {found["epoch"] for *updates, _ in reports for found in updates if found["peers"] == PEERS}
    assert 2 * len(full) > UPDATES, reports
