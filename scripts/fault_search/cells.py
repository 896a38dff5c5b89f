"""Synchronous cells whose peers are killed and replaced, on virtual time, beside the same run without churn.

scripts/faults cells                                    60 peers in 3 cells for 40 s, a kill and a join every 5 s
scripts/faults cells --peers 200 --cells 8              200 peers
scripts/faults cells --processes 1                      one run after the other

The peers are the real optimizers, averagers and states. Each trains a small network on batches of its own. The checks
are:

* after each update, all members of a cell that took it are of one lineage, and all peers of a lineage hold the same
  bits of parameters and momentum;
* after the same number of updates, the held-out loss with churn is within 1 % of the loss without, as a mean over the
  cells after each mix.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from dataclasses import replace

from p2pavg.optim import Cells
from tests.simulation.cells import CellCourse, CellSetting, cell_findings, compared, play_cells

LOSS = 0.01


def main() -> int:
    """Play both runs."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults cells",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--peers", type=int, default=60)
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of virtual time, after the first update")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--mix-every", type=int, default=3, help="updates between two mixes")
    parser.add_argument("--shares", type=int, default=8)
    parser.add_argument("--delay", type=int, default=0, help="updates for which outer averages may run")
    parser.add_argument("--processes", type=int, default=2, choices=(1, 2))
    parser.add_argument("--log", action="store_true", help="with the optimizers' log")
    given = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO if given.log else logging.CRITICAL,
        format="%(name)s %(message)s",
        stream=sys.stdout,
    )
    churn = CellSetting(
        peers=given.peers,
        seconds=given.seconds,
        seed=given.seed,
        every=given.every,
        batches=1.0,
        batch_seconds=(0.4, 0.6),
        cells=Cells(count=given.cells, every=given.mix_every, shares=given.shares, delay=given.delay),
    )
    began = time.monotonic()
    wrong: list[str] = []
    courses = []
    with multiprocessing.Pool(given.processes) as pool:
        for name, each in zip(
            ("with churn", "without"), pool.imap(play_cells, [churn, replace(churn, every=None)]), strict=True
        ):
            _tell(name, each, time.monotonic() - began)
            courses.append(each)
            wrong += [f"{name}: {finding}" for finding in cell_findings(each)]
    print("| updates | loss with churn | without | difference |", "|---|---|---|---|", sep="\n")
    for epoch, loss, calm in compared(*courses):
        print(f"| {epoch} | {loss:.4f} | {calm:.4f} | {loss / calm - 1:+.2%} |")
        if abs(loss / calm - 1) > LOSS:
            wrong.append(
                f"after {epoch} updates, the loss with churn is {loss / calm - 1:+.2%} from that without"
            )
    print(f"{len(wrong)} findings in {time.monotonic() - began:.0f} s", *wrong, sep="\n  ")
    return int(bool(wrong))


def _tell(name: str, course: CellCourse, seconds: float) -> None:
    kills, came = sum(life.killed for life in course.lives), course.joiners()
    last = {cell: max(epoch for at, epoch in course.sizes if at == cell) for cell, _ in course.sizes}
    mixes = sorted(course.mixes.values(), key=lambda mix: mix.at)
    print(
        f"{name}: {len(last)} cells of {min(course.sizes.values())} to {max(course.sizes.values())}"
        f" contributors, {kills} kills, {len(came)} joins, of which {len(course.newcomers())} took an update;"
        f" the cells ended at update {sorted(last.values())}; {len(mixes)} mixes; after {seconds:.0f} s",
        flush=True,
    )
    for mix in mixes:
        print(
            f"  {mix.at:6.1f} s: cell {mix.cell} at update {mix.epoch} mixed {mix.mixed:.0%} of its values,"
            f" {mix.distance:.4f} from the mean",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
