"""A cold start: from the start of the first process to the last of the first results, imports included.

It also measures the processor that one peer takes from the end of `import torch` to its first averager.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from scripts.benchmarks.crew import START_SECONDS, Crew, CrewError, Place, System
from scripts.benchmarks.figures import Report
from scripts.benchmarks.hivemind_env import NoHivemindError, hivemind_python
from scripts.benchmarks.systems import hivemind, p2pavg
from scripts.benchmarks.vectors import vectors

NAME = "cold"
CODEC = "blockwise8"
PROCESSOR = """
import json, time
import torch
began = time.process_time()
import p2pavg
p2pavg.blocking
loaded = time.process_time()
with p2pavg.blocking.open_averager(p2pavg.AveragingConfig(run_id="cold"), listen=["/ip4/127.0.0.1/tcp/0"]):
    print(json.dumps([loaded - began, time.process_time() - loaded]))
"""


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--peers", type=int, default=2 if small else 4)
    parser.add_argument("--elements", type=int, default=10_000 if small else 1_000_000)
    parser.add_argument("--repeats", type=int, default=1 if small else 7)
    parser.add_argument("--hivemind-python", help="one that can import hivemind, or none")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Measure in turn, and report."""
    systems = [p2pavg(CODEC, arguments.peers)]
    try:
        systems.append(hivemind(CODEC, hivemind_python(arguments.hivemind_python)))
    except NoHivemindError as error:
        report.skipped(NAME, "hivemind", str(error))
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    with vectors(arguments.peers, arguments.elements) as folder:
        for number in range(arguments.repeats):
            for system in systems:
                report.note(f"{NAME}: {system.name}, start {number + 1} of {arguments.repeats}")
                try:
                    seconds[system.name].append(start(system, folder, arguments))
                except CrewError as error:
                    report.error(NAME, system.name, f"start {number + 1}: {error}")
    loads, opens = zip(*(processor() for _ in range(arguments.repeats)), strict=True)
    report.figure(NAME, "processor: import p2pavg, after torch", "s", loads, system="p2pavg")
    report.figure(NAME, "processor: the first averager, after that", "s", opens, system="p2pavg")
    sizes = {"peers": arguments.peers, "elements": arguments.elements}
    for name, found in seconds.items():
        if found:
            report.figure(NAME, "start to first result on all", "s", found, system=name, **sizes)


def start(system: System, folder: Path, arguments: argparse.Namespace) -> float:
    """Return the duration of one cold start, in seconds."""
    setup = {"elements": arguments.elements, "vectors": str(folder), "at_once": True}
    began = time.monotonic()
    with Crew(system, [Place()] * arguments.peers, setup) as crew:
        return crew.ended(time.monotonic() + START_SECONDS).ended - began


def processor() -> tuple[float, float]:
    """Return the seconds of processor of a new process: for importing p2pavg after torch, for the first averager."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESSOR], capture_output=True, text=True, check=True, timeout=120
    )
    imported, opened = json.loads(done.stdout)
    return imported, opened
