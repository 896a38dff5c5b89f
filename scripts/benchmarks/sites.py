"""A hierarchy of sites beside a butterfly: real processes in sites that share a thin link to each other."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.benchmarks.crew import Crew, Measured, Place, System, rounds_in_turn
from scripts.benchmarks.figures import Report
from scripts.benchmarks.netns import NoNamespacesError, check, routed
from scripts.benchmarks.systems import encoded_bytes, p2pavg
from scripts.benchmarks.vectors import vectors

NAME = "topology"
UNABLE = 2
TOPOLOGIES = ("butterfly", "hierarchical")
PATIENCE = 8.0


def run(arguments: argparse.Namespace, report: Report) -> int:
    """Measure and report; return 2 if there are no network namespaces."""
    members = [int(count) for count in arguments.sites.split(",")]
    try:
        check()
    except NoNamespacesError as error:
        report.skipped(NAME, "sites", str(error))
        print(f"scripts/bench topology: {error}", file=sys.stderr)
        return UNABLE
    place = routed(members, arguments.inside, arguments.between)
    with vectors(sum(members), arguments.elements) as folder, place as places:
        found = _measure(members, places, folder, arguments, report)
    for name, rounds in found.items():
        conditions = {"system": name, "codec": arguments.codec, **_conditions(members, arguments)}
        conditions["bound_seconds"] = round(seconds_at_least(name, members, arguments), 3)
        report.figure(NAME, "exchange", "s", [each.exchange for each in rounds], **conditions)
        report.figure(NAME, "cpu", "s, all members", [each.cpu for each in rounds], **conditions)
        report.figure(
            NAME, "memory", "MB above the start", [each.above / 1e6 for each in rounds], **conditions
        )
        report.figure(NAME, "error", "of the mean's norm", [each.error for each in rounds], **conditions)
    butterfly, sited = (found.get(name, []) for name in TOPOLOGIES)
    if butterfly and len(butterfly) == len(sited):
        report.figure(
            NAME,
            "ratio of exchange",
            "x",
            [a.exchange / b.exchange for a, b in zip(butterfly, sited, strict=True)],
            median=statistics.median(each.exchange for each in butterfly)
            / statistics.median(each.exchange for each in sited),
            system=" / ".join(TOPOLOGIES),
            **_conditions(members, arguments),
        )
    return 0


def seconds_at_least(topology: str, members: Sequence[int], arguments: argparse.Namespace) -> float:
    """Return the least seconds of an exchange, if only the links between sites cost time.

    Among k sites, a site's link carries 1 + (k - 2) / k vectors each way. In a butterfly, for a site of m of n members,
    it carries m (n - m) / n vectors of contributions each way, and as much of averages.
    """
    total, sites = sum(members), len(members)
    carried = [2 * count * (total - count) / total for count in members]
    if topology != "butterfly":
        carried = [1 + (sites - 2) / sites]
    nbytes = encoded_bytes(arguments.codec, arguments.elements)
    return float(max(carried) * nbytes * 8e-6 / arguments.between)


def _measure(
    members: Sequence[int], places: list[Place], folder: Path, arguments: argparse.Namespace, report: Report
) -> dict[str, list[Measured]]:
    setup = {"elements": arguments.elements, "vectors": str(folder)}
    with ExitStack() as stack:
        crews: dict[str, Crew] = {}
        # The same for both: their processes take as long to start.
        seconds = 120.0 + PATIENCE * seconds_at_least("butterfly", members, arguments)
        for name in TOPOLOGIES:
            crew = Crew(_system(name, members, seconds, arguments), places, setup, seconds=2 * seconds)
            crews[name] = crew
        return rounds_in_turn(crews, stack, arguments.repeats, report, NAME)


def _system(topology: str, members: Sequence[int], seconds: float, arguments: argparse.Namespace) -> System:
    system = p2pavg(arguments.codec, sum(members), timeout=seconds, audit="off", topology=topology)
    own: dict[str, Any] = {"bandwidths": [arguments.inside] * sum(members)}
    if topology != "butterfly":
        own["sites"] = [f"site {site}" for site, count in enumerate(members) for _ in range(count)]
    return replace(system, arguments={**system.arguments, **own})


def _conditions(members: Sequence[int], arguments: argparse.Namespace) -> dict[str, Any]:
    links = f"{arguments.inside:g} inside, {arguments.between:g} between Mbit/s"
    return {"sites": ", ".join(map(str, members)), "elements": arguments.elements, "links": links}
