"""The work of ``p2pavg launch``."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from functools import partial
from pathlib import Path

import trio

from p2pavg.peer.peer import open_peer
from p2pavg.strategies.job import BOOTSTRAP, RUN_ID, SCRATCH
from p2pavg.tools.jobs.limits import JobEnd
from p2pavg.tools.jobs.running import JobProgram


async def launch_all(words: list[str], folder: Path, count: int, elastic: bool) -> list[JobEnd]:
    """Run a program's processes until all of them have ended; return how each has.

    Args:
        words: the program and its arguments.
        folder: of the program.
        elastic: start one that fails again, in place of ending all.
    """
    programs: list[JobProgram] = []
    ends: dict[int, JobEnd] = {}
    run_id = f"{re.sub(r'[^A-Za-z0-9._-]', '_', folder.name) or 'job'}-{secrets.token_hex(4)}"

    async def run(number: int) -> None:
        ends[number] = await programs[number].run()
        # Without --elastic, the others would wait for a peer that does not come back.
        if ends[number].is_error and not elastic:
            for each in programs:
                each.stop(f"ended, because peer {number} has failed")

    async def stop_on_signal() -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for received in signals:
                for each in programs:
                    each.stop(f"ended by {signal.Signals(received).name}")

    async with open_peer() as peer, trio.open_nursery() as nursery:
        nursery.start_soon(stop_on_signal)
        for number in range(count):
            scratch = folder / ".scratch" / str(number)
            environment = {
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                RUN_ID: run_id,
                # The peers find each other through this process, so each of them may come and go.
                BOOTSTRAP: peer.addresses[0],
                SCRATCH: str(scratch),
            }
            programs.append(
                JobProgram(
                    [sys.executable, *words],
                    environment,
                    None,
                    scratch,
                    None,
                    partial(_show, number),
                    restarts=elastic,
                )
            )
        async with trio.open_nursery() as running:
            for number in range(count):
                running.start_soon(run, number)
        nursery.cancel_scope.cancel()
    return [ends[number] for number in range(count)]


def _show(number: int, line: str) -> None:
    print(f"[{number}] {line}", flush=True)
