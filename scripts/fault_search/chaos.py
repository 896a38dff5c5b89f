"""Chaos test: processes on this machine are killed, stopped, cut off and restarted while they average.

scripts/faults chaos                           8 peers for 5 minutes, after 5 calm minutes to compare them with
scripts/faults chaos --peers 4 --minutes 1 --no-calm --seed 7 --codec fp32
scripts/faults chaos --json                    the figures as JSON instead of tables
scripts/faults chaos --peers 4 --group-size 4 --every 60 --links --minutes 480 --calm-minutes 30
                                               a failure a minute for eight hours; links need root

Every process averages round after round, all in one run, in groups of half of them. Meanwhile a plan that is drawn from
the seed (chaos_plan.py) decides which process is killed (SIGKILL), stopped (SIGSTOP), resumed, restarted with its
identity, or cut off from all others, and whose wall clock jumps. At least half of the processes run at any time, and
each may be hit. A process that restarts is given the addresses of all running ones. At the end all are resumed, average
for a while without faults, and report their unused samples. A bare averager writes nothing but its log: full disks are
in the tests of checkpoints.

Then their reports are checked (chaos_check.py has the details and the exceptions). Every Success is the mean of
its peers' samples, identical to the last bit in a group. Every sample is in exactly one result, or still accumulated,
or its process was killed. No process waits longer than the timeouts.

A violation is printed with the command that repeats it, and the exit status is 1. The reports and logs are then kept in
a folder, which is printed too. Timing is real: the same seed repeats the plan and the samples, but not the moment at
which a fault hits a round.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from p2pavg.testing import LocalSwarm, SwarmProcess
from scripts.benchmarks.crew import Place
from scripts.benchmarks.netns import NoNamespacesError, set_link, switched
from scripts.benchmarks.netns import check as check_namespaces
from scripts.fault_search.chaos_check import CODEC_ERRORS, Committed, Findings, Life, Limits, SampleId, check
from scripts.fault_search.chaos_plan import Action, draw
from scripts.fault_search.chaos_work import EXCHANGES, SETTLE_SECONDS, clock_file, draw_sample, sketch

WORK = "scripts.fault_search.chaos_work:average"
JOIN_SECONDS = 90.0  # watchdog: for a process to start and join
AIM_SECONDS = 4.0  # for which a fault waits for an exchange to hit
LINK_MBPS = 1000.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of one run."""

    peers: int = 8
    seconds: float = 300.0
    """Duration of the part with faults, in which goodput is measured."""
    seed: int = 0
    group_size: int = 4
    elements: int = 200_000
    codec: str = "blockwise8"
    pause: float = 0.3
    """Seconds between a process's rounds, on average."""
    match_timeout: float = 5.0
    exchange_timeout: float = 15.0
    links: bool = False
    """True if each process has a link of its own, in a network namespace."""
    calm_seconds: float = 20.0
    """Duration of the part without faults at the end."""

    @property
    def limits(self) -> Limits:
        """Limits that the check applies."""
        return Limits(self.match_timeout, self.exchange_timeout, self.codec)


@dataclass(slots=True)
class Report:
    """Results of a run."""

    lives: list[Life]
    faults: Counter[str]
    began: float
    """Start of the measured time, on the clock that all processes share."""
    ended: float


def run(how: Setting, plan: Sequence[Action], folder: Path) -> Report:
    """Run all processes from their start to their end; ``folder`` takes their keys and logs.

    Raises:
        NoNamespacesError: there can be no links here.
    """
    if not how.links:
        return _run_in(how, plan, folder, ())
    with switched([LINK_MBPS] * how.peers) as places:
        return _run_in(how, plan, folder, places)


def _run_in(how: Setting, plan: Sequence[Action], folder: Path, places: Sequence[Place]) -> Report:
    arguments = {
        "places": [(place.prefix[-1], place.host) for place in places],
        "folder": str(folder),
        "life": 0,
        "seed": how.seed,
        "elements": how.elements,
        "pause": how.pause,
        "config": {
            "group_size": how.group_size,
            "min_group_size": 2,
            "match_timeout": how.match_timeout,
            "exchange_timeout": how.exchange_timeout,
            "compression": how.codec,
        },
    }
    with LocalSwarm(WORK, peers=how.peers, arguments=arguments) as swarm:
        swarm.start()
        parent = _Parent(swarm, folder, places)
        began = time.monotonic()
        parent.carry_out(plan)
        _sleep_until(began + how.seconds)
        ended = time.monotonic()
        parent.calm_down(how.calm_seconds)
        parent.finish(how.limits.wait + SETTLE_SECONDS)
    return Report(parent.lives, parent.faults, began, ended)


