"""One exchange over links of a given rate, compared with the bound that the links set.

Links are limited by whole Ethernet frames, as wires are, while the bound counts the encoded values alone. Of the 1514
bytes of a full frame, 1448 belong to a stream. So no result can exceed 0.956 of the bound (``headroom``), and
acknowledgements for the other direction take a little more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from p2pavg.group.shares import MemberLink, bound_seconds
from scripts.benchmarks.crew import Crew, CrewError, Measured, Place, System
from scripts.benchmarks.figures import Report
from scripts.benchmarks.netns import NoNamespacesError, check, switched
from scripts.benchmarks.systems import encoded_bytes, gloo, p2pavg
from scripts.benchmarks.vectors import vectors

NAME = "wan"
UNABLE = 2
SLOW = 0.2
STREAM_BYTES_OF_FRAME = 1448 / 1514
# Peers measure each other's links in their first rounds and divide the work accordingly.
WARM_UP = {"equal": 1, "unequal": 4}
PATIENCE = 8.0


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--peers", type=int, default=2 if small else 4)
    parser.add_argument("--elements", type=int, default=100_000 if small else 4_000_000)
    parser.add_argument("--rates", default="100" if small else "10,100,1000", help="of a link, in Mbit/s")
    parser.add_argument(
        "--unequal", action="store_true", help="one member has a fifth of the rate, both ways"
    )
    parser.add_argument("--codecs", default="blockwise8" if small else "fp32,blockwise8")
    parser.add_argument("--repeats", type=int, default=1 if small else 3)


def run(arguments: argparse.Namespace, report: Report) -> int:
    """Measure and report; return 2 if there are no network namespaces."""
    try:
        check()
    except NoNamespacesError as error:
        report.skipped(NAME, "all", str(error))
        print(f"scripts/bench wan: {error}", file=sys.stderr)
        return UNABLE
    with vectors(arguments.peers, arguments.elements) as folder:
        for rate in map(float, arguments.rates.split(",")):
            links = [rate] * arguments.peers
            if arguments.unequal:
                links[-1] *= SLOW
            with switched(links) as places:
                measure(rate, links, places, folder, arguments, report)
    return 0


def measure(
    rate: float,
    links: list[float],
    places: list[Place],
    folder: Path,
    arguments: argparse.Namespace,
    report: Report,
) -> None:
    """Measure all systems in turn over the same links."""
    kind = "unequal" if arguments.unequal else "equal"
    bounds = {system.name: (system, seconds) for system, seconds in choose(links, arguments)}
    setup = {"elements": arguments.elements, "vectors": str(folder)}
    with ExitStack() as stack:
        crews: list[Crew] = []
        for name, (system, bound) in bounds.items():
            report.note(f"{NAME}: {rate:g} Mbit/s, {kind} links, {name}: at least {bound:.2f} s a round")
            seconds = 60.0 + PATIENCE * bound
            crews += started(stack, Crew(system, places, setup, seconds=seconds), WARM_UP[kind], report)
        found: dict[str, list[Measured]] = {crew.system.name: [] for crew in crews}
        for _ in range(arguments.repeats):
            for crew in crews:
                try:
                    found[crew.system.name].append(crew.round())
                except CrewError as error:
                    report.error(NAME, crew.system.name, f"{rate:g} Mbit/s: {error}")
    for name, rounds in found.items():
        if rounds:
            figures(name, rounds, bounds[name][1], {"mbps": rate, "links": kind}, arguments, report)


def choose(links: list[float], arguments: argparse.Namespace) -> Iterator[tuple[System, float]]:
    """Return the systems, each with the least possible seconds of its exchange."""
    members = [MemberLink(link) for link in links]
    for codec in arguments.codecs.split(","):
        bound = bound_seconds(encoded_bytes(codec, arguments.elements), members)
        yield p2pavg(codec, arguments.peers, timeout=30.0 + PATIENCE * bound), bound
    yield gloo(), bound_seconds(encoded_bytes("fp32", arguments.elements), members)


def started(stack: ExitStack, crew: Crew, warm_up: int, report: Report) -> list[Crew]:
    """Return the crew after its first rounds, or ``None`` if they failed."""
    try:
        stack.enter_context(crew)
        crew.ready()
        for _ in range(warm_up):
            crew.round()
    except CrewError as error:
        report.error(NAME, crew.system.name, str(error))
        crew.end()
        return []
    return [crew]


def figures(
    name: str,
    rounds: list[Measured],
    bound: float,
    conditions: dict[str, Any],
    arguments: argparse.Namespace,
    report: Report,
) -> None:
    """Report seconds, and the fraction of the bound that is reached."""
    seconds = [found.exchange for found in rounds]
    sizes = {"peers": arguments.peers, "elements": arguments.elements}
    report.figure(NAME, "exchange", "s", seconds, system=name, **conditions, **sizes)
    report.figure(
        NAME,
        "fraction of the bound",
        "",
        [bound / took for took in seconds],
        system=name,
        **conditions,
        **sizes,
        bound_seconds=round(bound, 4),
        headroom=round(STREAM_BYTES_OF_FRAME, 3),
    )
