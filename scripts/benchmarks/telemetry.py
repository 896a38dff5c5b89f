"""Cost of logs, metrics, traces and the run's table for rounds: the same rounds with and without them, in turn.

Rounds of both kinds alternate within one run, in pairs whose order is drawn by lot, so that a machine that becomes
slower slows both. With telemetry, each peer logs as JSON at INFO, counts metrics, is scraped over HTTP each second, and
reads the table of the run's peers every second, as a monitor does. A peer always publishes its status and makes events.

The cost is the ratio of the two medians, less one. Its range is the 95 % interval of the bootstrap, which draws pairs
of windows: the rounds of one window resemble each other.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from http.client import HTTPException
from itertools import chain

from scripts.benchmarks.crew import Crew, CrewError, Place
from scripts.benchmarks.figures import Report
from scripts.benchmarks.systems import p2pavg

NAME = "telemetry"
CODEC = "blockwise8"
MODULE = "scripts.benchmarks.telemetry_worker"
ROUND_SECONDS = 120.0
SCRAPE_SECONDS = 1.0
DRAWS = 2000


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--elements", type=int, default=20_480 if small else 16_000_000)
    parser.add_argument("--rounds", type=int, default=2 if small else 10, help="of one window")
    parser.add_argument("--repeats", type=int, default=1 if small else 20, help="windows of each kind")
    parser.add_argument("--seed", type=int, default=0, help="draws the order in each pair of windows")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report."""
    system = replace(p2pavg(CODEC, arguments.peers), module=MODULE)
    dice = random.Random(arguments.seed)
    seconds: dict[bool, list[list[float]]] = {False: [], True: []}
    processor: dict[bool, list[list[float]]] = {False: [], True: []}
    try:
        with Crew(system, [Place()] * arguments.peers, {"elements": arguments.elements}) as crew:
            for kind in (True, False):
                window(crew, kind, 1)
            for number in range(arguments.repeats):
                report.note(f"{NAME}: pair {number + 1} of {arguments.repeats}")
                for kind in dice.sample((False, True), 2):
                    found, used = window(crew, kind, arguments.rounds)
                    seconds[kind].append(found)
                    processor[kind].append([used])
    except CrewError as error:
        report.error(NAME, "p2pavg", str(error))
        return
    figures("round", seconds[False], seconds[True], arguments, report)
    figures("processor time of a member and round", processor[False], processor[True], arguments, report)


def window(crew: Crew, telemetry: bool, rounds: int) -> tuple[list[float], float]:
    """Run some rounds.

    Returns:
        The duration of each round, which is that of its slowest member, and the processor time that a member takes
        for a round, in seconds.
    """
    for process in crew.processes:
        process.tell(telemetry=telemetry, rounds=rounds)
    end = time.monotonic() + rounds * ROUND_SECONDS
    ports = [process.event(end)["port"] for process in crew.processes]
    with scraped(ports) if telemetry else nullcontext():
        told = [process.event(end) for process in crew.processes]
    took = [max(each) for each in zip(*(event["seconds"] for event in told), strict=True)]
    return took, statistics.mean(event["processor"] for event in told)


@contextmanager
def scraped(ports: Sequence[int]) -> Iterator[None]:
    """Read the metrics of all peers each second while the block runs.

    The bytes are read and thrown away: what becomes of them is no cost of a peer.
    """
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(SCRAPE_SECONDS):
            for port in ports:
                # A peer whose window has ended serves no longer.
                with (
                    suppress(OSError, HTTPException),
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer,
                ):
                    answer.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def figures(
    name: str,
    without: list[list[float]],
    beside: list[list[float]],
    arguments: argparse.Namespace,
    report: Report,
) -> None:
    """Report the medians, and the difference as a fraction.

    Args:
        without: the values of each window without telemetry.
        beside: those of the windows with telemetry, in the order of their pairs.
    """
    how = {"peers": arguments.peers, "elements": arguments.elements}
    report.figure(NAME, f"{name} without telemetry", "s", list(chain(*without)), **how)
    report.figure(NAME, f"{name} with telemetry", "s", list(chain(*beside)), **how)
    pairs = list(zip(without, beside, strict=True))
    report.figure(
        NAME,
        f"cost of telemetry, {name}",
        "of a round, with the 95 % interval",
        interval(pairs, random.Random(arguments.seed)),
        median=cost(pairs),
        **how,
    )


def cost(pairs: Sequence[tuple[list[float], list[float]]]) -> float:
    """Return how much larger the median of the second windows is, as a fraction."""
    without, beside = (list(chain(*windows)) for windows in zip(*pairs, strict=True))
    return float(statistics.median(beside) / statistics.median(without) - 1)


def interval(pairs: Sequence[tuple[list[float], list[float]]], dice: random.Random) -> tuple[float, float]:
    """Return the 95 % interval of :func:`cost` by the bootstrap (Efron 1979)."""
    drawn = sorted(cost(dice.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    return drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]
