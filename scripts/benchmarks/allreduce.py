"""One all-reduce on this machine: p2pavg, the floor, gloo and hivemind in turn, so that a disturbance affects all."""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from scripts.benchmarks.crew import Crew, CrewError, Measured, Place, System
from scripts.benchmarks.figures import Report
from scripts.benchmarks.hivemind_env import NoHivemindError, hivemind_python
from scripts.benchmarks.meter import cpu_seconds, process_tree
from scripts.benchmarks.systems import floor, gloo, hivemind, hivemind_codec, p2pavg
from scripts.benchmarks.vectors import vectors

NAME = "allreduce"
IDLE_SECONDS = 2.0
Rounds = dict[str, list[Measured]]


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--peers", type=int, default=2 if small else 4)
    parser.add_argument("--elements", type=int, default=100_000 if small else 16_000_000)
    parser.add_argument("--codecs", default="blockwise8,fp32" if small else "blockwise8,int8,fp32")
    parser.add_argument(
        "--rules", default="", help="of p2pavg, beside the mean, with each codec: trimmed_mean:0.25"
    )
    parser.add_argument(
        "--audits", default="", help="of p2pavg, beside the usual ones, with each codec: off,after:1e-9"
    )
    parser.add_argument(
        "--torch", action="store_true", help="p2pavg without compiled codecs, beside it with them"
    )
    parser.add_argument("--repeats", type=int, default=2 if small else 7)
    parser.add_argument("--hivemind-python", help="one that can import hivemind, or none")
    parser.add_argument("--alone", action="store_true", help="p2pavg and no other system")
    parser.add_argument("--beside", type=int, default=0, help="processes that compute all the time")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report."""
    codecs = arguments.codecs.split(",")
    systems = choose(codecs, arguments, report)
    with vectors(arguments.peers, arguments.elements) as folder, busy(arguments.beside):
        rounds = measure(systems, folder, arguments, report)
    for system in systems:
        if len(rounds.get(system.name, [])) == arguments.repeats:
            figures(system.name, rounds[system.name], arguments, report)
        else:
            rounds.pop(system.name, None)
    for codec in codecs:
        ratios(codec, rounds, arguments, report)
    for codec, variant in itertools.product(codecs, _variants(arguments)):
        ours, other = p2pavg(codec, 2).name, p2pavg(codec, 2, **variant).name
        values: list[tuple[str, Callable[[Measured], float]]] = [
            ("exchange", lambda found: found.exchange),
            ("cpu", lambda found: found.cpu),
        ]
        report_ratios([(other, ours, *value) for value in values], rounds, arguments, report)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep processes busy beside the measured ones."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def choose(codecs: list[str], arguments: argparse.Namespace, report: Report) -> list[System]:
    """Return the systems in the order of their turns."""
    variants: list[dict[str, Any]] = [{}, *_variants(arguments)]
    ours = [
        p2pavg(codec, arguments.peers, **variant) for codec, variant in itertools.product(codecs, variants)
    ]
    if arguments.alone:
        return ours
    systems = [*ours, *map(floor, codecs), gloo()]
    try:
        python = hivemind_python(arguments.hivemind_python)
    except NoHivemindError as error:
        report.skipped(NAME, "hivemind", str(error))
        return systems
    theirs = {hivemind_codec(codec): hivemind(codec, python) for codec in codecs}
    return [*systems, *theirs.values()]


def _variants(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the settings that are measured beside the usual ones."""
    rules = [{"robust": rule} for rule in arguments.rules.split(",") if rule]
    audits = [{"audit": audit} for audit in arguments.audits.split(",") if audit]
    return [*rules, *audits, *([{"compiled": False}] if arguments.torch else [])]


