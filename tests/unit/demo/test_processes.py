"""Real child processes: their events arrive, and none remains at the end."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.demo_gpt.processes import Processes
from scripts.demo_gpt.progress import Progress, State

READY = (
    "from scripts.demo_gpt.channel import Channel; from scripts.demo_gpt.events import *; import os, time\n"
)
READY += "channel = Channel(); channel.send(Ready(parameters=os.getpid()))\n"
TRAIN = READY + "print('for the log'); channel.send(TrainLoss(step=1, loss=2.0))\n"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
HANG = TRAIN + "time.sleep(60)\n"


def pump_until(processes: Processes, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        processes.pump(0.05)
    assert condition()


def start(processes: Processes, code: str) -> Progress:
    progress = Progress(name="peer 0")
    processes.start(progress, "-c", code)
    return progress


def is_alive(pid: int) -> bool:
    """Return whether a child is alive. Its pid is in `parameters` in these tests."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_crash_is_seen_with_its_error(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        peer = start(processes, "raise RuntimeError('no luck')")
        pump_until(processes, lambda: peer.ended)
    assert peer.reason == "RuntimeError: no luck"
    assert "Traceback" in peer.log_tail


@pytest.mark.parametrize("deaf", ["", DEAF], ids=["obedient", "deaf"])
def test_interrupt_leaves_no_process(deaf: str, tmp_path: Path) -> None:
    peer = Progress(name="peer 0")

    def interrupted() -> None:
        with Processes(tmp_path) as processes:
            processes.start(peer, "-c", deaf + HANG)
            pump_until(processes, lambda: peer.state is State.TRAINING)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not is_alive(peer.parameters)
