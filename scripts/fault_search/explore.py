"""Explore every state that a small group can reach, with more faults than the suite has time for.

An error is printed with all steps that lead to it.
"""

from __future__ import annotations

import argparse
import time

from tests.unit.consensus.world import Faults, Group

# (size, faults, auxiliaries, true if a contribution may never count twice); see docs/round.md.
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


def main() -> None:
    """Explore all cases; print a line for each."""
    argparse.ArgumentParser(
        prog="scripts/faults explore",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    for size, faults, auxiliaries, strict in CASES:
        began = time.monotonic()
        states = Group(size, faults, auxiliaries=auxiliaries, strict=strict).explore()
        what = f"{size} members ({auxiliaries} auxiliary), {faults}"
        print(f"{what}: {states} states in {time.monotonic() - began:.0f} s, nothing wrong", flush=True)


if __name__ == "__main__":
    main()