class _Parent:
    """Carries out the plan and collects the processes' reports."""

    def __init__(self, swarm: LocalSwarm, folder: Path, places: Sequence[Place]) -> None:
        self.lives: list[Life] = []
        self.faults: Counter[str] = Counter()
        self._swarm = swarm
        self._folder = folder
        self._places = places
        self._cut: set[int] = set()
        self._least = (len(swarm.processes) + 1) // 2
        self._current: dict[int, _Child] = {}
        for process in swarm.processes:
            self._follow(process)

    def carry_out(self, plan: Sequence[Action]) -> None:
        """Carry out all actions at their times; skip a fault that would leave fewer than half of the processes."""
        began = time.monotonic()
        for action in plan:
            _sleep_until(began + action.at)
            if action.aim is not None and self._current[action.slot].await_exchange(AIM_SECONDS):
                self.faults["aimed at an exchange"] += 1
                time.sleep(action.aim)
            if self._carry_out(action.what, self._current[action.slot], action.by):
                self.faults[action.what] += 1
            elif action.what in ("kill", "stop", "cut"):
                self.faults[f"{action.what} left out"] += 1

    def calm_down(self, seconds: float) -> None:
        """Undo all faults, and let the processes average for a while."""
        for child in list(self._current.values()):
            self._carry_out("right", child)
            if child.life.slot in self._cut:
                self._carry_out("mend", child)
            if child.stopped is not None:
                self._carry_out("resume", child)
            if child.life.killed is not None:
                self._carry_out("restart", child)
        deadline = time.monotonic() + JOIN_SECONDS
        for child in self._current.values():
            child.joined.wait(max(deadline - time.monotonic(), 0.0))
        time.sleep(seconds)

    def finish(self, timeout: float) -> None:
        """Tell all processes to report their unused samples, and wait for the reports."""
        for child in self._current.values():
            child.process.tell(finish=True)
        deadline = time.monotonic() + timeout
        for child in self._current.values():
            child.finished.wait(max(deadline - time.monotonic(), 0.0))
        for child in self._current.values():
            child.leaving = True
            if not child.finished.is_set() and not child.life.trouble:
                child.life.trouble = f"hangs: it has not finished {timeout:.0f} s after it was told to"
                child.process.process.send_signal(signal.SIGUSR1)  # its threads' stacks go to its log
        time.sleep(0.1)

    def _is_there(self, child: _Child) -> bool:
        return child.there and child.life.slot not in self._cut

    def _carry_out(self, what: str, child: _Child, by: float = 0.0) -> bool:
        """Carry out one action; return whether that was possible."""
        there, slot = sum(map(self._is_there, self._current.values())), child.life.slot
        if what in ("kill", "stop", "cut"):
            if child.life.killed is not None or (self._is_there(child) and there - 1 < self._least):
                return False
            if what == "kill":
                return child.kill()
            if not self._is_there(child):
                return False
            if what == "stop":
                child.stop()
            else:
                set_link(self._places[slot], up=False)
                self._cut.add(slot)
        elif what == "mend":
            if slot not in self._cut:
                return False
            set_link(self._places[slot], up=True)
            self._cut.remove(slot)
        elif what in ("clock", "right"):
            # Renamed into place: the process reads it at any moment.
            written = clock_file(self._folder, slot).with_suffix(".new")
            written.write_text(str(by))
            written.rename(clock_file(self._folder, slot))
        elif what == "resume":
            if child.stopped is None or child.life.killed is not None:
                return False
            child.resume()
        else:
            if child.life.killed is None:
                return False
            number = child.life.number + 1
            self._follow(self._swarm.restart(child.life.slot, arguments={"life": number}, wait=False))
        return True

    def _follow(self, process: SwarmProcess) -> None:
        life = Life(process.index, process.arguments["life"])
        self.lives.append(life)
        self._current[process.index] = _Child(process, life)


