"""Measures p2pavg beside gloo and hivemind on this machine.

Prints one line of JSON for each figure, with its median, its range and the number of repeats, and a table of all
figures. The lines go to the standard output and the table to the standard error; with --json, the lines go to the file
and the table to the standard output. Measurements that are impossible on this machine are skipped, with the reason. The
exit status is 1 if a result was wrong or missing, and 2 if a benchmark cannot run here at all.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path
from types import ModuleType

from scripts.benchmarks.figures import Report
from scripts.commands import Command, list_commands, run_command

SUMMARIES = {
    "allreduce": "one exchange on localhost: time, CPU and memory beside gloo's and hivemind's (2 minutes)",
    "wan": "one exchange over links of a given rate, in network namespaces, as a fraction of what is possible"
    " (6 minutes)",
    "topology": "a star beside a butterfly, of one fast member among slow ones, in network namespaces (4 minutes);"
    " with --sites, a hierarchy of sites beside a butterfly",
    "group": "from the last peer ready to the group's commit (a minute)",
    "cold": "from the start of the processes to the first result on all (2 minutes)",
    "overlap": "what a training loop loses to rounds in the background (4 minutes)",
    "streaming": "local updates over limited links: samples per second beside training alone (7 minutes)",
    "codecs": "encoding and decoding on one core (a minute)",
    "attack": "training while some workers attack, by robust rule: the loss beside a clean run (15 minutes)",
    "state": "a state fetched by a peer that joins, from one donor and from three, beside hivemind (5 minutes);"
    " what that costs the donors",
    "reduce": "combining one part, by robust rule, beside the weighted mean (a minute)",
    "lookups": "record lookups of simulated peers: calls, time, and attackers that name invented peers (10 minutes)",
    "telemetry": "rounds with and without logs, metrics and scrapes, in turn (10 minutes)",
    "nat": "peers behind home routers in network namespaces: how they connect, and what is relayed (a minute)",
    "scale": "simulated peers on a virtual clock: time to group, records (a minute)",
}
ALL = "all"
PROGRAMS = {
    "measure": Command(
        "scripts.benchmarks.measure",
        "what is promised of four peers: start, time to group, kills, two hundred rounds",
        "about an hour",
    ),
    "mixing": Command(
        "scripts.benchmarks.mixing",
        "mixing between small groups, simulated: how fast 10 to 1,000 peers come together",
        "a minute",
    ),
    "robust": Command(
        "scripts.benchmarks.robust",
        "robust rules beside the mean while members lie, a persistent bias among the attacks",
        "a minute",
    ),
    "population": Command(
        "scripts.benchmarks.population",
        "population based training beside random search of the same budget",
        "5 minutes",
    ),
    "history": Command(
        "scripts.benchmarks.history",
        "what a history costs: bytes, the archivist's time, the time and memory of a check",
        "5 minutes",
    ),
    "training": Command(
        "scripts.benchmarks.training",
        "training with peers beside one process that has the whole batch",
        "10 to 45 minutes",
    ),
}
"""These have options and tables of their own, and no JSON."""


def main() -> int:
    """Run the benchmarks."""
    ended = run_command(PROGRAMS)
    if ended is not None:
        return ended
    small = "--small" in sys.argv  # needed early: it decides the defaults that --help shows
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subparsers = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, summary in SUMMARIES.items():
        benchmark = _module(name)
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=benchmark.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        _add_common(subparser)
        benchmark.add_arguments(subparser, small=small)
    everything = subparsers.add_parser(ALL, help="all of these, each with its defaults (35 minutes)")
    _add_common(everything)
    list_commands(subparsers, PROGRAMS)
    everything.add_argument("--hivemind-python", help="one that can import hivemind, or none")
    arguments = parser.parse_args()
    # Like Ctrl-C: every `with` block is left, so that no process and no network namespace remains.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = Report(arguments.json)
    try:
        if arguments.benchmark == ALL:
            return _run_all(arguments, small, report)
        return _run(arguments.benchmark, arguments, report)
    except KeyboardInterrupt:
        return 130
    finally:
        report.table()
        report.close()


def _run(name: str, arguments: argparse.Namespace, report: Report) -> int:
    unable: int | None = _module(name).run(arguments, report)
    return unable or int(report.errors > 0)


def _run_all(arguments: argparse.Namespace, small: bool, report: Report) -> int:
    """Run all benchmarks; those that cannot run here are reported, but do not affect the exit status."""
    # Unequal links at one rate only: at 10 Mbit/s, the slow link would make an fp32 round take minutes.
    runs: list[tuple[str, list[str]]] = [(name, []) for name in SUMMARIES]
    if not small:
        runs.append(("wan", ["--unequal", "--rates", "100"]))
    for name, options in runs:
        parser = argparse.ArgumentParser()
        _module(name).add_arguments(parser, small=small)
        defaults = parser.parse_args(options)
        if hasattr(defaults, "hivemind_python"):
            defaults.hivemind_python = arguments.hivemind_python
        _run(name, defaults, report)
    return int(report.errors > 0)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines there")
    parser.add_argument("--small", action="store_true", help="tiny defaults, to see that everything works")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"scripts.benchmarks.{name}")


if __name__ == "__main__":
    sys.exit(main())
