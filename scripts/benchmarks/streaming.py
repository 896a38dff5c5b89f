"""Local updates over limited links: samples per second, and the time for which the training loop stands still.

Each peer is a process in a network namespace of its own, with a link of ``--mbps`` to a small internet, in which
``--rtt`` lies between any two. Computing is a pause of ``--batch`` seconds, as on a GPU, and an inner step of a model
of ``--elements``. In turn it measures training alone, plain DiLoCo, DiLoCo with its rounds in the background, and with
fragments, over the same links.

With ``--unequal`` it measures eight peers that synchronise by time in the background: all alike, with one whose batches
take ten times as long, and with one whose link has a tenth of the rate. The figures are the others' samples per second.
With ``--by-steps`` too, each peer counts its own steps, and the others go on without a late one.
With ``--mixing`` it measures DiLoCo in one group of all peers, and NoLoCo and gossip in small groups, each with one
peer whose link has a tenth of the rate.

A window begins and ends with an update, so it has whole intervals. The loop stands still for the time of its calls of
``step`` beyond their median, since most calls wait for nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from scripts.benchmarks.crew import Crew, CrewError, Place, System
from scripts.benchmarks.figures import Report
from tests.nat.lab import INTERFACE, Kind, lab
from tests.nat.namespaces import may_run

NAME = "streaming"
MODULE = "scripts.benchmarks.streaming_worker"
UNLIMITED = "none"
UNABLE = 2
PATIENCE_SECONDS = 240.0
SLOWER = 10.0


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--peers", type=int, default=2 if small else 4)
    parser.add_argument("--elements", type=int, default=2_000 if small else 4_000_000)
    parser.add_argument(
        "--mbps", default=UNLIMITED if small else "20", help=f"of a link; {UNLIMITED}: no namespaces"
    )
    parser.add_argument("--rtt", type=float, default=80.0, help="milliseconds between two peers")
    parser.add_argument("--codec", default="blockwise8")
    parser.add_argument("--batch", type=float, default=0.01 if small else 0.1, help="seconds of computing")
    parser.add_argument("--sync-every", type=int, default=8 if small else 120)
    parser.add_argument("--fragments", type=int, default=2 if small else 4)
    parser.add_argument("--delay", type=int, default=2 if small else 20)
    parser.add_argument("--seconds", type=float, default=0.5 if small else 60.0, help="of a window, at least")
    parser.add_argument("--unequal", action="store_true", help="one slow peer, and one slow link")
    parser.add_argument("--by-steps", action="store_true", help="count steps where --unequal measures time")
    parser.add_argument(
        "--mixing", action="store_true", help="small groups beside one group, with one slow link"
    )
    parser.add_argument("--group-size", type=int, default=2, help="of the small groups")


def run(arguments: argparse.Namespace, report: Report) -> int:
    """Measure and report; return 2 if there are no network namespaces."""
    if arguments.mbps != UNLIMITED:
        reason = may_run()
        if reason:
            report.skipped(NAME, "all", reason)
            print(f"scripts/bench {NAME}: {reason}", file=sys.stderr)
            return UNABLE
    try:
        measure = mixing if arguments.mixing else unequal if arguments.unequal else equal
        measure(arguments, report)
    except CrewError as error:
        report.error(NAME, "p2pavg", str(error))
    return 0


def equal(arguments: argparse.Namespace, report: Report) -> None:
    """Measure training alone, with plain DiLoCo, and with its rounds in the background."""
    streamed = {"fragments": arguments.fragments, "delay": arguments.delay}
    kinds: dict[str, dict[str, Any] | None] = {
        "alone": None,
        "diloco": {},
        "diloco in the background": {"delay": arguments.delay},
        "diloco in fragments": streamed,
    }
    alone = 0.0
    with places(arguments, [1.0] * arguments.peers) as places_:
        for name, options in kinds.items():
            given = None if options is None else {"sync_every": arguments.sync_every, **options}
            found = windows(places_, arguments, given)
            speeds = [window["samples_a_second"] for window in found]
            alone = alone or statistics.median(speeds)
            how = {"peers": arguments.peers, "elements": arguments.elements, "mbps": arguments.mbps}
            report.figure(NAME, "samples per second of a peer", "", speeds, system=name, **how)
            report.figure(
                NAME, "speed", "of training alone", [speed / alone for speed in speeds], system=name, **how
            )
            still = [window["still"] for window in found]
            report.figure(NAME, "standing still", "of the time", still, system=name, **how)
            report.figure(NAME, "updates", "", [window["updates"] for window in found], system=name, **how)
            report.figure(
                NAME, "failed rounds", "", [window["failed"] for window in found], system=name, **how
            )


def unequal(arguments: argparse.Namespace, report: Report) -> None:
    """Measure what a slow peer and a slow link cost the others."""
    peers, alike = arguments.peers, 0.0
    seconds = arguments.batch * arguments.sync_every
    options = {
        "sync_every": arguments.sync_every if arguments.by_steps else f"{seconds:g}s",
        "fragments": arguments.fragments,
        "delay": arguments.delay,
    }
    cases = {
        "all alike": ([1.0] * peers, [1.0] * peers),
        "one ten times slower": ([1.0] * peers, [1.0] * (peers - 1) + [SLOWER]),
        "one with a tenth of the link": ([1.0] * (peers - 1) + [1 / SLOWER], [1.0] * peers),
    }
    for name, (links, slowness) in cases.items():
        with places(arguments, links) as places_:
            found = windows(places_, arguments, options, slowness)
        speeds = [window["samples_a_second"] for window in found[:-1]]
        alike = alike or statistics.median(speeds)
        how = {"peers": peers, "elements": arguments.elements, "mbps": arguments.mbps}
        report.figure(NAME, "samples per second of the others", "", speeds, system=name, **how)
        report.figure(
            NAME, "speed of the others", "of all alike", [s / alike for s in speeds], system=name, **how
        )
        report.figure(
            NAME, "standing still", "of the time", [w["still"] for w in found[:-1]], system=name, **how
        )
        report.figure(NAME, "updates", "", [window["updates"] for window in found[:-1]], system=name, **how)
        last = found[-1]
        report.figure(NAME, "part of the last one in all samples", "", [last["part"]], system=name, **how)


def mixing(arguments: argparse.Namespace, report: Report) -> None:
    """Measure what a slow link costs the others in one group of all, and in small groups."""
    peers, together = arguments.peers, 0.0
    small = {"sync_every": arguments.sync_every, "group_size": arguments.group_size}
    cases = {"diloco": {"sync_every": arguments.sync_every}, "noloco": small, "gossip": small}
    for name, options in cases.items():
        with places(arguments, [1.0] * (peers - 1) + [1 / SLOWER]) as places_:
            found = windows(places_, arguments, options, recipe=name)
        speeds = [window["samples_a_second"] for window in found[:-1]]
        together = together or statistics.median(speeds)
        how = {"peers": peers, "elements": arguments.elements, "mbps": arguments.mbps}
        report.figure(NAME, "samples per second of the others", "", speeds, system=name, **how)
        report.figure(
            NAME, "speed of the others", "of diloco's", [s / together for s in speeds], system=name, **how
        )
        report.figure(
            NAME,
            "samples per second of the slow link",
            "",
            [found[-1]["samples_a_second"]],
            system=name,
            **how,
        )
        report.figure(NAME, "updates", "", [window["updates"] for window in found[:-1]], system=name, **how)


@contextmanager
def places(arguments: argparse.Namespace, links: list[float]) -> Iterator[list[Place]]:
    """Provide a place for each peer, with its part of ``--mbps``."""
    if arguments.mbps == UNLIMITED:
        yield [Place()] * len(links)
        return
    with lab(delay_ms=arguments.rtt / 2) as made:
        sites = [made.site(Kind.PUBLIC, rate_mbps=float(arguments.mbps) * part) for part in links]
        hosts = [site.hosts[0] for site in sites]
        yield [
            Place(host=host.address, interface=INTERFACE, prefix=("ip", "netns", "exec", host.namespace))
            for host in hosts
        ]


def windows(
    places_: list[Place],
    arguments: argparse.Namespace,
    options: Mapping[str, Any] | None,
    slowness: list[float] | None = None,
    recipe: str = "diloco",
) -> list[dict[str, float]]:
    """Train for a window on all peers; return what each reports."""
    count = len(places_)
    config = {
        "group_size": count,
        "match_timeout": 10.0,
        "exchange_timeout": 60.0,
        "compression": arguments.codec,
    }
    setup = {
        "config": config,
        "options": options,
        "elements": arguments.elements,
        "batch": arguments.batch,
        "slowness": slowness or [1.0] * count,
        "recipe": recipe,
    }
    with Crew(System(name=NAME, module=MODULE), places_, setup) as crew:
        crew.tell(seconds=arguments.seconds)
        found = crew.heard(time.monotonic() + PATIENCE_SECONDS + 4 * arguments.seconds)
        crew.tell(end=True)
        return found