class _Child:
    """One process and its reported state."""

    def __init__(self, process: SwarmProcess, life: Life) -> None:
        self.process = process
        self.life = life
        self.stopped: float | None = None
        self.joined = threading.Event()
        """Set when it has joined, or never will."""
        self.finished = threading.Event()
        """Set when it has reported its unused samples, or has ended."""
        self._exchanges = threading.Event()
        self.leaving = False
        """True if it may end from now on."""
        threading.Thread(target=self._follow, daemon=True).start()

    @property
    def there(self) -> bool:
        """True if it is running and averages."""
        return bool(self.life.peer_id) and self.stopped is None and self.process.running

    def await_exchange(self, timeout: float) -> bool:
        """Wait for its group to begin an exchange; return whether that happened in time."""
        self._exchanges.clear()
        return self.there and self._exchanges.wait(timeout)

    def kill(self) -> bool:
        """Kill it; return whether that caused its end."""
        self.process.kill()
        killed = self.process.process.wait() == -signal.SIGKILL
        if killed:
            self.life.killed = time.monotonic()
            self._note_stop()
        return killed

    def stop(self) -> None:
        self.stopped = time.monotonic()
        self.process.stop()

    def resume(self) -> None:
        self.process.resume()
        self._note_stop()

    def _note_stop(self) -> None:
        if self.stopped is not None:
            self.life.stops.append((self.stopped, time.monotonic()))
            self.stopped = None

    def _follow(self) -> None:
        try:
            self.process.wait_joined(JOIN_SECONDS)
            self.life.peer_id = self.process.peer_id
            self.joined.set()
            while True:
                event = self.process.event(threading.TIMEOUT_MAX)
                self.life.events.append(event)
                if event.get("reason") == EXCHANGES:
                    self._exchanges.set()
                if event["event"] == "left":
                    self.finished.set()
        except EOFError as error:
            time.sleep(0.5)  # the thread that killed it notes that
            if self.life.killed is None and not self.leaving:
                self.life.trouble = f"was not killed, and has ended: {error}"
        except TimeoutError:
            self.life.trouble = f"has not joined within {JOIN_SECONDS:.0f} s"
        finally:
            self.joined.set()
            self.finished.set()


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0.0))


# ---------------------------------------------------------------------- what came of it


def examine(how: Setting, report: Report) -> Findings:
    """Check everything against the samples, made again from the seed."""

    @functools.cache
    def sketches(sample: SampleId) -> Sequence[float]:
        slot, life, number = sample
        return sketch(draw_sample(how.seed, slot, life, number, how.elements)[1])

    return check(report.lives, how.limits, sketches)


def measure(report: Report, findings: Findings) -> dict[str, Any]:
    """Measure goodput during the faults, and count the results of steps."""
    minutes = (report.ended - report.began) / 60
    within = [
        found
        for found in findings.committed
        if any(report.began <= step.ended < report.ended for step in found.holders)
    ]
    results: Counter[str] = Counter()
    for life in report.lives:
        for event in life.events:
            if event["event"] == "result" and report.began <= event["at"] < report.ended:
                used = f", used={event['used']}" if event["result"] == "Failed" else ""
                results[event["result"] + used] += 1
    members = [len(found.first["weights"]) for found in within]
    return {
        "minutes": minutes,
        "rounds_per_minute": len(within) / minutes,
        "samples_per_minute": sum(len(found.samples) for found in within) / minutes,
        "peers_per_round": sum(members) / max(len(members), 1),
        "rounds_with_losses_per_minute": sum(map(_had_losses, within)) / minutes,
        "results": dict(sorted(results.items())),
        "faults": dict(report.faults),
        "excused": findings.excused,
        "undecided": findings.undecided,
        "violations": findings.violations,
    }


def _had_losses(found: Committed) -> bool:
    return any(step.result is not None and step.result["lost"] for step in found.holders)


def show(console: Console, figures: dict[str, dict[str, Any]]) -> None:
    """Print tables of one run, or of the calm one beside the other."""
    table = Table("per minute", *figures, title="goodput")
    if "calm" in figures:
        table.add_column("kept")
    for title, name in (
        ("rounds that averaged", "rounds_per_minute"),
        ("samples averaged", "samples_per_minute"),
    ):
        values = [found[name] for found in figures.values()]
        kept = [f"{values[-1] / values[0]:.0%}" if values[0] else "-"] if "calm" in figures else []
        table.add_row(title, *(f"{value:.1f}" for value in values), *kept)
    losses = (found["rounds_with_losses_per_minute"] for found in figures.values())
    table.add_row("rounds in which a member lost another", *(f"{value:.1f}" for value in losses))
    table.add_row("peers in a round", *(f"{found['peers_per_round']:.2f}" for found in figures.values()))
    for kind in sorted({kind for found in figures.values() for kind in found["results"]}):
        counts = (found["results"].get(kind, 0) / found["minutes"] for found in figures.values())
        table.add_row(f"steps that ended with {kind}", *(f"{count:.1f}" for count in counts))
    console.print(table)
    found = figures["chaos"]
    faults = Table("fault", "times", title="injected")
    for kind, count in found["faults"].items():
        faults.add_row(kind, str(count))
    console.print(faults)
    console.print(
        f"{found['excused']} contributions used in a result that no surviving process reported, "
        f"{found['undecided']} unresolved at the end"
    )


