"""A population of real processes over libp2p, of which one is killed while others copy it."""

from __future__ import annotations

from typing import Any

import pytest

from p2pavg.testing import LocalSwarm
from tests.integration.population_work import CHUNKS, train

SECONDS = 120.0
AFTER = 2
"""Generations that the others finish after the death."""
ARGUMENTS = ({"lr": 0.05, "dies_at": CHUNKS // 2}, {"lr": 0.05}, {"lr": 1e-6}, {"lr": 2e-6})


@pytest.mark.long
def test_a_member_that_is_killed_while_it_is_copied_costs_no_other_its_weights() -> None:
    with LocalSwarm(train, peers=0) as swarm:
        first, *more = ARGUMENTS
        swarm.add(arguments=first)
        for process in [swarm.add(arguments=arguments, wait=False) for arguments in more]:
            process.wait_joined()
        doomed, *others = swarm.processes
        found: list[list[dict[str, Any]]] = [[] for _ in others]

        def hears_failure(reports: list[dict[str, Any]]) -> bool:
            return any(doomed.peer_id in report["failures"] for report in reports)

        while not any(map(hears_failure, found)):
            for process, reports in zip(others, found, strict=True):
                reports.append(process.event(SECONDS))
        for _ in range(AFTER):
            for process, reports in zip(others, found, strict=True):
                reports.append(process.event(SECONDS))
        for process in others:
            process.tell(last=True)
        ends = [
            _last(list(process.events(SECONDS)), reports)
            for process, reports in zip(others, found, strict=True)
        ]
        assert not doomed.running, "it was killed while it sent its weights"

    ids = [process.peer_id for process in others]
    published = {
        (peer, report["generation"]): (report["before"], report["momentum_before"])
        for peer, reports in zip(ids, found, strict=True)
        for report in reports
    }
    copies = 0
    for reports in found:
        for report in reports:
            after = (report["after"], report["momentum_after"])
            if report["copied_from"] is None:
                assert after == (report["before"], report["momentum_before"]), (
                    "it has its own weights, in whole"
                )
            elif report["copied_from"] != doomed.peer_id:
                copies += 1
                its = [state for (peer, _), state in published.items() if peer == report["copied_from"]]
                assert after in its, "it has the weights and the momentum of its donor, in whole"
    assert copies, "members copy each other"
    assert all(set(ids) <= set(end["seen"]) for end in ends), "each has seen the words of all others"
    assert all(end["ancestors"] >= len(reports) for end, reports in zip(ends, found, strict=True))


def _last(events: list[dict[str, Any]], reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Add the generations to the others; return the final report."""
    reports += [event for event in events if "generation" in event]
    return next(event for event in events if "ancestors" in event)
