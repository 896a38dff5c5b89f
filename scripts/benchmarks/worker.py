"""What every process of a crew does, whichever system it measures: wait to be told, do a round, report.

Messages are lines of JSON, one a line: on the standard input what it is told, on the standard output what it reports.
Needs nothing but the standard library and torch, since hivemind's processes run in an environment of their own.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from scripts.benchmarks.meter import Meter
from scripts.benchmarks.vectors import load, relative_error, scale


class System(Protocol):
    """One member of a group, in a process of its own."""

    def prepare(self, values: torch.Tensor) -> None:
        """Take a round's vector, outside of what is measured."""

    def run(self) -> dict[str, float]:
        """One round. Returns seconds: ``exchange`` of it, or nothing where there is nothing else."""

    def result(self) -> torch.Tensor:
        """What came of it."""


class Line:
    """To and from the parent. What others print goes to the standard error. Without a parent, there is no process."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        # Not sys.stdin: a forked child closes that, and would wait for ever for the thread that reads it here.
        self._in = os.fdopen(os.dup(0))
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._in:
            self._told.put(json.loads(line))
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with the children that some systems leave behind

    def told(self) -> dict[str, Any]:
        """The next message."""
        return self._told.get()

    def hears(self) -> bool:
        """Whether there is a message."""
        return not self._told.empty()

    def report(self, **event: Any) -> None:
        """Send one."""
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()


def serve(line: Line, system: System, setup: dict[str, Any]) -> None:
    """Rounds for as long as there is a parent.

    Each is prepared by all, begun by all at one moment, and checked when all have ended: nobody's check takes time from
    another's round.
    """
    elements, folder = setup["elements"], Path(setup["vectors"])
    mine, mean = load(folder / str(setup["index"]), elements), load(folder / "mean", elements)
    # Pages that are mapped count as this process's memory from their first use on.
    for mapped in (mine, mean):
        mapped.sum()
    meter = Meter()
    if setup.get("at_once"):
        system.prepare(mine)
        meter.start()
        report_round(line, system, meter, time.monotonic(), mean, 1.0)
    line.report(ready=True)
    while True:
        number = line.told()["prepare"]
        system.prepare(mine * scale(number))
        line.report(prepared=number)
        at = line.told()["at"]  # of a clock that all processes of a machine share
        meter.start()
        time.sleep(max(at - time.monotonic(), 0.0))
        report_round(line, system, meter, at, mean, scale(number))


def report_round(
    line: Line, system: System, meter: Meter, began: float, mean: torch.Tensor, factor: float
) -> None:
    """Do a round that everybody began at a moment, and say what it took, and then what it was worth."""
    times = system.run()
    ended = time.monotonic()
    line.report(ended=ended, step=ended - began, **times)
    line.told()  # that all have ended; a member may have had something left to do for others
    line.report(**meter.read(), error=relative_error(system.result(), mean, factor))