def keep(folder: Path, lives: Sequence[Life]) -> None:
    """Write every process's reports, as JSON lines, and the actions on it."""
    for life in lives:
        about = {name: value for name, value in asdict(life).items() if name != "events"}
        with Path(folder, f"{life.slot}-{life.number}.jsonl").open("w") as file:
            file.writelines(json.dumps(line) + "\n" for line in [about, *life.events])


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=5.0, help="of faults")
    parser.add_argument(
        "--calm-minutes", type=float, help="of calm before; as many as of faults if not given"
    )
    parser.add_argument("--every", type=float, help="mean seconds between faults; 40 / peers if not given")
    parser.add_argument("--links", action="store_true", help="cut links, too, which needs root and iproute2")
    parser.add_argument("--seed", type=int, default=0, help="of the plan and of the samples")
    parser.add_argument("--group-size", type=int, help="half of the peers if not given")
    parser.add_argument("--elements", type=int, default=Setting.elements)
    parser.add_argument("--codec", choices=sorted(CODEC_ERRORS), default=Setting.codec)
    parser.add_argument(
        "--pause", type=float, default=Setting.pause, help="seconds between rounds, on average"
    )
    parser.add_argument("--match-timeout", type=float, default=Setting.match_timeout)
    parser.add_argument("--exchange-timeout", type=float, default=Setting.exchange_timeout)
    parser.add_argument("--no-calm", action="store_true", help="leave the run without faults out")
    parser.add_argument("--keep", type=Path, help="a folder for what the processes report and log")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    arguments = parser.parse_args()
    if arguments.peers < 4:
        parser.error("--peers: at least 4, so that two are left to average when half of them are away")
    return arguments


def main() -> int:
    """Run the test."""
    arguments = read_arguments()
    if arguments.links:
        try:
            check_namespaces()
        except NoNamespacesError as error:
            print(f"--links: {error}", file=sys.stderr)
            return 2
    how = Setting(
        peers=arguments.peers,
        seconds=60 * arguments.minutes,
        seed=arguments.seed,
        group_size=arguments.group_size or max(arguments.peers // 2, 2),
        elements=arguments.elements,
        codec=arguments.codec,
        pause=arguments.pause,
        match_timeout=arguments.match_timeout,
        exchange_timeout=arguments.exchange_timeout,
        links=arguments.links,
    )
    signal.signal(signal.SIGTERM, _leave)  # so that no stopped process remains
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    console = Console(width=120, stderr=arguments.json)
    calm = how if arguments.calm_minutes is None else replace(how, seconds=60 * arguments.calm_minutes)
    plans = {} if arguments.no_calm else {"calm": (calm, list[Action]())}
    drawn = draw(how.seed, peers=how.peers, seconds=how.seconds, every=arguments.every, links=how.links)
    plans["chaos"] = how, drawn
    figures = {}
    violations = []
    try:
        for name, (setting, plan) in plans.items():
            console.print(
                f"{name}: {how.peers} processes, {setting.seconds:.0f} s, {len(plan)} things done to them"
            )
            Path(folder, name).mkdir(parents=True, exist_ok=True)
            report = run(setting, plan, Path(folder, name))
            keep(Path(folder, name), report.lives)
            findings = examine(how, report)
            figures[name] = measure(report, findings)
            violations += [f"{name}: {text}" for text in findings.violations]
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    finally:
        if not arguments.keep and not violations:
            shutil.rmtree(folder)
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        show(console, figures)
    for text in violations:
        console.print(f"[red]WRONG[/red] {text}", highlight=False, soft_wrap=True)
    if violations:
        again = [
            f"scripts/faults chaos --peers {how.peers} --minutes {arguments.minutes:g} --seed {how.seed}"
        ]
        again.append(f"--group-size {how.group_size} --elements {how.elements} --codec {how.codec}")
        again.append(f"--pause {how.pause:g} --match-timeout {how.match_timeout:g}")
        again.append(f"--exchange-timeout {how.exchange_timeout:g}")
        again += ["--no-calm"] if arguments.no_calm else []
        again += ["--links"] if how.links else []
        again += [] if arguments.every is None else [f"--every {arguments.every:g}"]
        console.print(f"{len(violations)} violations; what the processes reported and logged is in {folder}")
        console.print(
            f"again (the same plan and samples, at other moments of the rounds): {' '.join(again)}",
            soft_wrap=True,
        )
        return 1
    console.print("nothing is wrong")
    return 0


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
