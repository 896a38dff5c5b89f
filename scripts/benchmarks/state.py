"""A state fetched by a peer that joins: from one donor and from three, on loopback, beside hivemind.

A blob of random bytes is fetched again and again. p2pavg verifies each chunk of 1 MiB, and fetches from all donors at
once. hivemind's ``load_state_from_peers`` takes the same bytes, as one tensor of float32, from one of its peers.
Seconds count from the call to the bytes in memory, with open connections. CPU seconds are those of all processes. The
machine's cores are shared by all processes, so several donors cannot be much faster here: the figure that counts for
them is that of a slow link (``--mbps``), where p2pavg's donors each keep an upload limit.

With ``--training``, donors train in a loop that keeps a processor busy, by turns without a joiner and with one that
fetches their state again and again. The donors share one core, and the joiner has another one. With ``--memory``, the
peak memory of donors while a joiner fetches several snapshots is compared with that of training alone, and that of a
joiner until it trains with the others with that of training with them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from scripts.benchmarks import state_donors
from scripts.benchmarks.crew import START_SECONDS, CrewError, Place, Process, System
from scripts.benchmarks.figures import Report
from scripts.benchmarks.hivemind_env import NoHivemindError, hivemind_python
from scripts.benchmarks.meter import cpu_seconds, process_tree

NAME = "state"
MIB = 1 << 20
FETCH_SECONDS = 600.0
OURS = System(name="p2pavg", module="scripts.benchmarks.state_worker")


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--size", type=int, default=8 if small else 1024, help="of the state, in MiB")
    parser.add_argument("--donors", default="2" if small else "1,3", help="numbers of donors")
    parser.add_argument("--mbps", type=float, default=400.0, help="each donor's upload in the limited runs")
    parser.add_argument("--repeats", type=int, default=1 if small else 5)
    parser.add_argument(
        "--training", action="store_true", help="the training speed of donors while a joiner fetches, instead"
    )
    parser.add_argument("--memory", action="store_true", help="the memory of donors and joiners, instead")
    parser.add_argument(
        "--seconds", type=float, default=2.0 if small else 20.0, help="of each turn of --training"
    )
    parser.add_argument("--hivemind-python", help="one that can import hivemind, or none")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Measure, and report."""
    if arguments.training or arguments.memory:
        if arguments.training:
            state_donors.training(arguments, report)
        if arguments.memory:
            state_donors.memory(arguments, report)
        return
    systems = [OURS]
    try:
        python = hivemind_python(arguments.hivemind_python)
        systems.append(
            System(name="hivemind", module="scripts.benchmarks.hivemind_state_worker", python=python)
        )
    except NoHivemindError as error:
        report.skipped(NAME, "hivemind", str(error))
    for count in map(int, arguments.donors.split(",")):
        for system in systems:
            _measure(system, count, None, arguments, report)
    for count in map(int, arguments.donors.split(",")):
        _measure(OURS, count, arguments.mbps, arguments, report)


def _measure(
    system: System, donors: int, mbps: float | None, arguments: argparse.Namespace, report: Report
) -> None:
    limited = "" if mbps is None else f", each {mbps:g} Mbit/s"
    report.note(f"{NAME}: {system.name}, {donors} donors{limited}")
    setup = {"bytes": arguments.size * MIB, "donors": donors, "mbps": mbps}
    try:
        found = _fetches(system, donors, setup, arguments.repeats)
    except CrewError as error:
        report.error(NAME, system.name, f"{donors} donors{limited}: {error}")
        return
    conditions: dict[str, Any] = {"MiB": arguments.size, "donors": donors}
    if mbps is not None:
        conditions["Mbit/s each"] = mbps
    figures = {
        "fetch": ("s", [seconds for seconds, _ in found]),
        "rate": ("MB/s", [setup["bytes"] / seconds / 1e6 for seconds, _ in found]),
        "cpu": ("s, all processes", [cpu for _, cpu in found]),
    }
    for name, (unit, values) in figures.items():
        report.figure(NAME, name, unit, values, system=system.name, **conditions)


def _fetches(system: System, donors: int, setup: dict[str, Any], repeats: int) -> list[tuple[float, float]]:
    """Return the seconds and the CPU seconds of each fetch, after one that is not counted.

    Raises:
        CrewError: a process ended or said nothing in time, or the bytes are wrong.
    """
    processes: list[Process] = []
    try:
        bootstrap: list[str] = []
        deadline = time.monotonic() + START_SECONDS
        for index in range(donors + 1):
            processes.append(Process(system, Place()))
            processes[-1].tell(index=index, bootstrap=bootstrap, **setup)
            bootstrap.append(processes[-1].event(deadline)["address"])
        joiner = processes[-1]
        joiner.event(deadline)  # it knows the donors
        found = [_fetch(joiner, processes) for _ in range(repeats + 1)]
    finally:
        for process in processes:
            process.end()
    return found[1:]


def _fetch(joiner: Process, processes: Sequence[Process]) -> tuple[float, float]:
    trees = [pid for process in processes for pid in process_tree(process.pid)]
    before = cpu_seconds(trees)
    joiner.tell(fetch=True)
    seconds = joiner.event(time.monotonic() + FETCH_SECONDS)["seconds"]
    cpu = cpu_seconds(trees) - before
    joiner.tell(check=True)
    if not joiner.event(time.monotonic() + FETCH_SECONDS)["right"]:
        raise CrewError("the state is wrong")
    return seconds, cpu
