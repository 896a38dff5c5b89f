"""Cost of background rounds for a training loop: steps per second with them, compared with those without.

One process trains with one thread and calls ``step(wait=0)`` after every step; the others only average. Windows with
and without rounds alternate. The others are confined to one core, since in a real run they have machines of their own.
The training process may use all cores. On a machine with two, its averaging thus shares the second core with all the
other processes. Over a home link (``--mbps``) a round takes many steps; without a limit it is as fast as this machine
allows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from scripts.benchmarks.crew import Crew, CrewError, Place
from scripts.benchmarks.figures import Report
from scripts.benchmarks.systems import p2pavg

NAME = "overlap"
CODEC = "blockwise8"
UNLIMITED = "none"
WARM_UP_SECONDS = 2.0
MODULE = "scripts.benchmarks.overlap_worker"
ROUND_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--peers", type=int, default=2 if small else 4)
    parser.add_argument("--elements", type=int, default=20_480 if small else 4_000_000)
    parser.add_argument("--mbps", default=f"100,{UNLIMITED}", help="limits of each peer's link, both ways")
    parser.add_argument("--seconds", type=float, default=0.3 if small else 10.0, help="of one window")
    parser.add_argument("--repeats", type=int, default=1 if small else 5, help="windows of each kind")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report."""
    for mbps in arguments.mbps.split(","):
        limits = {}
        if mbps != UNLIMITED:
            limits = {"max_upload_mbps": float(mbps), "max_download_mbps": float(mbps)}
        report.note(f"{NAME}: a link of {mbps} Mbit/s")
        try:
            measure(mbps, limits, arguments, report)
        except CrewError as error:
            report.error(NAME, "p2pavg", f"{mbps} Mbit/s: {error}")


def measure(mbps: str, limits: dict[str, float], arguments: argparse.Namespace, report: Report) -> None:
    """Measure the windows in turn."""
    system = replace(p2pavg(CODEC, arguments.peers, **limits), module=MODULE)
    with Crew(system, [Place()] * arguments.peers, {"elements": arguments.elements}) as crew:
        training = crew.processes[0]

        def window(rounds: bool, seconds: float) -> dict[str, float]:
            training.tell(rounds=rounds, seconds=seconds)
            return training.event(time.monotonic() + seconds + ROUND_SECONDS)

        for rounds in (True, False):
            window(rounds, min(WARM_UP_SECONDS, arguments.seconds))
        alone, beside = [], []
        for _ in range(arguments.repeats):
            alone.append(window(False, arguments.seconds))
            beside.append(window(True, arguments.seconds))
    failed = sum(found["failed"] for found in beside)
    if failed:
        report.error(NAME, "p2pavg", f"{mbps} Mbit/s: {failed:.0f} rounds failed")
    figures(mbps, alone, beside, arguments, report)


def figures(
    mbps: str,
    alone: list[dict[str, float]],
    beside: list[dict[str, float]],
    arguments: argparse.Namespace,
    report: Report,
) -> None:
    """Report steps per second, and the fraction that remains with rounds."""
    how = {"mbps": mbps, "peers": arguments.peers, "elements": arguments.elements}
    without, steps = ([found["steps_a_second"] for found in windows] for windows in (alone, beside))
    report.figure(NAME, "training without rounds", "steps/s", without, **how)
    report.figure(NAME, "training with rounds", "steps/s", steps, **how)
    report.figure(
        NAME,
        "rounds in a window",
        "",
        [found["rounds"] for found in beside],
        **how,
        seconds=arguments.seconds,
    )
    report.figure(
        NAME,
        "speed with rounds",
        "of that without",
        [a / b for a, b in zip(steps, without, strict=True)],
        median=statistics.median(steps) / statistics.median(without),
        **how,
    )
