"""A run whose peers are killed and replaced, on virtual time, beside the same run without churn.

scripts/faults churn                              40 peers for 3 minutes, a kill and a join every 20 s
scripts/faults churn --peers 8 --minutes 2        a smaller one
scripts/faults churn --seed 5 --log               another one, with the lines of the optimizers' log

The peers are the real optimizers, averagers and states, with links of 20 Mbit/s down and 5 Mbit/s up. A peer that joins
has the run's first parameters, and the logs of the others are too short for it: it fetches a snapshot. The checks are:

* all peers of one lineage hold the same bits, and after each update all of its peers are of one lineage;
* a peer that joins, or misses a round, takes its next update after the time that a snapshot takes on its link, and two
  updates;
* the run with churn uses at least 90 % of the samples per second of the one without.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import sys
import time
from dataclasses import replace

from tests.simulation.churn import Course, Setting, findings, play

GOODPUT = 0.9


def main() -> int:
    """Play both runs."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults churn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--peers", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=3.0, help="of virtual time, after the start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--elements", type=int, default=1_000_000, help="of the vector; a state has three")
    parser.add_argument("--log", action="store_true", help="with the optimizers' log")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO if arguments.log else logging.CRITICAL,
        format="%(name)s %(message)s",
        stream=sys.stdout,
    )
    churn = Setting(
        peers=arguments.peers,
        seconds=60.0 * arguments.minutes,
        seed=arguments.seed,
        every=arguments.every,
        elements=arguments.elements,
    )
    began = time.monotonic()
    with multiprocessing.Pool(2) as pool:
        course, calm = pool.map(play, [churn, replace(churn, every=None)], chunksize=1)
    for name, each in (("with churn", course), ("without", calm)):
        print(
            f"{name}: {each.goodput():.2f} samples/s in {len(each.samples)} updates of {each.update_seconds():.2f} s"
        )
    ratio = course.goodput() / calm.goodput()
    print(f"goodput: {ratio:.1%} of the run without churn")
    _tell_joiners(course)
    wrong = [*findings(course), *findings(calm)]
    if ratio < GOODPUT:
        wrong.append(f"the goodput is below {GOODPUT:.0%}")
    print(f"{len(wrong)} findings in {time.monotonic() - began:.0f} s", *wrong, sep="\n  ")
    return int(bool(wrong))


def _tell_joiners(course: Course) -> None:
    joined = [life.behind_seconds for life in course.joiners() if life.behind_seconds is not None]
    if joined:
        print(
            f"{len(joined)} peers joined, after {statistics.median(joined):.1f} s in the median and {max(joined):.1f} s"
            f" at most; {course.bound():.1f} s are allowed ({course.setting.fetch_seconds:.1f} s for a snapshot)"
        )


if __name__ == "__main__":
    sys.exit(main())
