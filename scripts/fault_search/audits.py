"""Audits of averages, on virtual time: how soon a liar is excluded, and that no honest member is.

scripts/faults audits                           20 liars, and 1,000 rounds of honest members
scripts/faults audits --rounds 10000            more honest rounds

Four peers average round after round, with the usual audits. A liar changes the first hundredth of each part of its
share. Its rounds are counted until an honest peer meets it no more. Shares of honest members are audited in each round,
with all codecs and rules in turn.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import statistics
import sys
import time

import pytest
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.allreduce import reduction
from tests.simulation.false_averages import Rounds, lie

PART_ELEMENTS = 64
LIAR = 2
MOST_ROUNDS = 100
CODECS = (None, "int8:64", "blockwise8:64", "fp16")
RULES = (None, "trimmed_mean:0.25", "median", "centered_clip:1.0:3")
ROUNDS_AT_ONCE = 50


def rounds_until_excluded(seed: int) -> int:
    """Return the number of rounds in which a liar took part."""
    _prepare()

    async def play() -> int:
        rounds = Rounds(4, MOST_ROUNDS, elements=700 + seed, until=lambda each: not each.is_met(0, LIAR))
        await rounds.run()
        return rounds.rounds_with(0, LIAR)

    with pytest.MonkeyPatch.context() as patch:
        lie(patch, LIAR)
        return trio.run(play, clock=MockClock(autojump_threshold=0))


def honest_rounds(seed: int) -> tuple[int, str]:
    """Return the number of rounds of honest members, and what went wrong with them."""
    _prepare()
    found = _Findings()
    logging.getLogger("p2pavg.round").addHandler(found)
    codec, rule = list(itertools.product(CODECS, RULES))[seed % (len(CODECS) * len(RULES))]

    async def play() -> int:
        rounds = Rounds(
            4, ROUNDS_AT_ONCE, elements=700 + seed, audit="after:1.0", compression=codec, robust=rule
        )
        await rounds.run()
        return sum(isinstance(result, p2pavg.Success) for result in rounds.results[0])

    done = trio.run(play, clock=MockClock(autojump_threshold=0))
    logging.getLogger("p2pavg.round").removeHandler(found)
    missing = "" if done == ROUNDS_AT_ONCE else f"{ROUNDS_AT_ONCE - done} rounds failed"
    return done, "; ".join(filter(None, [missing, *found.lines]))


class _Findings(logging.Handler):
    """Collects what the log says about audits that found or got something else than a true average."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "audit" in message or "false average" in message:
            self.lines.append(message)


def _prepare() -> None:
    vars(reduction)["part_size"] = lambda _elements, _reducers: PART_ELEMENTS
    logging.basicConfig(level=logging.INFO, handlers=[logging.NullHandler()])


def main() -> int:
    """Run the audits."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults audits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--seeds", type=int, default=20, help="how many liars")
    parser.add_argument("--rounds", type=int, default=1000, help="how many rounds of honest members")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    arguments = parser.parse_args()
    began = time.monotonic()
    with multiprocessing.Pool(arguments.processes) as pool:
        if arguments.seeds:
            counts = sorted(pool.imap_unordered(rounds_until_excluded, range(arguments.seeds)))
            median = statistics.median(counts)
            print(f"rounds until a liar is excluded: median {median:g}, all {counts}", flush=True)
        total, wrong = 0, 0
        batches = -(-arguments.rounds // ROUNDS_AT_ONCE)
        for done, why in pool.imap_unordered(honest_rounds, range(batches)):
            total += done
            if why:
                wrong += 1
                print(f"honest members: {why}", flush=True)
    print(f"{total} rounds of honest members, {wrong} batches wrong, {time.monotonic() - began:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
