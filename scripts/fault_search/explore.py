"""Explore every state that a small group can reach, with more faults than the suite has time for.

An error is printed with all steps that lead to it. --hostile instead lets one of three members send any votes that it
can sign: its position, and the number of its votes, can be given. --progress lets one of three or four members that
does not lead lie without end, and checks that the others end with success after few attempts.
"""

from __future__ import annotations

import argparse
import itertools
import time

from tests.unit.consensus.hostile import HostileGroup
from tests.unit.consensus.progress import LyingFollower
from tests.unit.consensus.world import Faults, Group

# (size, faults, auxiliaries, true if a contribution may never count twice); see docs/explanation/agreement.md.
CASES = [
    (2, Faults(crashes=1, suspicions=2, timeouts=2), 0, True),
    (3, Faults(crashes=1, timeouts=1), 1, True),
    (3, Faults(crashes=2), 1, True),
    (3, Faults(suspicions=1, timeouts=1), 0, True),
    (3, Faults(timeouts=2), 0, True),
    (3, Faults(suspicions=2), 0, True),
    (3, Faults(crashes=1, suspicions=1), 1, True),
    (3, Faults(crashes=2, suspicions=1), 0, False),
    (3, Faults(crashes=1, suspicions=1, timeouts=1), 0, False),
    (4, Faults(crashes=1), 1, True),
    (4, Faults(crashes=1), 0, True),
    (4, Faults(suspicions=1), 0, True),
    (4, Faults(timeouts=1), 0, True),
]


def explore_hostile(liars: list[int], lies: int) -> None:
    """Explore what one hostile member of three can do with a number of votes."""
    for liar in liars:
        began = time.monotonic()
        states = HostileGroup(3, Faults(), liar=liar, lies=lies).search()
        what = f"member {liar} of 3 is hostile, {lies} votes of it"
        print(f"{what}: {states} states in {time.monotonic() - began:.0f} s, nothing wrong", flush=True)


def explore_progress(liars: list[int]) -> None:
    """Explore whether honest members end with success while one member lies without end."""
    for size, liar, accuses in itertools.product((3, 4), liars, (False, True)):
        began = time.monotonic()
        states = LyingFollower(
            size, liar=liar, accuses=accuses, most_attempts=size + accuses, most_left_out=int(accuses)
        ).progress()
        what = f"member {liar} of {size} lies without end" + (", and accuses others" if accuses else "")
        print(f"{what}: {states} states in {time.monotonic() - began:.0f} s, each ends well", flush=True)


def main() -> None:
    """Explore all cases; print a line for each."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults explore",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hostile", action="store_true", help="one member of three is hostile")
    parser.add_argument(
        "--progress", action="store_true", help="one member of three or four lies without end"
    )
    parser.add_argument("--liars", type=int, nargs="+", default=[0, 1, 2], help="its positions [%(default)s]")
    parser.add_argument("--lies", type=int, default=2, help="votes that it sends at most [%(default)s]")
    how = parser.parse_args()
    if not set(how.liars) <= {0, 1, 2} or how.lies < 1:
        parser.error("--liars: 0, 1 or 2; --lies: at least 1")
    if how.progress:
        explore_progress(how.liars)
        return
    if how.hostile:
        explore_hostile(how.liars, how.lies)
        return
    for size, faults, auxiliaries, strict in CASES:
        began = time.monotonic()
        states = Group(size, faults, auxiliaries=auxiliaries, strict=strict).explore()
        what = f"{size} members ({auxiliaries} auxiliary), {faults}"
        print(f"{what}: {states} states in {time.monotonic() - began:.0f} s, nothing wrong", flush=True)


if __name__ == "__main__":
    main()
