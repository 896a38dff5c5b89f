"""Starts the peers, follows them to the end, and then lets the reference train on their batches."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from .plan import Kill, Start, fail_if_killed_too_often, is_over, next_actions
from .processes import Processes
from .progress import Run, State

REFRESH_S = 0.2
SILENCE_S = 600.0
"""After this long without a word from any process, the demo gives up. It must be more than any machine takes for one
step or for starting Python, however busy it is: nothing else judges the processes by the clock."""
PACKAGE = "scripts.demo_gpt"


class Launcher:
    """`on_change` is called a few times a second, in the thread that calls `train`."""

    def __init__(self, run: Run, output: Path, on_change: Callable[[], None]) -> None:
        self._run = run
        self._output = output
        self._on_change = on_change
        self._settings = run.settings.to_json()

    def train(self) -> None:
        """Follow all processes until they are done or have failed; the run holds their results."""
        run = self._run
        with Processes(self._output) as processes:
            self._follow(processes, lambda: is_over(run))
        batches = run.batches()
        if batches is not None and any(peer.state is State.DONE for peer in run.peers):
            # After the peers: beside them, it would compete for the processors and slow them down.
            with Processes(self._output) as processes:
                arguments = ["--settings", self._settings, "--batches", json.dumps(batches)]
                processes.start(run.reference, "-m", f"{PACKAGE}.reference", *arguments)
                self._follow(processes, lambda: run.reference.ended)
        run.finished = time.monotonic()
        for process in run.processes:  # including those that were not started
            process.stop()

    def _follow(self, processes: Processes, is_over: Callable[[], bool]) -> None:
        heard = time.monotonic()
        while not is_over():
            fail_if_killed_too_often(self._run)
            for action in next_actions(self._run):
                self._carry_out(processes, action)
            if processes.pump(REFRESH_S):
                heard = time.monotonic()
            elif time.monotonic() - heard > SILENCE_S:
                for process in self._run.processes:
                    if not process.ended:
                        process.fail(f"no process has said anything for {SILENCE_S:.0f} s")
            self._on_change()

    def _carry_out(self, processes: Processes, action: Start | Kill) -> None:
        peer = self._run.peers[action.peer]
        if isinstance(action, Kill):
            processes.kill(peer)
            return
        identity = self._output / f"peer-{action.peer}.key"
        arguments = ["--settings", self._settings, "--index", str(action.peer), "--identity", str(identity)]
        for address in action.bootstrap:
            arguments += ["--bootstrap", address]
        processes.start(peer, "-m", f"{PACKAGE}.peer", *arguments)
