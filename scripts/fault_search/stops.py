"""Stop a process of a training run (SIGSTOP), and resume it, as a laptop that sleeps.

scripts/faults stops                             20 stops of 2, 8, 20 and 90 s each, of four processes
scripts/faults stops --seconds 2 90 --times 5

Four processes train with a state, which a peer that is behind fetches. Which one is stopped, and when, is drawn from
the seed. A stop has passed when the process and all others make an update together again, without help. All parameters
of all processes must be the same bits after each update. *Longest gap* is the longest time between two updates of the
others, from the stop until then.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2pavg.testing import LocalSwarm
from p2pavg.testing.swarm import SwarmProcess

WORK = "tests.integration.optim.state_work:train"
PEERS = 4
BATCH_SECONDS = 0.3
BACK_SECONDS = 300.0  # after which a process that was resumed counts as lost


@dataclass(frozen=True)
class StopOutcome:
    """The seconds for which one stop kept the processes apart."""

    back: float
    """Seconds from SIGCONT to the first update of all."""
    gap: float
    """Longest time between two updates of the others."""


class StopError(Exception):
    """A process did not come back, or has other parameters; the message says which."""


class TrainingRun:
    """Processes that train, and their updates."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self._processes = swarm.processes
        self._changed = threading.Condition()
        self._digests: dict[int, dict[int, str]] = defaultdict(dict)  # by update, and by process
        self._full: dict[int, float] = {}  # updates of all peers, and when the last of them reported it
        self._times: list[tuple[float, int]] = []  # of updates, with the process
        for process in self._processes:
            threading.Thread(target=self._follow, args=(process,), daemon=True).start()

    def _follow(self, process: SwarmProcess) -> None:
        try:
            while True:
                event, now = process.event(threading.TIMEOUT_MAX), time.monotonic()
                if "update" not in event:
                    continue
                with self._changed:
                    told = self._digests[event["update"]]
                    told[process.index] = event["digest"]
                    self._times.append((now, process.index))
                    if len(told) == event["peers"] == len(self._processes) and not event["replayed"]:
                        self._full[event["update"]] = now
                    self._changed.notify_all()
        except EOFError:
            pass

    def wait_for_all(self, after: int) -> float:
        """Wait for an update of all processes after another one; return its time.

        Raises:
            StopError: there is none within 300 s.
        """
        with self._changed:
            made = self._changed.wait_for(lambda: any(update > after for update in self._full), BACK_SECONDS)
            if not made:
                raise StopError(f"no update of all {len(self._processes)} within {BACK_SECONDS:.0f} s")
            return min(when for update, when in self._full.items() if update > after)

    def latest(self) -> int:
        """Return the number of the last update of any process."""
        with self._changed:
            return max(self._digests, default=0)

    def check(self) -> None:
        """Raise StopError if two processes had different parameters after an update."""
        with self._changed:
            for update, told in self._digests.items():
                if len(set(told.values())) > 1:
                    raise StopError(f"different parameters after update {update}: {told}")

    def stop(self, index: int, seconds: float) -> StopOutcome:
        """Stop a process, resume it, and wait until all make an update together."""
        began = time.monotonic()
        self._processes[index].stop()
        time.sleep(seconds)
        after, resumed = self.latest(), time.monotonic()
        self._processes[index].resume()
        back = self.wait_for_all(after)
        self.check()
        with self._changed:
            made = [when for when, other in self._times if other != index and began <= when <= back]
        times = [began, *sorted(made)]
        return StopOutcome(back - resumed, max(map(float.__sub__, times[1:], times)))


def play(plan: Sequence[tuple[int, float]], *, seed: int, folder: Path) -> list[StopOutcome]:
    """Stop processes for some seconds each, one after the other: the plan has (index, seconds)."""
    dice = random.Random(f"stops/{seed}")
    arguments = {"folder": str(folder), "peers": PEERS, "batch_seconds": BATCH_SECONDS, "checks": True}
    with LocalSwarm(WORK, peers=PEERS, arguments=arguments) as swarm:
        swarm.start()
        run, stops = TrainingRun(swarm), []
        run.wait_for_all(2)
        for index, seconds in plan:
            time.sleep(dice.uniform(0.0, 5 * BATCH_SECONDS))
            stops.append(run.stop(index, seconds))
            print(f"process {index} stood still for {seconds:g} s, and was back after {stops[-1].back:.1f} s")
        return stops


def main() -> int:
    """Play the stops and print a table."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults stops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--seconds", type=float, nargs="+", default=[2.0, 8.0, 20.0, 90.0])
    parser.add_argument("--times", type=int, default=20, help="of each")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    plan = [(dice.randrange(PEERS), each) for each in arguments.seconds for _ in range(arguments.times)]
    with tempfile.TemporaryDirectory(prefix="stops-") as folder:
        try:
            stops = play(plan, seed=arguments.seed, folder=Path(folder))
        except StopError as error:
            print(f"WRONG: {error}")
            return 1
    for seconds in arguments.seconds:
        of_it = [stop for stop, (_, each) in zip(stops, plan, strict=True) if each == seconds]
        back, gap = [stop.back for stop in of_it], [stop.gap for stop in of_it]
        print(
            f"{seconds:g} s, {len(of_it)} times: all back after {statistics.median(back):.1f} s ({min(back):.1f} to "
            f"{max(back):.1f}); longest gap of the others {statistics.median(gap):.1f} s ({max(gap):.1f})"
        )
    print("nothing is wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
