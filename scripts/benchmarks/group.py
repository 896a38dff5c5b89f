"""Matchmaking time: from the moment the last member of a group is ready to the group's commit.

Peers become ready at random moments within 0.2 s, and do rounds of a small vector.
"""

from __future__ import annotations

import argparse

from p2pavg.testing import LocalSwarm
from scripts.benchmarks.figures import Report

NAME = "group"
WORK = "tests.integration.swarm_work:rounds"
ELEMENTS = 1_000
SECONDS = 300.0


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--peers", type=int, default=2 if small else 8)
    parser.add_argument("--rounds", type=int, default=3 if small else 40)


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report."""
    peers = arguments.peers
    config = {"group_size": peers, "min_group_size": peers}
    work = {"count": peers, "elements": ELEMENTS, "rounds": arguments.rounds, "config": config}
    with LocalSwarm(WORK, peers=peers, arguments=work) as swarm:
        swarm.start()
        events = [event for process in swarm.processes for event in process.events(SECONDS)]
    waits: dict[str, list[float]] = {}
    for event in events:
        if event["result"] == "Success":
            waits.setdefault(event["group_id"], []).append(event["to_group"])
        else:
            report.error(NAME, "p2pavg", f"round {event['round']}: {event['result']}")
    # The member of a group that was ready last waited for the shortest time.
    found = sorted(min(members) for members in waits.values())
    if not found:
        report.error(NAME, "p2pavg", "no group was formed")
        return
    report.figure(NAME, "last peer ready to commit", "s", found, peers=peers)
    late = found[min(int(0.95 * len(found)), len(found) - 1)]
    report.figure(NAME, "last peer ready to commit, 95th percentile", "s", found, median=late, peers=peers)
