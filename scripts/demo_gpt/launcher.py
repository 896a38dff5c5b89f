"""Starts the peers and the reference together and follows them to the end."""

import time
from collections.abc import Callable
from pathlib import Path

from .processes import Processes
from .progress import Progress, Run, State

START_TIMEOUT_S = 60.0
REFRESH_S = 0.2
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
        with Processes(self._output) as processes:
            if self._start(processes):
                processes.go()
                self._follow(processes, self._is_over)
            self._run.finished = time.monotonic()
        for process in self._run.processes:  # including those that were not started
            process.stop()

    def _start(self, processes: Processes) -> bool:
        """Start peer 0 first, because the others join through its address; return False if a process failed."""
        first, *others = self._run.peers
        self._start_peer(processes, 0, [])
        processes.start(self._run.reference, "-m", f"{PACKAGE}.reference", "--settings", self._settings)
        self._await_ready(processes, [first])
        if first.state is not State.READY:
            return False
        for index, _ in enumerate(others, start=1):
            self._start_peer(processes, index, ["--bootstrap", first.address])
        self._await_ready(processes, self._run.processes)
        return all(process.state is State.READY for process in self._run.processes)

    def _start_peer(self, processes: Processes, index: int, bootstrap: list[str]) -> None:
        identity = self._output / f"peer-{index}.key"
        arguments = ["--settings", self._settings, "--index", str(index), "--identity", str(identity)]
        processes.start(self._run.peers[index], "-m", f"{PACKAGE}.peer", *arguments, *bootstrap)

    def _await_ready(self, processes: Processes, awaited: list[Progress]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        self._follow(
            processes,
            lambda: (
                all(process.state is State.READY for process in awaited)
                or any(process.state is State.FAILED for process in awaited)
                or time.monotonic() > deadline
            ),
        )
        for process in awaited:
            if process.state is State.STARTING and time.monotonic() > deadline:
                process.fail(f"was not ready within {START_TIMEOUT_S:.0f} s")

    def _follow(self, processes: Processes, is_over: Callable[[], bool]) -> None:
        while not is_over():
            processes.pump(REFRESH_S)
            self._on_change()

    def _is_over(self) -> bool:
        """Return whether to stop: the reference is needed only if there is a peer to compare it with."""
        peers, reference = self._run.peers, self._run.reference
        all_failed = all(peer.state is State.FAILED for peer in peers)
        return all(peer.ended for peer in peers) and (reference.ended or all_failed)