def measure(systems: list[System], folder: Path, arguments: argparse.Namespace, report: Report) -> Rounds:
    """Measure all systems in turn. Each keeps running but is idle outside its turns; a system that fails is dropped."""
    setup = {"elements": arguments.elements, "vectors": str(folder)}
    found: Rounds = {system.name: [] for system in systems}
    with ExitStack() as stack:
        crews: list[Crew] = []
        for system in systems:
            report.note(f"{NAME}: starting {system.name}")
            try:
                crew = stack.enter_context(Crew(system, [Place()] * arguments.peers, setup))
                crew.ready()
                crew.round()  # the first round allocates buffers that later rounds reuse
                crews.append(crew)
            except CrewError as error:
                report.error(NAME, system.name, str(error))
        idle(crews, report)
        for number in range(arguments.repeats):
            report.note(f"{NAME}: round {number + 1} of {arguments.repeats}")
            for crew in list(crews):
                try:
                    found[crew.system.name].append(crew.round())
                except CrewError as error:
                    report.error(NAME, crew.system.name, f"round {number + 1}: {error}")
                    crews.remove(crew)
                    crew.end()
    return found


def idle(crews: list[Crew], report: Report) -> None:
    """Note the cost of idle systems, which slows the measured one."""

    def used(crew: Crew) -> float:
        return sum(cpu_seconds(process_tree(process.pid)) for process in crew.processes)

    before = [used(crew) for crew in crews]
    time.sleep(IDLE_SECONDS)
    for crew, earlier in zip(crews, before, strict=True):
        share = (used(crew) - earlier) / IDLE_SECONDS
        report.figure(NAME, "idle cpu", "cores", [share], system=crew.system.name)


def figures(name: str, rounds: list[Measured], arguments: argparse.Namespace, report: Report) -> None:
    """Report all figures of one system."""
    nbytes = 4 * arguments.elements
    what: dict[str, tuple[str, Callable[[Measured], float]]] = {
        "exchange": ("s", lambda found: found.exchange),
        "step": ("s", lambda found: found.step),
        "group": ("s", lambda found: found.group),
        "error": ("relative L2", lambda found: found.error),
        "cpu": ("s, all members", lambda found: found.cpu),
        "memory above the round's start": ("vectors", lambda found: found.above / nbytes),
        "memory above the first round's start": ("vectors", lambda found: found.above_first / nbytes),
        "resident": ("MB at the peak", lambda found: found.resident / 1e6),
    }
    if name == "gloo" or name.startswith("floor "):
        del what["group"]  # they form no group
    if name == "gloo":
        del what["exchange"]
    if name.startswith("floor "):
        del what["error"]  # it averages nothing; its exchange is TLS alone
    for figure, (unit, value) in what.items():
        report.figure(
            NAME,
            figure,
            unit,
            [value(found) for found in rounds],
            system=name,
            peers=arguments.peers,
            elements=arguments.elements,
        )


def ratios(codec: str, rounds: Rounds, arguments: argparse.Namespace, report: Report) -> None:
    """Medians divided by medians, with the range of round by round."""
    ours, theirs = f"p2pavg {codec}", f"hivemind {hivemind_codec(codec)}"
    wanted: list[tuple[str, str, str, Callable[[Measured], float]]] = [
        (ours, f"floor {codec}", "step", lambda found: found.step),
        (ours, f"floor {codec}", "cpu", lambda found: found.cpu),
        (ours, "gloo", "exchange", lambda found: found.exchange),
        (ours, "gloo", "step", lambda found: found.step),
        (theirs, ours, "exchange", lambda found: found.exchange),
        (theirs, ours, "step", lambda found: found.step),
        (theirs, ours, "cpu", lambda found: found.cpu),
        (theirs, ours, "memory above the first round's start", lambda found: found.above_first),
    ]
    report_ratios(wanted, rounds, arguments, report)


def report_ratios(
    wanted: list[tuple[str, str, str, Callable[[Measured], float]]],
    rounds: Rounds,
    arguments: argparse.Namespace,
    report: Report,
) -> None:
    """Report a figure of one system divided by that of another, if both were measured."""
    for over, under, figure, value in wanted:
        if over not in rounds or under not in rounds:
            continue
        above, below = (list(map(value, rounds[name])) for name in (over, under))
        if not all(below):
            continue  # the vector is too small for the kernel to count any cost
        report.figure(
            NAME,
            f"ratio of {figure}",
            "x",
            [a / b for a, b in zip(above, below, strict=True)],
            median=statistics.median(above) / statistics.median(below),
            system=f"{over} / {under}",
            peers=arguments.peers,
            elements=arguments.elements,
        )
