"""The guarantees of a round, with real processes and real connections."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import pytest

from p2pavg.testing import LocalSwarm
from tests.integration.survival import trials
from tests.integration.swarm_work import TILE

pytestmark = pytest.mark.processes

WORK = "tests.integration.swarm_work:"


def run(work: str, peers: int, timeout: float = 300.0, **arguments: Any) -> list[list[dict[str, Any]]]:
    """Return the reports of each process after its address."""
    with LocalSwarm(WORK + work, peers=peers, arguments={"count": peers, **arguments}) as swarm:
        swarm.start()
        return [list(process.events(timeout)) for process in swarm.processes]


def test_four_processes_end_with_the_weighted_mean_and_the_same_bits() -> None:
    """They run one round for each kind of weights: equal, unequal, and one a thousand times the others.

    The trials below have a codec too.
    """
    weights = [[1.0, 1.0, 1.0, 1.0], [1.0, 2.5, 3.0, 0.5], [1000.0, 1.0, 1.0, 1.0]]
    config = {"group_size": 4, "min_group_size": 4, "compression": None}
    reports = run("average_with", 4, elements=300_000, weights=weights, config=config)
    for those, *results in zip(weights, *reports, strict=True):
        assert [result["result"] for result in results] == ["Success"] * 4, results
        assert len({result["digest"] for result in results}) == 1
        assert len({tuple(result["peers"]) for result in results}) == 1
        assert all(result["error"] <= 1e-6 for result in results), results
        assert all(result["total_weight"] == sum(those) for result in results)


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells how long a process waits for a processor"
)
def test_sixteen_processes_meet_on_two_processors_on_which_others_compute() -> None:
    """To connect takes seven seconds of processor time in all, and no member may be given up meanwhile."""
    processors = sorted(os.sched_getaffinity(0))[:2]
    config = {"group_size": 16, "min_group_size": 16, "match_timeout": 90.0, "exchange_timeout": 90.0}
    with ExitStack() as stack:
        for processor in processors:
            stack.enter_context(computing_on(processor))
        reports = run(
            "average_on_two_processors", 16, 180.0, elements=1000, config=config, processors=processors
        )
    assert [result["result"] for [result] in reports] == ["Success"] * 16, reports


@contextmanager
def computing_on(processor: int) -> Iterator[None]:
    """Keep a processor busy."""
    rival = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{processor}])\nwhile True: pass"]
    )
    try:
        yield
    finally:
        rival.kill()
        rival.wait()


def test_a_process_that_stands_still_is_waited_for_and_a_lost_one_costs_its_own_contribution_only() -> None:
    """The system of one that stands still acknowledges what the others send: else 1.5 s of silence would be enough.

    The leader or a follower is lost, early or late. The survivors end the same round with one correct result.
    ``scripts/bench measure kill stop`` tries many more moments.
    """
    with trials("blockwise8", 64 * TILE) as tried:
        results = tried.hold_up("follower", 0.3, 5.0)
        assert [result["result"] for result in results] == ["Success"] * 4, results
        assert {len(result["peers"]) for result in results} == {4}, results
        for signal, role, moment in (
            ("SIGSTOP", "leader", 0.6),
            ("SIGKILL", "leader", 0.1),
            ("SIGKILL", "follower", 0.5),
        ):
            trial = tried.lose(signal, role, moment)
            assert trial.took < 25.0, trial  # of the 30 s after which the group would give up


def test_memory_and_files_do_not_grow_with_the_rounds() -> None:
    config = {"group_size": 3, "min_group_size": 3, "match_timeout": 40.0}
    every = run("soak", 3, elements=100_000, rounds=40, config=config)
    failed = [(event["round"], event["reason"]) for event in chain(*every) if event["result"] != "Success"]
    assert not failed, failed
    for events in every:
        early, late = events
        assert (early["round"], late["round"]) == (9, 39)
        # A member that merely ended sooner is not reported as lost. (On a busy machine, a member may be silent for
        # long.)
        assert all("silent" in reason for reason in late["lost"]), late
        assert late["files"] <= early["files"] + 2, (early, late)
        assert late["rss"] <= early["rss"] * 1.1 + 16e6, (early, late)
