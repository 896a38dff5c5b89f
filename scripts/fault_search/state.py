"""Faults while a state is fetched, in real processes that are killed, lie, or have a full disk.

scripts/faults state                          20 donors that are killed, 5 of each other fault
scripts/faults state --kinds dies --times 20  only donors that are killed
scripts/faults state --seed 5                 other chunks, parts and sizes

Each time, a new joiner fetches the state of two peers that train. What is drawn from the seed is the donor, the
number of its chunk at which it fails, the part of the download at which the joiner is killed, the number of tensors
that it has replaced by then, and the size of its disk. The checks are those of
``tests/integration/optim/test_state_faults.py``:

dies      a donor is killed when it is to send a chunk: the joiner fetches the rest from the others, and joins
lies      a donor sends a wrong chunk: the joiner excludes it by name, and joins
resumes   the joiner is killed while it fetches: it begins again with 95 % of what it had, and joins
loads     the joiner is killed while it replaces its state: it begins again, and joins
full      the joiner's disk is full: it says so, and keeps its state
vanish    all donors are killed: the joiner says so, and keeps its state
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess
from tests.integration.optim import state_faults as faults

TIMES = {"dies": 20, "lies": 5, "resumes": 5, "loads": 5, "full": 5, "vanish": 2}


class Run:
    """Two peers that train, and a joiner that is started in advance. Leaving the block ends them."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._draw = draw
        self._context = faults.donors(folder)
        self._count = 0

    def __enter__(self) -> Run:
        self.swarm: LocalSwarm = self._context.__enter__()
        self._next = self._prepare()
        faults.until_training(self.swarm)
        self.donors = self.swarm.processes[: faults.DONORS]
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)

    def _prepare(self) -> SwarmProcess:
        self._count += 1
        return faults.prepare(self.swarm, f"joiner {self._count}")

    def joiner(self) -> SwarmProcess:
        """Return a process for a joiner."""
        found, self._next = self._next, self._prepare()
        return found

    def again(self, joiner: SwarmProcess) -> SwarmProcess:
        """Return another process with a joiner's folder."""
        return faults.prepare(self.swarm, joiner.arguments["name"])

    def pair(self) -> tuple[SwarmProcess, SwarmProcess]:
        """Return two different donors."""
        first, second = self._draw.sample(self.donors, 2)
        return first, second

    # ------------------------------------------------------------------ faults

    def dies(self) -> None:
        """See the top of this file. The joiner takes the donor's place."""
        victim, donor = self.pair()
        faults.arm(victim, self._draw.randint(1, faults.MOST_CHUNKS))
        for _ in range(faults.TRIES):
            joiner = self.joiner()
            if faults.donor_dies(joiner, victim, donor):
                self.donors = [process for process in self.donors if process is not victim] + [joiner]
                return
            joiner.kill()
        raise AssertionError(f"in {faults.TRIES} downloads, the donor did not come to its chunk")

    def lies(self) -> None:
        """See the top of this file."""
        liar, donor = self.pair()
        faults.arm(liar, self._draw.randint(1, faults.MOST_CHUNKS), spoils=True)
        for _ in range(faults.TRIES):
            joiner = self.joiner()
            lied = faults.donor_lies(joiner, liar, donor)
            joiner.kill()
            if lied:
                return
        raise AssertionError(f"in {faults.TRIES} downloads, no wrong chunk was noticed")

    def resumes(self) -> None:
        """See the top of this file."""
        joiner = self.joiner()
        again = self.again(joiner)
        faults.joiner_dies_downloading(joiner, again, self.pair()[0], self._draw.uniform(0.05, 0.6))
        again.kill()

    def loads(self) -> None:
        """See the top of this file."""
        joiner = self.joiner()
        again = self.again(joiner)
        tensors = self._draw.randint(1, faults.TENSORS)
        faults.joiner_dies_loading(joiner, again, self.pair()[0], tensors)
        again.kill()

    def full(self) -> None:
        """See the top of this file."""
        joiner = self.joiner()
        faults.disk_is_full(joiner, self._draw.randint(1, faults.STATE_BYTES - 1))
        joiner.kill()

    def vanish(self) -> None:
        """See the top of this file. The run is over then."""
        faults.donors_vanish(self.joiner(), self.swarm)


def main() -> int:
    """Play all faults."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--kinds", nargs="+", choices=TIMES, default=[*TIMES])
    parser.add_argument("--times", type=int, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.times is not None and arguments.times < 1:
        parser.error("--times: at least 1")
    began, findings = time.monotonic(), 0
    print("| fault | times | as promised | median seconds |", "|---|---|---|---|", sep="\n", flush=True)
    for kind in arguments.kinds:
        findings += _play(kind, arguments.times or TIMES[kind], random.Random(f"{arguments.seed} {kind}"))
    print(f"{findings} findings in {time.monotonic() - began:.0f} s")
    return int(findings > 0)


def _play(kind: str, times: int, draw: random.Random) -> int:
    """Play one kind of fault; print a line; return the number of times that something was wrong."""
    seconds: list[float] = []
    wrong: list[str] = []
    while len(seconds) + len(wrong) < times:
        with tempfile.TemporaryDirectory() as folder, Run(Path(folder), draw) as run:
            act: Callable[[], None] = getattr(run, kind)
            while len(seconds) + len(wrong) < times:
                began = time.monotonic()
                try:
                    act()
                except (AssertionError, TimeoutError, EOFError) as error:
                    wrong.append(f"{kind}, after {len(seconds)} as promised: {type(error).__name__}: {error}")
                    break  # the next one gets a run of its own
                seconds.append(time.monotonic() - began)
                print(f"{kind} {len(seconds)}: {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
                if kind == "vanish":
                    break
    median = f"{statistics.median(seconds):.1f}" if seconds else ""
    print(f"| {kind} | {times} | {len(seconds)} | {median} |", flush=True)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
