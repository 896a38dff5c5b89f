"""Start the documented program as DiLoCo peers, again and again: scripts/faults starts [--starts 20 --late 0 1.5 7].

Each start is a daemon to bootstrap from, two peers at once, and a last one at once or some seconds later. The program
is the first one of ``docs/tutorial/quickstart.md`` with the optimizer of ``train-locally.md``. A start succeeds if all
three programs end with the same lineage at the last update. A third peer that cannot join has to report that.

scripts/faults starts --ends 100          whole runs of 2 to 6 processes that nap, are stopped and are killed
scripts/faults starts --virtual 1000      the same on virtual time, with the real optimizers and averagers

The peers begin 0 to 3 s late. Naps of the loop and stops of the process (SIGSTOP) last 0 to 30 s, and most incidents
come at the last updates. All peers that live must end with the same parameters at the last update, or be told by a
RunEndedError within 10 s after they woke. What is drawn comes from seeds (--seed is the first one).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

QUICKSTART = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "quickstart.md"
EPOCHS = 20
SYNC_EVERY = 10
BATCH_SECONDS = (
    0.02  # of computing: with less, the updates end before a peer that is 7 s late has imported torch
)
END_SECONDS = 600.0  # after which a start has failed: on a busy machine, 30 updates take minutes
BEHIND = "cannot follow"  # part of the sentence with which the documented program ends
OPENED = "others join"
ENDED = "ended with lineage"


def program(epochs: int = EPOCHS) -> str:
    """Return the documented program with DiLoCo and without a state; it prints its lineage at the end."""
    found = re.search(r"```python\n(.*?)```", QUICKSTART.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    text = found.group(1)
    for was, becomes in (
        (
            "AveragedOptimizer(inner, averager, target_batch_size=256)",
            f"p2pavg.optim.diloco(inner, averager, sync_every={SYNC_EVERY}, state=False)",
        ),
        (
            "while optimizer.epoch < 20:",
            f"while optimizer.epoch < {epochs}:\n        time.sleep({BATCH_SECONDS})",
        ),
        ("import sys\n", "import sys\nimport time\n"),
        # Without a state, a peer that is behind has to end by itself.
        (
            "        if report.updated:\n",
            "        if report.behind:\n"
            '            raise SystemExit(f"this peer cannot follow the run: {report.behind}")\n'
            "        if report.updated:\n",
        ),
    ):
        assert text.count(was) == 1, f"docs/tutorial/quickstart.md has no longer: {was}"
        text = text.replace(was, becomes)
    return text + f'    print("{ENDED}", optimizer.lineage.state.hex(), flush=True)\n'


class Program:
    """One process, its output lines and their times."""

    def __init__(self, arguments: list[str]) -> None:
        self.began = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.began, line.rstrip()))

    def wait(self, until: float) -> bool:
        """Wait for its end; return whether it came in time."""
        try:
            self.process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(5.0)
        return True

    def close(self) -> None:
        """End the process and the thread that reads from it."""
        self.process.kill()
        self.process.wait()
        self._reader.join(5.0)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def first(self, part: str) -> tuple[float, str] | None:
        """Return the first line that contains this, and the seconds from the process's start until it came."""
        return next(((seconds, line) for seconds, line in self.lines if part in line), None)


@dataclass(frozen=True, slots=True)
class Start:
    """The end of one start."""

    lineages: tuple[str, ...]
    """Lineages of the programs that reached the last update."""
    heard: float | None
    """Seconds from the moment when the last program was in the network until it said that it cannot follow."""
    said: str
    """The sentence in which it said that."""
    stuck: int
    """Number of programs that had not ended in time."""
    unexplained: int
    """Number of programs that neither reached the last update nor said that they cannot follow."""
    logs: tuple[str, ...]
    """Output of each program."""

    @property
    def together(self) -> bool:
        """Return whether all programs are in one lineage."""
        return len(self.lineages) == len(self.logs) and len(set(self.lineages)) == 1

    @property
    def told(self) -> bool:
        """Return whether all but the last one are in one lineage, and the last one ended with the reason."""
        return (
            len(self.lineages) == len(self.logs) - 1
            and len(set(self.lineages)) == 1
            and self.heard is not None
        )


