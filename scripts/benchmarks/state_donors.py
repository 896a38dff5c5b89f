"""Costs of giving a state to joiners: the donors' training speed, and the memory of donors and joiners."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

from scripts.benchmarks.crew import START_SECONDS, CrewError, Place, Process, System
from scripts.benchmarks.figures import Report

NAME = "state"
MIB = 1 << 20
WORKER = System(name="p2pavg", module="scripts.benchmarks.state_loop_worker")
WAIT_SECONDS = 300.0
LOOK_SECONDS = 0.5
WARM_UPDATES = 3
LOG_AVERAGES = 2
AVERAGE_BYTES = 0.27  # of the state's parameters, encoded by blockwise8, as a part of their bytes
SNAPSHOTS = 2


class Company:
    """Donors that train, and others that fetch their states. Leaving the block ends them all.

    With two cores or more, the donors share one, and the others have another one: the donors' speed tells what they do
    themselves for a joiner.
    """

    def __init__(self, state_bytes: int, donors: int, **setup: object) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._setup = {"state_bytes": state_bytes, "donors": donors, **setup}
        self._bootstrap: list[str] = []
        self._processes: list[Process] = []
        self.donors: list[Process] = []

    def __enter__(self) -> Company:
        try:
            self.donors = [self.start("trains") for _ in range(int(str(self._setup["donors"])))]
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, role: str) -> Process:
        """Start a process, and wait until it is in the network: it ``trains``, ``joins`` or ``fetches``."""
        process = Process(WORKER, Place())
        self._processes.append(process)
        cores = self._cores[:1] if role == "trains" else self._cores[1:] or self._cores
        process.tell(
            role=role, index=len(self._processes), bootstrap=self._bootstrap, cores=cores, **self._setup
        )
        address = process.event(time.monotonic() + START_SECONDS)["address"]
        self._bootstrap = [*self._bootstrap, address]
        return process

    def end(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.end()


def read(process: Process) -> dict[str, float]:
    """Return what a process has measured since it was last marked."""
    process.tell(read=True)
    found: dict[str, float] = process.event(time.monotonic() + WAIT_SECONDS)
    return found


def until_updates(process: Process, updates: int) -> None:
    """Wait until a process has taken so many updates from now on."""
    deadline = time.monotonic() + WAIT_SECONDS
    end = read(process)["epoch"] + updates
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        if read(process)["epoch"] >= end:
            return
    raise CrewError(f"{updates} updates did not come in {WAIT_SECONDS:g} s")


def _counts(arguments: argparse.Namespace) -> list[int]:
    """Return the numbers of donors: one peer alone takes no updates."""
    return [count for count in map(int, arguments.donors.split(",")) if count > 1]


# ---------------------------------------------------------------------- training


def training(arguments: argparse.Namespace, report: Report) -> None:
    """Measure the donors' batches per second with and without a joiner that fetches, by turns."""
    size = arguments.size * MIB
    for donors in _counts(arguments):
        report.note(f"{NAME}: {donors} donors train, by turns without and with a joiner that fetches")
        try:
            with Company(size, donors, mbps=arguments.mbps) as company:
                _training(company, arguments, report, donors)
        except CrewError as error:
            report.error(NAME, "p2pavg", f"{donors} donors train: {error}")


def _training(company: Company, arguments: argparse.Namespace, report: Report, donors: int) -> None:
    fetcher = company.start("fetches")
    until_updates(company.donors[0], WARM_UPDATES)
    alone: list[float] = []
    beside: list[float] = []
    fetched: list[float] = []
    for turn in range(2 * arguments.repeats):
        # Each pair of turns in another order, so that a drift of the machine is no difference.
        fetches = turn % 4 in (1, 2)
        fetcher.tell(fetch=fetches)
        if fetches:
            _until(fetcher, "states")
        for process in (*company.donors, fetcher):
            process.tell(mark=True)
        time.sleep(arguments.seconds)
        if fetches:  # a window in which nothing was fetched is none with a joiner
            _until(fetcher, "bytes")
        found = [read(donor) for donor in company.donors]
        rate = sum(each["batches"] for each in found) / sum(each["seconds"] for each in found)
        (beside if fetches else alone).append(rate)
        if fetches:
            fetched.append(read(fetcher)["bytes"] / max(each["seconds"] for each in found) / 1e6)
    conditions = {"MiB": arguments.size, "donors": donors, "Mbit/s each": arguments.mbps}
    report.figure(NAME, "batches of a donor, no joiner", "per s", alone, **conditions)
    report.figure(NAME, "batches of a donor, a joiner fetches", "per s", beside, **conditions)
    report.figure(NAME, "fetched meanwhile", "MB/s", fetched, **conditions)
    lost = [100.0 * (1.0 - with_it / without) for without, with_it in zip(alone, beside, strict=True)]
    report.figure(NAME, "training lost to a joiner", "%", lost, **conditions)


def _until(fetcher: Process, figure: str, count: int = 1) -> None:
    """Wait until a figure of the fetcher's, different states that have come or bytes, is as large as this."""
    deadline = time.monotonic() + WAIT_SECONDS
    while read(fetcher)[figure] < count:
        if time.monotonic() > deadline:
            raise CrewError(f"{count} {figure} did not come in {WAIT_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """Peaks of memory in bytes, above what the same process needs to train with a full log and without a joiner."""

    state: int
    """Bytes of the state."""
    donors: tuple[float, ...]
    """Of each donor, while joiners fetch its states."""
    joiner: float
    """Of the last joiner, from its start until it has trained with the others."""


def measured_memory(state_bytes: int, donors: int = 2) -> Memory:
    """Return what a state costs.

    The donors' figure is from the time in which a process fetches their states again and again, and takes no part in
    the run: a round with one more member takes memory of its own. The joiner's is from its start until it has trained
    with the others, less than that of training with them.

    Raises:
        CrewError: a process ended or said nothing in time.
    """
    log_bytes = int(LOG_AVERAGES * AVERAGE_BYTES * state_bytes / 2)
    with Company(state_bytes, donors, log_bytes=log_bytes) as company:
        until_updates(company.donors[0], WARM_UPDATES + LOG_AVERAGES)
        alone = [read(donor)["resident"] for donor in company.donors]
        for donor in company.donors:
            donor.tell(mark=True)
        fetcher = company.start("fetches")
        fetcher.tell(fetch=True)
        _until(fetcher, "states", SNAPSHOTS)
        fetcher.tell(fetch=False)
        beside = [read(donor)["resident"] for donor in company.donors]
        joiner = company.start("joins")
        until_updates(joiner, WARM_UPDATES + LOG_AVERAGES)
        joining = read(joiner)["resident"]
        joiner.tell(mark=True)
        until_updates(joiner, WARM_UPDATES)
        joined = read(joiner)["resident"]
    above = tuple(b - a for a, b in zip(alone, beside, strict=True))
    return Memory(state=state_bytes, donors=above, joiner=joining - joined)


def memory(arguments: argparse.Namespace, report: Report) -> None:
    """Measure memory, and report it."""
    for donors in _counts(arguments):
        report.note(f"{NAME}: memory of {donors} donors, and of joiners that come one after the other")
        try:
            found = measured_memory(arguments.size * MIB, donors)
        except CrewError as error:
            report.error(NAME, "p2pavg", f"memory of {donors} donors: {error}")
            continue
        conditions = {"MiB": arguments.size, "donors": donors}
        report.figure(
            NAME, "donor's memory for joiners", "MiB", [b / MIB for b in found.donors], **conditions
        )
        report.figure(NAME, "joiner's memory for the state", "MiB", [found.joiner / MIB], **conditions)
