"""A star beside a butterfly: real processes on links of given rates, or on this machine without limits.

With ``--sites``, a hierarchy beside a butterfly: the members of each site share a thin link to the other sites.

With ``--model``, nothing is started: the times follow from a model of links, also those of a ring and of a tree.

The first member has a fast link, and the others slow ones. All members announce what their links carry in the slower
direction. The bound counts the encoded values of the shares that the members compute, on links of both directions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from p2pavg.group.shares import MemberLink, best_fractions, largest_fraction, levelled
from scripts.benchmarks import sites
from scripts.benchmarks.crew import Crew, Measured, Place, System, rounds_in_turn
from scripts.benchmarks.figures import Report
from scripts.benchmarks.netns import NoNamespacesError, check, switched
from scripts.benchmarks.schedules import duration, reduced_by, ring, tree
from scripts.benchmarks.systems import encoded_bytes, p2pavg
from scripts.benchmarks.vectors import vectors

NAME = "topology"
UNABLE = 2
TOPOLOGIES = ("butterfly", "star")
PATIENCE = 8.0


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--peers", type=int, default=3 if small else 8)
    parser.add_argument("--elements", type=int, default=100_000 if small else 1_000_000)
    parser.add_argument("--fast", default="1000/1000", help="down/up of the first member, in Mbit/s")
    parser.add_argument("--slow", default="20/5", help="down/up of the others, in Mbit/s")
    parser.add_argument(
        "--sites", metavar="MEMBERS", help="members of each site, such as 4,4: see --inside, --between"
    )
    parser.add_argument(
        "--inside", type=float, default=1000.0, help="rate of each link inside a site, in Mbit/s"
    )
    parser.add_argument(
        "--between", type=float, default=20.0, help="rate of each site's link to the others, in Mbit/s"
    )
    parser.add_argument("--no-links", action="store_true", help="one machine, whose links have no limits")
    parser.add_argument("--model", action="store_true", help="compute the times only, with a ring and a tree")
    parser.add_argument("--latency", type=float, default=20.0, help="of the model, in milliseconds one way")
    parser.add_argument("--codec", default="blockwise8")
    parser.add_argument("--audit", default="after")
    parser.add_argument("--repeats", type=int, default=1 if small else 5)


def run(arguments: argparse.Namespace, report: Report) -> int:
    """Measure and report; return 2 if there are no network namespaces."""
    if arguments.sites is not None:
        return sites.run(arguments, report)
    links = [_rates(arguments.fast)] + [_rates(arguments.slow)] * (arguments.peers - 1)
    if arguments.model:
        _model(links, arguments, report)
        return 0
    if not arguments.no_links:
        try:
            check()
        except NoNamespacesError as error:
            report.skipped(NAME, "all", str(error))
            print(f"scripts/bench topology: {error}", file=sys.stderr)
            return UNABLE
    place = (
        nullcontext([Place()] * arguments.peers)
        if arguments.no_links
        else switched([up for _, up in links], [down for down, _ in links])
    )
    with vectors(arguments.peers, arguments.elements) as folder, place as places:
        found = _measure(links, places, folder, arguments, report)
    for name, rounds in found.items():
        _figures(name, rounds, links, arguments, report)
    _ratio(found, arguments, report)
    return 0


def _model(links: list[tuple[float, float]], arguments: argparse.Namespace, report: Report) -> None:
    count = len(links)
    schedules = {name: reduced_by(fractions_of(name, links)) for name in TOPOLOGIES}
    best = best_fractions([MemberLink(min(link)) for link in links])
    schedules |= {"butterfly without limit": reduced_by(best), "ring": ring(count), "tree": tree(count)}
    for name, transfers in schedules.items():
        seconds = duration(transfers, links, _nbytes(arguments), arguments.latency / 1000)
        conditions = {"codec": arguments.codec, "latency_ms": arguments.latency, **_conditions(arguments)}
        report.figure(NAME, "model", "s", [seconds], system=name, **conditions)


def _rates(text: str) -> tuple[float, float]:
    down, up = map(float, text.split("/"))
    return down, up


def fractions_of(topology: str, links: Sequence[tuple[float, float]]) -> tuple[Fraction, ...]:
    """Return the fraction of the vector that each member reduces, as members that can be dialled compute it."""
    announced = [min(link) for link in links]
    if topology == "star":
        first = announced.index(max(announced))
        return tuple(Fraction(index == first) for index in range(len(links)))
    members = levelled([MemberLink(rate) for rate in announced])
    return best_fractions(members, largest_fraction(members))


def seconds_at_least(topology: str, links: Sequence[tuple[float, float]], nbytes: int) -> float:
    """Return the least seconds of an exchange, if only the links cost time."""
    times = []
    for fraction, link in zip(fractions_of(topology, links), links, strict=True):
        traffic = 1 + fraction * (len(links) - 2)  # each way: see best_fractions
        times.append(float(traffic) * nbytes * 8e-6 / min(link))
    return max(times)


def _measure(
    links: list[tuple[float, float]],
    places: list[Place],
    folder: Path,
    arguments: argparse.Namespace,
    report: Report,
) -> dict[str, list[Measured]]:
    setup = {"elements": arguments.elements, "vectors": str(folder)}
    with ExitStack() as stack:
        crews: dict[str, Crew] = {}
        for name in TOPOLOGIES:
            seconds = 60.0 + PATIENCE * seconds_at_least(name, links, _nbytes(arguments))
            crew = Crew(_system(name, links, seconds, arguments), places, setup, seconds=2 * seconds)
            crews[name] = crew
        return rounds_in_turn(crews, stack, arguments.repeats, report, NAME)


def _system(
    topology: str, links: list[tuple[float, float]], seconds: float, arguments: argparse.Namespace
) -> System:
    system = p2pavg(
        arguments.codec, arguments.peers, timeout=seconds, audit=arguments.audit, topology=topology
    )
    return replace(system, arguments={**system.arguments, "bandwidths": [min(link) for link in links]})


def _nbytes(arguments: argparse.Namespace) -> int:
    return encoded_bytes(arguments.codec, arguments.elements)


def _conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    links = "none" if arguments.no_links else f"{arguments.fast}, others {arguments.slow}"
    return {"peers": arguments.peers, "elements": arguments.elements, "links": links}


def _figures(
    name: str,
    rounds: list[Measured],
    links: list[tuple[float, float]],
    arguments: argparse.Namespace,
    report: Report,
) -> None:
    conditions = {"system": name, "codec": arguments.codec, **_conditions(arguments)}
    if not arguments.no_links:
        conditions["bound_seconds"] = round(seconds_at_least(name, links, _nbytes(arguments)), 3)
    report.figure(NAME, "exchange", "s", [found.exchange for found in rounds], **conditions)
    report.figure(NAME, "cpu", "s, all members", [found.cpu for found in rounds], **conditions)
    report.figure(NAME, "memory", "MB above the start", [found.above / 1e6 for found in rounds], **conditions)


def _ratio(found: dict[str, list[Measured]], arguments: argparse.Namespace, report: Report) -> None:
    butterfly, star = (found.get(name, []) for name in TOPOLOGIES)
    if not butterfly or len(butterfly) != len(star):
        return
    for figure in ("exchange", "cpu"):
        over, under = ([getattr(each, figure) for each in rounds] for rounds in (butterfly, star))
        report.figure(
            NAME,
            f"ratio of {figure}",
            "x",
            [a / b for a, b in zip(over, under, strict=True)],
            median=statistics.median(over) / statistics.median(under),
            system="butterfly / star",
            **_conditions(arguments),
        )
