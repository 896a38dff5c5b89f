"""Peers behind home routers: how they connect, how soon, and what is relayed.

It builds a small internet in network namespaces, with the address translation of the kernel and a real miniupnpd, and
starts peers and public daemons in it. Without any of the options that name a trial, it does a small matrix of pairs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.figures import Report
from scripts.benchmarks.nat_trials import FORTY, PAIRS, CrowdOutcome, crowd, forget, punch, relay_lies
from tests.nat.crew import KEEP_LOGS
from tests.nat.lab import Kind
from tests.nat.namespaces import LabError, clean, may_map_ports, may_run
from tests.nat.trials import FaultOutcome, PairOutcome, move, pair, relay_killed

NAME = "nat"
UNABLE = 2
FEW_PAIRS = ((Kind.PUBLIC, Kind.CONE), (Kind.CONE, Kind.CONE), (Kind.SYMMETRIC, Kind.SYMMETRIC))
PUNCHED_OF_100 = 95
SUCCEEDED_OF_100 = 95
REPAIR_SECONDS = 30.0
LARGE_ELEMENTS = 4_000_000
LANE_REPEATS = 5
_TRIALS = ("matrix", "punch", "forty", "move", "relay_killed", "relay_lies", "forget", "lanes", "pair")
_MOST_REASONS = 5


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--matrix", action="store_true", help="two peers of every pair of kinds (5 minutes)")
    parser.add_argument(
        "--pair", action="append", default=[], metavar="KIND,KIND", help="one pair; repeatable"
    )
    parser.add_argument(
        "--punch", type=int, default=0, metavar="N", help="N tries of two peers behind routers"
    )
    parser.add_argument("--forty", action="store_true", help="forty peers of mixed kinds (15 minutes)")
    parser.add_argument("--move", action="store_true", help="a peer changes its network during rounds")
    parser.add_argument("--relay-killed", action="store_true", help="a relay is killed during rounds")
    parser.add_argument("--relay-lies", action="store_true", help="a relay changes bytes during rounds")
    parser.add_argument(
        "--forget", action="store_true", help="a router forgets its connections during rounds"
    )
    parser.add_argument(
        "--lanes", action="store_true", help="exchanges over punched lanes beside dialled ones"
    )
    parser.add_argument(
        "--delay",
        type=float,
        default=0.0,
        metavar="MS",
        help="one way between two sites, for pairs and --punch",
    )
    parser.add_argument("--rounds", type=int, default=2 if small else 20, help="of --forty and --move")
    parser.add_argument("--peers", type=int, default=8 if small else 40, help="of --forty")
    parser.add_argument("--group-size", type=int, default=4 if small else 8, help="of --forty")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.5,
        metavar="S",
        help="of a peer's own work between two rounds of --forty",
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the logs of all peers there")


def run(arguments: argparse.Namespace, report: Report) -> int:
    """Measure and report; return 2 if there are no network namespaces."""
    if reason := may_run():
        report.skipped(NAME, "all", reason)
        print(f"scripts/bench nat: {reason}", file=sys.stderr)
        return UNABLE
    clean()
    if arguments.logs is not None:
        os.environ[KEEP_LOGS] = str(arguments.logs.absolute())
    if not any(getattr(arguments, name) for name in _TRIALS):
        arguments.pair = [
            f"{first},{second}" for first, second in FEW_PAIRS[: 1 if arguments.small else None]
        ]
    trials: list[tuple[object, Callable[[argparse.Namespace, Report], None]]] = [
        (arguments.matrix or arguments.pair, _matrix),
        (arguments.punch, _punch),
        (arguments.lanes, _lanes),
        (arguments.move, _move),
        (arguments.forget, _fault("a router forgets its connections", forget)),
        (arguments.relay_killed, _fault("a relay is killed", relay_killed)),
        (arguments.relay_lies, _fault("a relay changes bytes", relay_lies)),
        (arguments.forty, _forty),
    ]
    for wanted, trial in trials:
        if wanted:
            try:
                trial(arguments, report)
            except LabError as error:
                report.error(NAME, "p2pavg", str(error))
    return 0


def _matrix(arguments: argparse.Namespace, report: Report) -> None:
    pairs = [_kinds(text) for text in arguments.pair]
    if arguments.matrix:
        pairs += [(first, second, False) for first, second in PAIRS]
        pairs += [(kind, kind, True) for kind in (Kind.CONE, Kind.SYMMETRIC, Kind.CGNAT)]
    table = Table(
        "pair",
        "connected",
        "first success",
        "relayed",
        "relayed later",
        "tensors",
        "peers call it",
        "each says",
        "problem",
    )
    for first, second, same in pairs:
        if Kind.UPNP in (first, second) and (reason := may_map_ports()):
            report.skipped(NAME, f"{first} and {second}", reason)
            continue
        found = pair(first, second, same_router=same, delay_ms=arguments.delay)
        _report_pair(found, table, report)
    Console(stderr=arguments.json is None, width=170).print(table)


def _kinds(text: str) -> tuple[Kind, Kind, bool]:
    words = text.split(",")
    return Kind(words[0]), Kind(words[1]), words[2:] == ["same"]


def _report_pair(found: PairOutcome, table: Table, report: Report) -> None:
    problem = "; ".join(found.problems)
    first = "-" if found.first_success is None else f"{found.first_success:.1f} s"
    says = " | ".join(sorted(set(found.sentences)))
    row = (found.name, found.way, first, f"{found.relayed:.0%}", f"{found.relayed_later:.0%}")
    table.add_row(*row, " ".join(found.paths), " ".join(found.links), says, problem)
    report.note(f"{NAME}: {found.name}: {found.way}, first success {first}{problem and ', ' + problem}")
    if problem:
        report.error(NAME, "p2pavg", f"{found.name}: {problem}")
    if found.first_success is not None:
        conditions: dict[str, Any] = {
            "pair": found.name,
            "connected": found.way,
            "relayed": round(found.relayed_later, 3),
        }
        report.figure(NAME, "first success", "s", [found.first_success], **conditions)


def _punch(arguments: argparse.Namespace, report: Report) -> None:
    found = punch(arguments.punch, delay_ms=arguments.delay)
    share = 100.0 * len(found.seconds) / found.tries
    report.figure(NAME, "punched", "%", [share], tries=found.tries)
    if found.seconds:
        report.figure(NAME, "start to punched connection", "s", found.seconds)
    if share < PUNCHED_OF_100:
        report.error(NAME, "p2pavg", f"only {share:.0f} % of the tries were punched")


def _lanes(arguments: argparse.Namespace, report: Report) -> None:
    kinds = ((Kind.PUBLIC, Kind.PUBLIC), (Kind.CONE, Kind.CONE))
    seconds: dict[tuple[str, str], list[float]] = {}
    for first, second in kinds * LANE_REPEATS:  # in turn, since the machine's speed changes
        found = pair(first, second, elements=LARGE_ELEMENTS, rounds=5, delay_ms=arguments.delay)
        if found.problems:
            report.error(NAME, "p2pavg", f"{found.name}: {'; '.join(found.problems)}")
        else:
            seconds.setdefault((found.way, " ".join(found.paths)), []).append(found.exchange)
    for (way, tensors), exchanges in seconds.items():
        report.figure(
            NAME, "exchange", "s", exchanges, connected=way, tensors=tensors, elements=LARGE_ELEMENTS
        )


def _move(arguments: argparse.Namespace, report: Report) -> None:
    found = move(rounds=arguments.rounds)
    _report_fault("a peer changes its network", found, report)
    if found.lost_by_victim > 1 or found.lost_by_others > 0:
        lost = f"it lost {found.lost_by_victim} rounds, another member {found.lost_by_others}"
        report.error(NAME, "p2pavg", f"a peer changes its network: {lost}")


def _fault(name: str, trial: Callable[[], FaultOutcome]) -> Callable[[argparse.Namespace, Report], None]:
    def run_trial(_: argparse.Namespace, report: Report) -> None:
        _report_fault(name, trial(), report)

    return run_trial


def _report_fault(name: str, found: FaultOutcome, report: Report) -> None:
    conditions: dict[str, Any] = {"fault": name, "ways": found.ways, "rounds": found.rounds}
    report.figure(NAME, "rounds lost by the peer concerned", "", [found.lost_by_victim], **conditions)
    report.figure(NAME, "rounds lost by another peer", "", [found.lost_by_others], **conditions)
    problems = list(found.wrong)
    if found.repaired is None:
        problems.append("no round of all members after it")
    else:
        report.figure(NAME, "fault to the next round of all", "s", [found.repaired], **conditions)
        if found.repaired > REPAIR_SECONDS:
            problems.append(f"repaired after {found.repaired:.0f} s only")
    for problem in problems:
        report.error(NAME, "p2pavg", f"{name}: {problem}")
    for reason in found.reasons[:_MOST_REASONS]:
        report.note(f"{NAME}: {name}: {reason}")


def _forty(arguments: argparse.Namespace, report: Report) -> None:
    whole = sum(FORTY.values())
    kinds = {kind: max(1, round(count * arguments.peers / whole)) for kind, count in FORTY.items()}
    found = crowd(kinds, rounds=arguments.rounds, group_size=arguments.group_size, pause=arguments.pause)
    _report_crowd(found, report)


def _report_crowd(found: CrowdOutcome, report: Report) -> None:
    conditions: dict[str, Any] = {"peers": found.peers, "rounds": found.rounds}
    share = 100.0 * found.succeeded / found.rounds
    report.figure(NAME, "rounds that succeeded", "%", [share], **conditions)
    report.figure(NAME, "rounds of a full group", "%", [100.0 * found.full / found.rounds], **conditions)
    for kind, part in found.by_kind.items():
        report.figure(NAME, f"rounds that succeeded, {kind}", "%", [100.0 * part], **conditions)
    if found.seconds:
        report.figure(NAME, "round", "s", found.seconds, **conditions)
    rates = [count * 8 / 1e6 / found.took for count in found.carried]
    report.figure(NAME, "sent by a public peer", "Mbit/s", rates or [0.0], **conditions)
    report.figure(NAME, "sent by the daemon", "Mbit/s", [found.relayed * 8 / 1e6 / found.took], **conditions)
    for reason, count in found.reasons.most_common(_MOST_REASONS):
        report.note(f"{NAME}: {count} times: {reason}")
    problems = list(found.wrong)
    if share < SUCCEEDED_OF_100:
        problems.append(f"only {share:.1f} % of the rounds succeeded")
    for problem in problems:
        report.error(NAME, "p2pavg", f"forty peers: {problem}")
