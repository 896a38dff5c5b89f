"""The loop of every process of a crew, for any system: wait for a command, do a round, report.

Messages are lines of JSON: commands on the standard input, reports on the standard output. It needs only the standard
library and torch, since hivemind's processes run in an environment of their own.
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
        """Take a round's vector, outside the measurement."""

    def run(self) -> dict[str, float]:
        """Run one round; return the seconds of its ``exchange``, or nothing for a system without other parts."""

    def result(self) -> torch.Tensor:
        """Return the round's result."""


class Line:
    """Messages to and from the parent. Other output goes to the standard error. The process ends with its parent."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        # Not sys.stdin: a forked child closes that, and would wait for ever for the thread that reads it.
        self._in = os.fdopen(os.dup(0))
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._in:
            self._told.put(json.loads(line))
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with the children that some systems leave behind

    def told(self) -> dict[str, Any]:
        """Return the next message."""
        return self._told.get()

    def hears(self) -> bool:
        """Return whether there is a message."""
        return not self._told.empty()

    def report(self, **event: Any) -> None:
        """Send one report."""
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()


def serve(line: Line, system: System, setup: dict[str, Any]) -> None:
    """Do rounds for as long as there is a parent.

    All members prepare a round, begin it at the same moment, and check it when all have ended. So no member's check
    slows down another member's round.
    """
    elements, folder = setup["elements"], Path(setup["vectors"])
    mine, mean = load(folder / str(setup["index"]), elements), load(folder / "mean", elements)
    # Mapped pages count as this process's memory after their first use.
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
        at = line.told()["at"]  # on a clock that all processes of a machine share
        meter.start()
        time.sleep(max(at - time.monotonic(), 0.0))
        report_round(line, system, meter, at, mean, scale(number))


def report_round(
    line: Line, system: System, meter: Meter, began: float, mean: torch.Tensor, factor: float
) -> None:
    """Do a round that all members begin at one moment; report its costs, then its error."""
    times = system.run()
    ended = time.monotonic()
    line.report(ended=ended, step=ended - began, **times)
    line.told()  # until all have ended: a member may still have had work for others
    line.report(**meter.read(), error=relative_error(system.result(), mean, factor))