@contextmanager
def running(arguments: list[str]) -> Iterator[Program]:
    """Run a program for as long as the block runs."""
    started = Program(arguments)
    try:
        yield started
    finally:
        started.close()


def start(late: float, path: Path, *, at_once: int = 2) -> Start:
    """Start some peers at once and one more some seconds late, and wait for their end."""
    with ExitStack() as stack:
        daemon = stack.enter_context(
            running(["-u", "-m", "p2pavg", "peer", "--listen", "/ip4/127.0.0.1/tcp/0"])
        )
        address = _address_of(daemon)
        peers = [stack.enter_context(running(["-u", str(path), address])) for _ in range(at_once)]
        time.sleep(late)
        peers.append(stack.enter_context(running(["-u", str(path), address])))
        until = time.monotonic() + END_SECONDS
        stuck = sum(not peer.wait(until) for peer in peers)
        ended = [found[1].split()[-1] for peer in peers if (found := peer.first(ENDED)) is not None]
        heard, opened = peers[-1].first(BEHIND), peers[-1].first(OPENED)
        if (
            heard is not None and opened is not None
        ):  # before that it imports torch, for as long as that takes
            heard = (heard[0] - opened[0], heard[1])
        logs = tuple("\n".join(f"{seconds:7.2f} {line}" for seconds, line in peer.lines) for peer in peers)
    seconds, said = (None, "") if heard is None else heard
    unexplained = sum(peer.first(ENDED) is None and peer.first(BEHIND) is None for peer in peers)
    return Start(tuple(ended), seconds, said, stuck, unexplained, logs)


def _address_of(daemon: Program) -> str:
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if (found := daemon.first("/p2p/")) is not None:
            return found[1].split()[-1]
        time.sleep(0.05)
    raise SystemExit("the daemon did not print its address")


def main() -> None:
    """Print a line for every start, and a table at the end."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults starts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--starts", type=int, default=20, help="of each kind [%(default)s]")
    parser.add_argument(
        "--late",
        type=float,
        nargs="+",
        default=[0.0, 1.5, 7.0],
        help="seconds that the third is late [%(default)s]",
    )
    parser.add_argument("--ends", type=int, default=0, help="whole runs of real processes, instead")
    parser.add_argument("--virtual", type=int, default=0, help="whole runs on virtual time, instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first whole run [%(default)s]")
    parser.add_argument(
        "--processes", type=int, default=2, help="that play virtual runs at once [%(default)s]"
    )
    how = parser.parse_args()
    if how.starts < 1 or min(how.late) < 0 or min(how.ends, how.virtual) < 0 or how.processes < 1:
        parser.error("--starts, --processes: at least 1; --late, --ends, --virtual: 0 or more")
    if how.ends or how.virtual:
        from scripts.fault_search import ends  # it needs this module

        wrong = ends.play_virtual(range(how.seed, how.seed + how.virtual), how.processes)
        wrong += ends.play_real(range(how.seed, how.seed + how.ends))
        raise SystemExit(1 if wrong else 0)
    print("| third peer late by | in one lineage | told that it cannot follow | latest after | neither |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(program(), encoding="utf-8")
        failed = sum(_row(late, how.starts, path) for late in how.late)
    raise SystemExit(1 if failed else 0)


def _row(late: float, starts: int, path: Path) -> int:
    ended = [start(late, path) for _ in range(starts)]
    told = [one for one in ended if one.told]
    neither = [one for one in ended if not one.together and not one.told]
    latest = max((one.heard or 0.0 for one in told), default=0.0)
    print(
        f"| {late:g} s | {sum(one.together for one in ended)} of {starts} | {len(told)} |"
        f" {f'{latest:.1f} s' if told else ''} | {len(neither)} |",
        flush=True,
    )
    for one in neither:
        print(*one.logs, sep="\n---\n", file=sys.stderr)
    return len(neither)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
